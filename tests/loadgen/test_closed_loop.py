"""A closed loop keeps its slots full, in the order of the workload."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from rich.console import Console

from loadgen.arrivals import Poisson
from loadgen.clock import Clock
from loadgen.closed_loop import FAILURE_PERIOD_S, ClosedLoop
from loadgen.config import ArrivalConfig, Process, RunConfig, WorkloadConfig
from loadgen.errors import UsageError
from loadgen.live import progress
from loadgen.lookahead import Lookahead
from loadgen.record import Failure, Record
from loadgen.schedule import (
    Cancellations,
    Limits,
    ScheduledRequest,
    make_requests,
    make_schedule,
)
from loadgen.workload.base import RequestSpec
from loadgen.workload.prompts import BLOCK


@dataclass(frozen=True)
class Drawn:
    """``count`` requests drawn from the seed, followed by an error if ``broken``."""

    count: int = 10**9
    broken: bool = False

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        draws = np.random.default_rng(seed)
        for number in range(self.count):
            words, answer = draws.integers(2, 50, size=2).tolist()
            yield RequestSpec(f"{number}:" + words * "a", words, answer)
        if self.broken:
            raise UsageError("the tokenizer is gone")


class Target:
    """Target that calls ``answer`` and records the requests in flight at each send."""

    name = "fake"

    def __init__(self, answer: Callable[[Record], float | Failure]) -> None:
        self._answer = answer
        self._now = 0
        self.in_flight: list[int] = []
        self.sent: list[ScheduledRequest] = []

    async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
        self._now += 1
        self.in_flight.append(self._now)
        self.sent.append(scheduled)
        record.sent = clock()
        answer = self._answer(record)
        if isinstance(answer, Failure):
            record.failure = answer
        else:
            await asyncio.sleep(answer)
        self._now -= 1
        record.ended = clock()

    async def close(self) -> None:
        return


class StoppedClock(Clock):
    """Clock that a test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def restart(self) -> None:
        self.now = 0.0


def closed_loop(
    target: Target,
    concurrency: int,
    requests: int | None = None,
    *,
    duration_s: float | None = None,
    ahead: int = 20,
) -> ClosedLoop:
    made = Lookahead(make_requests(Drawn(), Limits(requests, duration_s), seed=5), ahead)
    return ClosedLoop(made, target, concurrency, duration_s)


@pytest.mark.parametrize("concurrency", [1, 3, 16])
async def test_each_ended_request_is_followed_by_the_next(concurrency: int) -> None:
    """The answers of each slot take different times; some end in the same iteration."""
    target = Target(lambda record: 0.001 * (record.number % 4))
    runner = closed_loop(target, concurrency, 100, ahead=100)
    await runner.run(Clock())
    assert target.in_flight == [min(n, concurrency) for n in range(1, 101)]
    assert [record.number for record in runner.records] == list(range(100))
    for record in runner.records:
        assert record.sent is not None
        assert record.ended is not None
        assert record.due <= record.sent
    assert runner.load_end == runner.records[-1].due


@pytest.mark.parametrize("seed", [0, 7])
def test_requests_are_those_of_the_open_loop(seed: int) -> None:
    limits = Limits(requests=300)
    opened = make_schedule(
        Poisson(5.0), Drawn(), limits, seed=seed, cancellations=Cancellations(0.3)
    )
    closed = list(make_requests(Drawn(), limits, seed=seed, cancellations=Cancellations(0.3)))
    assert closed == [replace(one, due=0.0) for one in opened.requests]
    assert any(one.cancel_after for one in closed)


async def test_requests_are_prepared_during_the_run_in_order() -> None:
    """Far fewer requests are prepared before the run than it sends."""
    target = Target(lambda record: 0.0)
    runner = closed_loop(target, 4, 500, ahead=5)
    await runner.run(Clock())
    expected = make_requests(Drawn(), Limits(requests=500), seed=5)
    assert [replace(one, due=0.0) for one in target.sent] == list(expected)
    assert runner.schedule == target.sent


async def test_failed_preparation_ends_the_load_and_keeps_the_records() -> None:
    limits = Limits(duration_s=3600.0)
    requests = Lookahead(make_requests(Drawn(40, broken=True), limits, seed=0), 4)
    runner = ClosedLoop(requests, Target(lambda record: 0.0), 2, 3600.0)
    await runner.run(Clock())
    assert requests.failed == "the tokenizer is gone"
    assert len(runner.records) == 4 + 2 * BLOCK  # the third block fails
    assert runner.load_end == runner.records[-1].due


