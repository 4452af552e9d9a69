"""What is sent when: bounds, traces, clients that leave."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from loadgen.arrivals import Constant, Poisson
from loadgen.errors import UsageError
from loadgen.plan import Bounds, plan
from loadgen.workload.base import Ask
from tests.loadgen.workloads import Same

ASK = Ask("a prompt", 2, 10)


@dataclass(frozen=True)
class Recorded:
    """Requests with times of their own."""

    times: tuple[float | None, ...]

    def asks(self, seed: int) -> Iterator[Ask]:
        return (Ask(f"prompt {n}", 2, 4, at) for n, at in enumerate(self.times))


def test_whatever_bound_comes_first_ends_a_plan() -> None:
    def due(bounds: Bounds) -> list[float]:
        return [one.due for one in plan(Constant(4.0), Same(ASK), bounds, seed=0)]

    assert due(Bounds(requests=3)) == [0.0, 0.25, 0.5]
    assert due(Bounds(duration_s=0.6)) == [0.0, 0.25, 0.5]
    assert due(Bounds(requests=2, duration_s=9.0)) == [0.0, 0.25]
    assert due(Bounds(requests=9, duration_s=0.3)) == [0.0, 0.25]
    with pytest.raises(UsageError, match="number of requests or a duration"):
        Bounds()


def test_a_trace_has_its_own_times() -> None:
    planned = plan(None, Recorded((6.0, 2.0, 4.0)), Bounds(requests=9), seed=0, speed=2.0)
    assert [one.due for one in planned] == [0.0, 1.0, 2.0]
    assert [one.ask.prompt for one in planned] == ["prompt 1", "prompt 2", "prompt 0"]
    with pytest.raises(UsageError, match="workload with times"):
        plan(None, Recorded((6.0, None)), Bounds(requests=9), seed=0)


def test_a_plan_without_requests_is_none() -> None:
    with pytest.raises(UsageError, match="no request is due"):
        plan(Poisson(1e-3), Same(ASK), Bounds(duration_s=0.001), seed=0)
    with pytest.raises(UsageError, match="no request is due"):
        plan(None, Recorded(()), Bounds(requests=1), seed=0)


def test_some_clients_leave_and_nothing_else_changes() -> None:
    all_stay = plan(Poisson(9.0), Same(ASK), Bounds(requests=2000), seed=3)
    some_leave = plan(Poisson(9.0), Same(ASK), Bounds(requests=2000), seed=3, cancelled=0.25)
    assert [one.due for one in all_stay] == [one.due for one in some_leave]
    assert {one.leaves_after for one in all_stay} == {None}
    left = [one.leaves_after for one in some_leave if one.leaves_after is not None]
    assert len(left) == pytest.approx(500, abs=80)
    assert set(left) == set(range(1, 10))
    more_leave = plan(Poisson(9.0), Same(ASK), Bounds(requests=2000), seed=3, cancelled=0.5)
    assert all(
        more.leaves_after == some.leaves_after
        for more, some in zip(more_leave, some_leave, strict=True)
        if some.leaves_after is not None
    )
