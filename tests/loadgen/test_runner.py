"""Requests are sent at their times, whatever becomes of them."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from loadgen.arrivals import Arrivals, Gamma, Poisson
from loadgen.clock import Clock
from loadgen.plan import Bounds, Planned, plan
from loadgen.record import Record
from loadgen.runner import Runner
from loadgen.workload.base import Ask
from tests.loadgen.workloads import Same

ASK = Ask("a prompt", 2, 4)


class Answering:
    """A target that answers as it is told, after so long."""

    name = "nowhere"

    def __init__(self, takes_s: Callable[[Record], float]) -> None:
        self._takes_s = takes_s

    async def send(self, planned: Planned, record: Record, clock: Clock) -> None:
        record.sent = clock()
        await asyncio.sleep(self._takes_s(record))
        record.ended = clock()

    async def close(self) -> None:
        return


def planned_at(*due: float) -> list[Planned]:
    return [Planned(ASK, at) for at in due]


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        (Poisson(50.0), stats.expon(scale=1 / 50)),
        (Gamma(50.0, 0.5), stats.gamma(0.5, scale=1 / 25)),
    ],
    ids=["poisson", "gamma"],
)
async def test_observed_send_times_are_the_process(
    arrivals: Arrivals, expected: stats.rv_continuous
) -> None:
    """Of twenty runs, at the same time."""
    runners = [
        Runner(
            plan(arrivals, Same(ASK), Bounds(requests=300), seed=seed), Answering(lambda _: 0.05)
        )
        for seed in range(20)
    ]
    await asyncio.gather(*(runner.run(Clock()) for runner in runners))
    for runner in runners:
        gaps = np.diff([0.0, *(record.sent or 0.0 for record in runner.records)])
        assert stats.kstest(gaps, expected.cdf).pvalue > 0.001


async def test_nobody_is_sent_late_because_another_is_slow() -> None:
    runner = Runner(planned_at(0.0, 0.05, 0.1, 0.15), Answering(lambda record: 0.3))
    await runner.run(Clock())
    for record in runner.records:
        assert record.sent is not None
        assert 0.0 <= record.sent - record.due < 0.15
        assert record.ended is not None
        assert record.ended - record.sent >= 0.3


async def test_a_run_that_is_stopped_leaves_what_is_under_way() -> None:
    runner = Runner(planned_at(0.0, 0.05, 5.0), Answering(lambda record: 9.0 * record.number))
    first, second, third = runner.records
    running = asyncio.create_task(runner.run(Clock()))
    async with asyncio.timeout(4.0):
        while first.ended is None or second.sent is None:  # noqa: ASYNC110 - records are plain
            await asyncio.sleep(0.01)
        runner.stopped.set()
        await running
    assert first.ended is not None
    assert second.sent is not None
    assert second.ended is None
    assert third.sent is None


async def test_a_bug_of_ours_ends_the_run() -> None:
    def broken(record: Record) -> float:
        raise ZeroDivisionError

    runner = Runner(planned_at(0.0, 60.0), Answering(broken))
    with pytest.raises(ExceptionGroup) as caught:
        await runner.run(Clock())
    assert caught.value.subgroup(ZeroDivisionError) is not None
