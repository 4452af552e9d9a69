"""Request schedules: limits, traces and cancellations."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from loadgen.arrivals import Arrivals, Constant, Poisson, Ramp
from loadgen.errors import UsageError
from loadgen.schedule import Cancellations, Limits, Schedule, ScheduledRequest, make_schedule
from loadgen.workload.base import RequestSpec
from tests.loadgen.workloads import Same

SPEC = RequestSpec("a prompt", 2, 10)


@dataclass(frozen=True)
class Recorded:
    """Workload with recorded times."""

    times: tuple[float | None, ...]

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        return (RequestSpec(f"prompt {n}", 2, 4, at) for n, at in enumerate(self.times))


def scheduled(limits: Limits) -> Schedule:
    return make_schedule(Constant(4.0), Same(SPEC), limits, seed=0)


def test_first_limit_reached_ends_the_schedule() -> None:
    def due(limits: Limits) -> list[float]:
        return [one.due for one in scheduled(limits).requests]

    assert due(Limits(requests=3)) == [0.0, 0.25, 0.5]
    assert due(Limits(duration_s=0.6)) == [0.0, 0.25, 0.5]
    assert due(Limits(requests=2, duration_s=9.0)) == [0.0, 0.25]
    assert due(Limits(requests=9, duration_s=0.3)) == [0.0, 0.25]
    with pytest.raises(UsageError, match="number of requests or a duration"):
        Limits()


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("inf"), float("nan")])
def test_duration_is_a_positive_number(duration_s: float) -> None:
    with pytest.raises(UsageError, match="--duration must be finite and above 0"):
        Limits(duration_s=duration_s)


def test_load_ends_with_the_duration_or_when_the_next_request_would_be_due() -> None:
    assert scheduled(Limits(requests=1)).end == 0.25
    assert scheduled(Limits(requests=3)).end == 0.75
    assert scheduled(Limits(duration_s=0.6)).end == 0.6
    assert scheduled(Limits(requests=2, duration_s=9.0)).end == 0.5
    assert scheduled(Limits(requests=9, duration_s=0.3)).end == 0.3


@pytest.mark.parametrize("arrivals", [Constant(4.0), Poisson(4.0), Ramp(4.0, 8.0, 9.0)])
def test_load_ends_with_a_source_that_runs_out_before_the_duration(arrivals: Arrivals) -> None:
    limits = Limits(duration_s=9.0)
    whole = make_schedule(arrivals, Same(SPEC), limits, seed=3)
    found = make_schedule(arrivals, Recorded((None,) * 7), limits, seed=3)
    dues = [one.due for one in whole.requests]
    assert [one.due for one in found.requests] == dues[:7]
    assert found.end == dues[7]


def test_few_requests_have_the_rate_of_their_process() -> None:
    rates = [
        3 / make_schedule(Poisson(9.0), Same(SPEC), Limits(requests=3), seed=seed).end
        for seed in range(2000)
    ]
    assert sum(rates) / len(rates) == pytest.approx(9.0, rel=0.06)


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        (Limits(requests=9), 4.0),
        (Limits(requests=2), 2.0),
        (Limits(duration_s=60.0), 4.0),
        (Limits(duration_s=3.0), 3.0),  # the duration excludes only the last request
        (Limits(duration_s=1.0), 1.0),
    ],
)
def test_trace_ends_with_its_last_request(limits: Limits, end: float) -> None:
    found = make_schedule(None, Recorded((6.0, 8.0, 10.0)), limits, seed=0)
    assert found.end == pytest.approx(end, abs=1e-6)
    assert all(one.due < found.end for one in found.requests)


def test_trace_uses_its_recorded_times() -> None:
    schedule = make_schedule(None, Recorded((6.0, 2.0, 4.0)), Limits(requests=9), seed=0, speed=2.0)
    assert [one.due for one in schedule.requests] == [0.0, 1.0, 2.0]
    assert [one.spec.prompt for one in schedule.requests] == ["prompt 1", "prompt 2", "prompt 0"]
    with pytest.raises(UsageError, match="workload with times"):
        make_schedule(None, Recorded((6.0, None)), Limits(requests=9), seed=0)


def test_empty_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match="no request is due"):
        make_schedule(Poisson(1e-3), Same(SPEC), Limits(duration_s=0.001), seed=0)
    with pytest.raises(UsageError, match="no request is due"):
        make_schedule(None, Recorded(()), Limits(requests=1), seed=0)


def cancelling(cancellations: Cancellations) -> list[ScheduledRequest]:
    limits = Limits(requests=2000)
    return make_schedule(
        Poisson(9.0), Same(SPEC), limits, seed=3, cancellations=cancellations
    ).requests


def test_cancellations_change_nothing_else() -> None:
    none_cancel = cancelling(Cancellations())
    some_cancel = cancelling(Cancellations(0.25))
    assert [one.due for one in none_cancel] == [one.due for one in some_cancel]
    assert {one.cancel_after for one in none_cancel} == {None}
    cancelled = [one.cancel_after for one in some_cancel if one.cancel_after is not None]
    assert len(cancelled) == pytest.approx(500, abs=80)
    assert set(cancelled) == set(range(1, 10))
    more_cancel = cancelling(Cancellations(0.5))
    assert all(
        more.cancel_after == some.cancel_after
        for more, some in zip(more_cancel, some_cancel, strict=True)
        if some.cancel_after is not None
    )


def test_cancellations_by_time_select_the_same_requests() -> None:
    by_tokens = cancelling(Cancellations(0.25))
    by_time = cancelling(Cancellations(0.25, within_s=0.5))
    assert {one.cancel_after for one in by_time} == {None}
    assert [one.cancel_after is None for one in by_tokens] == [
        one.cancel_at_s is None for one in by_time
    ]
    times = [one.cancel_at_s for one in by_time if one.cancel_at_s is not None]
    assert min(times) < 0.05
    assert 0.45 < max(times) < 0.5


@pytest.mark.parametrize("within_s", [0.0, -1.0, float("nan")])
def test_cancellations_without_time_are_refused(within_s: float) -> None:
    with pytest.raises(UsageError, match="--cancel-within"):
        Cancellations(0.5, within_s)
