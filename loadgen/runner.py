"""Runner: sends each request at its scheduled time, independent of all others."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loadgen.clock import Clock
from loadgen.record import Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Target
from loadgen.timer import Timer, open_timer


class Runner:
    """Sends a schedule of requests.

    Attributes:
        schedule: requests with their send times.
        records: one record per request, in schedule order, filled during the run.
        stopped: event that ends the run when set. No more requests are sent, and requests in flight
            are cancelled.
    """

    def __init__(self, schedule: Sequence[ScheduledRequest], target: Target) -> None:
        self.schedule = list(schedule)
        self._target = target
        self.records = [
            Record(number, one.due, one.spec.input_tokens, one.spec.output_tokens)
            for number, one in enumerate(schedule)
        ]
        self.stopped = asyncio.Event()

    async def run(self, clock: Clock) -> None:
        """Restart the clock, send all requests, and wait until all have ended or `stopped` is set.

        Raises:
            ExceptionGroup: on a bug in the load generator. Failures of the target are recorded.
        """
        in_flight: set[asyncio.Task[None]] = set()
        with gc_frozen(), open_timer() as timer:
            clock.restart()
            async with asyncio.TaskGroup() as tasks:
                canceller = tasks.create_task(self._cancel_when_stopped(in_flight, timer))
                for scheduled, record in zip(self.schedule, self.records, strict=True):
                    await self._sleep_until(scheduled.due, clock, timer)
                    if self.stopped.is_set():
                        break
                    task = tasks.create_task(self._target.send(scheduled, record, clock))
                    in_flight.add(task)
                    task.add_done_callback(in_flight.discard)
                if in_flight:
                    await asyncio.wait(in_flight)
                canceller.cancel()

    async def _cancel_when_stopped(self, in_flight: set[asyncio.Task[None]], timer: Timer) -> None:
        await self.stopped.wait()
        timer.wake()
        for task in in_flight:
            task.cancel()

    async def _sleep_until(self, due: float, clock: Clock, timer: Timer) -> None:
        if (early_s := due - clock() - timer.max_late_s) > 0:
            await timer.sleep(early_s)
        while clock() < due and not self.stopped.is_set():  # noqa: ASYNC110 - a short busy wait
            await asyncio.sleep(0)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection.

    Scanning a long schedule again and again would delay requests.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
