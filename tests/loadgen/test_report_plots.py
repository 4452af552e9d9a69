"""Data, scales and number formats of plots."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measures import E2E, ITL, TTFT
from loadgen.number import counted, exact, ms, percent, plain, size, tick
from loadgen.record import Failure, Record
from loadgen.report.cdf import distribution
from loadgen.report.latencies import Latencies, latencies
from loadgen.report.scale import Scale
from loadgen.report.timeline import Timeline, _fault_labels
from tests.loadgen.made_runs import records_of


def test_distribution_of_few_values_is_exact() -> None:
    at, share = distribution(np.array([3.0, 1.0, 2.0, 2.0]))
    assert at.tolist() == [1, 2, 2, 3]
    assert share.tolist() == [25, 50, 75, 100]


def test_distribution_of_many_values_is_thinned_and_keeps_its_tail() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, 200_000)
    at, share = distribution(values)
    assert at.size < 400
    assert at[0] == values.min()
    assert at[-1] == values.max()
    for which in (10, 50, 90, 99, 99.9):
        assert np.interp(which, share, at) == pytest.approx(np.percentile(values, which), rel=0.02)


def test_faults_of_a_kind_share_a_label() -> None:
    kill: dict[str, Any] = {"what": "kill decode-1"}
    cut: dict[str, Any] = {"what": "run ./cut for 2 s"}
    failed = kill | {"failed": "no such process"}
    faults = [kill | {"at": 4.04}, cut | {"at": 5}, kill | {"at": 104.26}, failed | {"at": 110.0}]
    assert _fault_labels(faults) == [
        "4.04, 104.3 s: kill decode-1",
        "5 s: run ./cut for 2 s",
        "110 s: kill decode-1 (failed)",
    ]


def test_timeline_of_two_requests() -> None:
    """Bins of 50 ms. One request lasts from 0 to 125 ms; one from 50 to 100 ms fails."""
    records = [
        Record(0, 0.0, 5, 3, 0.0, [0.06, 0.07, 0.12], [1, 1, 1], 0.125, reported_tokens=6),
        Record(1, 0.05, 5, 3, 0.05, ended=0.1 - 1e-9, failure=Failure.RESET),
        Record(2, 9.0, 5, 3),  # never sent
    ]
    found = Timeline.of(records)
    assert found is not None
    assert found.edges.tolist() == pytest.approx([0, 0.05, 0.1, 0.15])
    assert found.tokens.tolist() == pytest.approx([0, 4 / 0.05, 2 / 0.05])
    assert found.in_flight.tolist() == pytest.approx([1, 2, 0.5])
    assert found.sent.tolist() == pytest.approx([20, 20, 0])
    assert found.answered.tolist() == pytest.approx([0, 0, 20])
    assert found.failed.tolist() == pytest.approx([0, 20, 0])


def test_timeline_sums_match_the_records() -> None:
    records = records_of(30, 60, failing=0.1, cancelling=0.1)
    found = Timeline.of(records)
    assert found is not None
    width = found.edges[1] - found.edges[0]
    assert found.tokens.sum() * width == pytest.approx(sum(r.output_tokens for r in records))
    under_way = sum((r.ended or 0) - (r.sent or 0) for r in records)
    assert found.in_flight.sum() * width == pytest.approx(under_way)
    assert found.sent.sum() * width == pytest.approx(len(records))
    assert len(found.edges) <= 102


def test_unfinished_requests_are_in_flight_until_the_end() -> None:
    found = Timeline.of([Record(0, 0.0, 5, 3, 0.0, [1.0], [1])])
    assert found is not None
    assert found.in_flight.tolist() == pytest.approx([1.0] * len(found.in_flight))
    assert Timeline.of([Record(0, 0.0, 5, 3)]) is None


def test_latencies_by_time() -> None:
    """Four bins of 10 s: TTFT counts at the due time, gaps when they end; one request fails."""
    records = [
        Record(0, 1.0, 5, 3, 1.0, [3.0, 4.0, 15.0], [1, 1, 1], 15.0),
        Record(1, 2.0, 5, 1, 2.0, [6.0], [1], 6.0),
        Record(2, 25.0, 5, 2, 25.0, [30.0, 31.0], [1, 1], 31.0, failure=Failure.RESET),
        Record(3, 39.0, 5, 1, 39.0, [39.5], [1], 39.5),
    ]
    edges = np.arange(0.0, 50.0, 10.0)
    ttft, itl = (Latencies.of(records, measure, edges) for measure in (TTFT, ITL))
    assert ttft.p50.tolist() == pytest.approx([3.0, np.nan, np.nan, 0.5], nan_ok=True)
    assert ttft.p99.tolist() == pytest.approx([3.98, np.nan, np.nan, 0.5], nan_ok=True)
    assert itl.p50.tolist() == pytest.approx([1.0, 11.0, np.nan, np.nan], nan_ok=True)


def test_latencies_by_time_keep_all_values() -> None:
    records = records_of(30, 60, failing=0.1, cancelling=0.1)
    found = latencies(records, 70.0)
    assert [one.measure for one in found] == [TTFT, ITL, E2E]
    for one in found:
        assert one.edges[-1] >= 70.0
        assert len(one.edges) <= 61
        values = [value for record in records for value in one.measure.of(record)]
        assert np.nanmin(one.p50) >= min(values)
        assert np.nanmax(one.p99) <= max(values)
    assert latencies([Record(0, 0.0, 5, 3)], 70.0) == []


@given(st.floats(1e-4, 1e7), st.floats(1, 1e9))
def test_scales_contain_their_values_and_have_few_ticks(low: float, factor: float) -> None:
    for scale in (Scale.fitting(low, low * factor), Scale.linear(low)):
        high = low * factor if scale.is_log else low
        assert scale.low <= low
        assert high <= scale.high
        assert 2 <= len(scale.ticks) <= 8
        assert list(scale.ticks) == sorted(set(scale.ticks))
        assert scale.low <= scale.ticks[0] * (1 + 1e-9)
        assert scale.ticks[-1] <= scale.high
    assert Scale.fitting(low, low * factor).is_log == (factor > 20 * (1 + 1e-9)) or factor < 20.1


def test_scale_of_zero() -> None:
    assert Scale.fitting(0, 0).ticks == pytest.approx((0, 0.2, 0.4, 0.6, 0.8, 1.0))


def test_numbers_have_three_significant_digits() -> None:
    assert [plain(x) for x in (0, 0.0511, 1.254, 12.34, 99.96, 1234.5, 7, None)] == [
        "0", "0.051", "1.25", "12.3", "100", "1,234", "7", "–",
    ]  # fmt: skip
    assert [ms(x) for x in (0.0000511, 0.02, 0.9996, 1.2345, None)] == [
        "0.051", "20.0", "1,000", "1,234", "–",
    ]  # fmt: skip
    assert [percent(x) for x in (0, 0.0004, 0.5, 0.9996, 1)] == [
        "0", "< 0.1", "50.0", "> 99.9", "100",
    ]  # fmt: skip
    assert [size(x) for x in (12, 1536, 3.2e9)] == ["12 B", "1.50 KiB", "2.98 GiB"]
    assert [tick(x) for x in (0.05, 0, 2.5, 5000, 20_000, 2.5e6)] == [
        "0.05", "0", "2.5", "5,000", "20k", "2.5M",
    ]  # fmt: skip


def test_counts_have_singular_and_plural() -> None:
    assert [counted(x, "request") for x in (0, 1, 0.5, 2, 1_234_567)] == [
        "0 requests", "1 request", "0.5 requests", "2 requests", "1,234,567 requests",
    ]  # fmt: skip
    assert [exact(x) for x in (0.25, 10.3, 1500.0)] == ["0.25", "10.3", "1,500"]
