"""Request schedules: limits, traces and cancellations."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from loadgen.arrivals import Constant, Poisson
from loadgen.errors import UsageError
from loadgen.schedule import Cancellations, Limits, make_schedule
from loadgen.workload.base import RequestSpec
from tests.loadgen.workloads import Same

SPEC = RequestSpec("a prompt", 2, 10)


@dataclass(frozen=True)
class Recorded:
    """Workload with recorded times."""

    times: tuple[float | None, ...]

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        return (RequestSpec(f"prompt {n}", 2, 4, at) for n, at in enumerate(self.times))


def test_first_limit_reached_ends_the_schedule() -> None:
    def due(limits: Limits) -> list[float]:
        return [one.due for one in make_schedule(Constant(4.0), Same(SPEC), limits, seed=0)]

    assert due(Limits(requests=3)) == [0.0, 0.25, 0.5]
    assert due(Limits(duration_s=0.6)) == [0.0, 0.25, 0.5]
    assert due(Limits(requests=2, duration_s=9.0)) == [0.0, 0.25]
    assert due(Limits(requests=9, duration_s=0.3)) == [0.0, 0.25]
    with pytest.raises(UsageError, match="number of requests or a duration"):
        Limits()


def test_trace_uses_its_recorded_times() -> None:
    schedule = make_schedule(None, Recorded((6.0, 2.0, 4.0)), Limits(requests=9), seed=0, speed=2.0)
    assert [one.due for one in schedule] == [0.0, 1.0, 2.0]
    assert [one.spec.prompt for one in schedule] == ["prompt 1", "prompt 2", "prompt 0"]
    with pytest.raises(UsageError, match="workload with times"):
        make_schedule(None, Recorded((6.0, None)), Limits(requests=9), seed=0)


def test_empty_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match="no request is due"):
        make_schedule(Poisson(1e-3), Same(SPEC), Limits(duration_s=0.001), seed=0)
    with pytest.raises(UsageError, match="no request is due"):
        make_schedule(None, Recorded(()), Limits(requests=1), seed=0)


def test_cancellations_change_nothing_else() -> None:
    none_cancel = make_schedule(Poisson(9.0), Same(SPEC), Limits(requests=2000), seed=3)
    some_cancel = make_schedule(
        Poisson(9.0), Same(SPEC), Limits(requests=2000), seed=3, cancellations=Cancellations(0.25)
    )
    assert [one.due for one in none_cancel] == [one.due for one in some_cancel]
    assert {one.cancel_after for one in none_cancel} == {None}
    cancelled = [one.cancel_after for one in some_cancel if one.cancel_after is not None]
    assert len(cancelled) == pytest.approx(500, abs=80)
    assert set(cancelled) == set(range(1, 10))
    more_cancel = make_schedule(
        Poisson(9.0), Same(SPEC), Limits(requests=2000), seed=3, cancellations=Cancellations(0.5)
    )
    assert all(
        more.cancel_after == some.cancel_after
        for more, some in zip(more_cancel, some_cancel, strict=True)
        if some.cancel_after is not None
    )


def test_cancellations_by_time_select_the_same_requests() -> None:
    by_tokens, by_time = (
        make_schedule(
            Poisson(9.0), Same(SPEC), Limits(requests=2000), seed=3, cancellations=cancellations
        )
        for cancellations in (Cancellations(0.25), Cancellations(0.25, within_s=0.5))
    )
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