async def test_no_request_is_sent_after_the_end_and_those_in_flight_are_awaited() -> None:
    clock = StoppedClock()

    def answer(record: Record) -> float:
        clock.now += 1.0
        return 0.01

    runner = closed_loop(Target(answer), 3, duration_s=10.0)
    await runner.run(clock)
    assert len(runner.records) == 10
    assert all(record.succeeded for record in runner.records)
    assert all(record.due < 10.0 for record in runner.records)
    assert runner.load_end == 10.0


async def test_slot_waits_after_a_request_that_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loadgen.closed_loop.FAILURE_PERIOD_S", 3600.0)
    target = Target(lambda record: Failure.REFUSED)
    runner = closed_loop(target, 3, duration_s=7200.0)
    running = asyncio.create_task(runner.run(Clock()))
    await asyncio.sleep(0.2)
    runner.stopped.set()
    await running
    assert [record.failure for record in runner.records] == [Failure.REFUSED] * 3


async def test_slow_failure_is_followed_at_once() -> None:
    clock = StoppedClock()

    def answer(record: Record) -> Failure:
        clock.now += FAILURE_PERIOD_S
        return Failure.TIMEOUT

    runner = closed_loop(Target(answer), 1, 1000)
    async with asyncio.timeout(60):
        await runner.run(clock)
    assert len(runner.records) == 1000
    for before, after in zip(runner.records, runner.records[1:], strict=False):
        assert after.due == before.ended


async def test_stopped_run_cancels_requests_in_flight() -> None:
    target = Target(lambda record: 3600.0 if record.number > 4 else 0.0)
    runner = closed_loop(target, 4, duration_s=7200.0)
    running = asyncio.create_task(runner.run(Clock()))
    async with asyncio.timeout(30):
        while len(target.sent) < 9:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
        runner.stopped.set()
        await running
    assert [record.ended is None for record in runner.records] == [False] * 5 + [True] * 4
    assert runner.load_end == runner.ended_at
    assert runner.load_end > max(record.due for record in runner.records)


async def test_requests_sent_at_once_are_the_load_until_the_last_one_has_ended() -> None:
    """The pause after a failure is not a part of it."""
    target = Target(lambda record: 0.05 if record.number else Failure.REFUSED)
    runner = closed_loop(target, 4, 4)
    await runner.run(Clock())
    assert runner.load_end == max(record.ended or 0.0 for record in runner.records) < 1.0


async def test_bug_in_a_target_ends_the_run() -> None:
    def broken(record: Record) -> float:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await closed_loop(Target(broken), 2, duration_s=60.0).run(Clock())
    assert caught.value.subgroup(ZeroDivisionError) is not None


async def test_progress_is_shown_without_a_schedule() -> None:
    target = Target(lambda record: 0.0)
    runner = closed_loop(target, 2, 10)
    console = Console(width=80)
    with console.capture() as before:
        console.print(progress(runner, 0.0))
    await runner.run(Clock())
    with console.capture() as after:
        console.print(progress(runner, 3.0))
    assert "sent       0" in before.get()
    assert "sent       10\n" in "\n".join(map(str.rstrip, after.get().splitlines()))


@pytest.mark.parametrize(
    ("arrivals", "options"),
    [
        (ArrivalConfig(rate=2.0), "--rate"),
        (ArrivalConfig(Process.POISSON), "--arrivals"),
        (ArrivalConfig(Process.RAMP, 1.0, 2.0), "--arrivals, --rate, --to-rate"),
        (ArrivalConfig(burstiness=0.5), "--burstiness"),
    ],
)
def test_options_of_open_loops_are_refused(arrivals: ArrivalConfig, options: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be combined with {options}$"):
        RunConfig("http://a/v1", WorkloadConfig(), arrivals, Limits(1), concurrency=4)


def test_early_end_and_empty_loop_are_refused() -> None:
    config = RunConfig("http://a/v1", WorkloadConfig(), ArrivalConfig(), Limits(1), concurrency=4)
    with pytest.raises(UsageError, match="an early end"):
        replace(config, give_up=0.9)
    with pytest.raises(UsageError, match="--speed"):
        replace(config, speed=2.0)
    with pytest.raises(UsageError, match="at least 1"):
        replace(config, concurrency=0)
