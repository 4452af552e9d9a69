"""Comparisons of runs and sweeps, and the coverage of their intervals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.compare import Runs, Side, compare
from loadgen.errors import UsageError
from loadgen.files import write_run
from loadgen.measures import Window
from loadgen.record import Record
from loadgen.statistics import bootstrap, bootstrap_interval, ratio_interval
from loadgen.summary import Summary


def records_of(latencies: list[float]) -> list[Record]:
    return [
        Record(n, n / 10, 5, 1, sent=n / 10, times=[n / 10 + one], counts=[1], ended=n / 10 + one)
        for n, one in enumerate(latencies)
    ]


def summary_of(latencies: list[float], seed: int = 0) -> dict[str, Any]:
    records = records_of(latencies)
    window = Window(0.0, len(records) / 10)
    return {"manifest": {"seed": seed}, **Summary.of(records, window).as_json()}


def side(name: str, runs: dict[float, list[list[float]]], first: int = 0) -> Side:
    made: dict[float | None, Runs] = {}
    for rate, lists in runs.items():
        seeds = tuple(range(first, first + len(lists)))
        made[rate] = Runs(seeds, tuple(map(summary_of, lists)))
    return Side(name, {"target": name}, made)


def row_of(document: dict[str, Any], figure: str) -> dict[str, Any]:
    return next(row for row in document["rows"] if row["figure"] == figure)


def test_paired_ratio_interval_of_two_pairs() -> None:
    """The logarithms of the ratios 2 and 8 have mean log 4 and standard error log 2.

    The t quantile t(0.975, 1) is 12.706.
    """
    found = ratio_interval([1.0, 1.0], [2.0, 8.0], paired=True)
    assert found is not None
    assert found.mean == pytest.approx(4.0)
    assert found.high == pytest.approx(4.0 * 2.0**12.7062, rel=1e-3)
    assert found.low == pytest.approx(4.0 / 2.0**12.7062, rel=1e-3)
    assert ratio_interval([1.0, 0.0], [2.0, 8.0], paired=True) is None
    alone = ratio_interval([2.0], [1.0, 1.0], paired=False)
    assert alone is not None
    assert alone.mean == pytest.approx(0.5)
    assert alone.as_json()["low"] is None
    equal = ratio_interval([2.0, 2.0], [1.0, 1.0], paired=False)
    assert equal is not None
    assert equal.low == equal.high == pytest.approx(0.5)


def test_unpaired_ratio_interval_covers_the_true_ratio() -> None:
    draws = np.random.default_rng(3)
    hits = 0
    for _ in range(2000):
        a, b = draws.lognormal(0.0, 0.3, 4), draws.lognormal(0.5, 0.1, 5)
        found = ratio_interval(list(a), list(b), paired=False)
        assert found is not None
        hits += found.low <= np.exp(0.5) <= found.high
    assert hits / 2000 == pytest.approx(0.95, abs=0.02)


@pytest.mark.few(1)
@pytest.mark.parametrize(("statistic", "truth"), [("mean", 1.0), ("p50", np.log(2)), ("p90", 2.3)])
def test_bootstrap_interval_covers_the_true_statistic(statistic: str, truth: float) -> None:
    draws = np.random.default_rng(4)
    hits = 0
    for number in range(200):
        groups = [[float(value)] for value in draws.exponential(1.0, 300)]
        found = bootstrap(groups, statistic, seed=number)
        interval = bootstrap_interval(float(np.median(found)), found)
        hits += interval.low <= truth <= interval.high
    assert hits / 200 == pytest.approx(0.95, abs=0.05)


def test_bootstrap_resamples_whole_requests() -> None:
    """Ten requests, each with a hundred equal values, count as ten samples, not a thousand."""
    groups = [[float(n)] * 100 for n in range(10)]
    assert bootstrap(groups, "mean").std() == pytest.approx((8.25 / 10) ** 0.5, rel=0.2)


def test_sweeps_are_compared_at_common_rates() -> None:
    a = side("before", {1.0: [[1.0, 2.0, 3.0], [1.0, 1.0, 4.0]], 2.0: [[5.0]]})
    b = side("after", {1.0: [[0.5, 1.0, 1.5], [0.5, 0.5, 2.0]], 4.0: [[5.0]]})
    document = compare(a, b)
    assert {row["rate"] for row in document["rows"]} == {1.0}
    row = row_of(document, "e2e:p50")
    assert (row["a"]["mean"], row["b"]["mean"]) == (1.5, 0.75)
    # the ratio of every pair is 0.5
    assert row["ratio"]["mean"] == row["ratio"]["low"] == pytest.approx(0.5)
    assert (row["better"], row["unit"]) == ("less", "s")
    assert row_of(document, "throughput")["better"] == "more"
    assert row_of(document, "failures")["ratio"] is None
    assert not any(row["figure"] == "attainment" for row in document["rows"])
    with pytest.raises(UsageError, match="no rate in common"):
        compare(a, side("other", {8.0: [[1.0]]}))


def test_single_runs_are_compared_by_bootstrap(tmp_path: Path) -> None:
    draws = np.random.default_rng(1)
    for name, scale in (("a", 1.0), ("b", 3.0)):
        latencies = [float(one) for one in draws.exponential(scale, 400)]
        write_run(tmp_path / name, records_of(latencies), summary_of(latencies))
    document = compare(Side.read(tmp_path / "a"), Side.read(tmp_path / "b", "slow"))
    assert (document["a"]["name"], document["b"]["name"]) == ("a", "slow")
    row = row_of(document, "e2e:p50")
    assert row["rate"] is None
    assert row["a"]["low"] < row["a"]["mean"] < row["a"]["high"]
    assert 1.0 < row["ratio"]["low"] < 3.0 < row["ratio"]["high"] < 5.0
    assert row_of(document, "throughput")["ratio"]["low"] is None  # a single run has no interval
    with pytest.raises(UsageError, match="holds no run"):
        Side.read(tmp_path)


def test_invalid_runs_of_a_comparison_are_named() -> None:
    a = side("before", {1.0: [[1.0], [2.0]], 2.0: [[1.0]]})
    b = side("after", {1.0: [[1.0], [2.0]], 2.0: [[1.0]]})
    assert compare(a, b)["invalid"] == []
    b.runs[1.0].summaries[1].update(invalid="it was late", remedy="Use another machine.")
    assert compare(a, b)["invalid"] == [
        "after is invalid at 1 request per second, 1 of 2 runs: it was late. Use another machine."
    ]
    alone = Side("x", {}, {None: b.runs[1.0]})
    assert compare(alone, alone)["invalid"][0].startswith("x is invalid: it was late.")
