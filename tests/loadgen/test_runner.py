"""Requests are sent at their scheduled times, independent of each other."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
from scipy import stats

from loadgen.arrivals import Arrivals, Gamma, Poisson
from loadgen.clock import Clock
from loadgen.record import Record
from loadgen.runner import Runner
from loadgen.schedule import Limits, ScheduledRequest, make_schedule
from loadgen.workload.base import RequestSpec
from tests.loadgen.workloads import Same

SPEC = RequestSpec("a prompt", 2, 4)


class DelayedTarget:
    """Target whose answers take a given time."""

    name = "delayed"

    def __init__(self, takes_s: Callable[[Record], float]) -> None:
        self._takes_s = takes_s

    async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
        record.sent = clock()
        await asyncio.sleep(self._takes_s(record))
        record.ended = clock()

    async def close(self) -> None:
        return


def scheduled_at(*due: float) -> list[ScheduledRequest]:
    return [ScheduledRequest(SPEC, at) for at in due]


class SimulatedClock(Clock):
    """Simulated clock and timer in one: time advances only in `sleep`."""

    max_late_s = 0.0

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def restart(self) -> None:
        self._now = 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)  # lets due requests start
        self._now += seconds

    def wake(self) -> None:
        return


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        (Poisson(50.0), stats.expon(scale=1 / 50)),
        (Gamma(50.0, 0.5), stats.gamma(0.5, scale=1 / 25)),
    ],
    ids=["poisson", "gamma"],
)
async def test_send_times_follow_the_arrival_process(
    arrivals: Arrivals, expected: stats.rv_continuous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is simulated, so that the load of the machine does not affect the result."""
    for seed in range(20):
        clock = SimulatedClock()
        monkeypatch.setattr("loadgen.runner.open_timer", lambda: nullcontext(clock))  # noqa: B023
        schedule = make_schedule(arrivals, Same(SPEC), Limits(requests=300), seed=seed)
        runner = Runner(schedule.requests, DelayedTarget(lambda _: 0.0))
        await runner.run(clock)
        gaps = np.diff([0.0, *(record.sent or 0.0 for record in runner.records)])
        assert stats.kstest(gaps, expected.cdf).pvalue > 0.001


async def test_slow_answers_do_not_delay_other_requests() -> None:
    runner = Runner(scheduled_at(0.0, 0.05, 0.1, 0.15), DelayedTarget(lambda record: 3600.0))
    running = asyncio.create_task(runner.run(Clock()))
    async with asyncio.timeout(30):
        while any(record.sent is None for record in runner.records):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        runner.stopped.set()
        await running
    for record in runner.records:
        assert record.sent is not None
        assert record.sent >= record.due
        assert record.ended is None


async def test_stopped_run_cancels_requests_in_flight() -> None:
    runner = Runner(
        scheduled_at(0.0, 0.05, 3600.0), DelayedTarget(lambda record: 3600.0 * record.number)
    )
    first, second, third = runner.records
    running = asyncio.create_task(runner.run(Clock()))
    async with asyncio.timeout(30):
        while first.ended is None or second.sent is None:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
        runner.stopped.set()
        await running
    assert first.ended is not None
    assert second.sent is not None
    assert second.ended is None
    assert third.sent is None


async def test_bug_in_a_target_ends_the_run() -> None:
    def broken(record: Record) -> float:
        raise ZeroDivisionError

    runner = Runner(scheduled_at(0.0, 60.0), DelayedTarget(broken))
    with pytest.raises(ExceptionGroup) as caught:
        await runner.run(Clock())
    assert caught.value.subgroup(ZeroDivisionError) is not None
