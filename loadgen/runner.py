"""A run: each request is sent at its time, whatever has become of those before it."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loadgen.clock import Clock
from loadgen.plan import Planned
from loadgen.record import Record
from loadgen.target.base import Target
from loadgen.timer import Timer, open_timer


class Runner:
    """Sends what was planned.

    Attributes:
        records: of all requests, in the order of their times; they fill as the run goes on.
        stopped: set it, and nothing more is sent, and what is under way is left.
    """

    def __init__(self, planned: Sequence[Planned], target: Target) -> None:
        self._planned, self._target = planned, target
        self.records = [
            Record(number, one.due, one.ask.input_tokens, one.ask.output_tokens)
            for number, one in enumerate(planned)
        ]
        self.stopped = asyncio.Event()

    async def run(self, clock: Clock) -> None:
        """Until every request has ended, or the run is stopped. ``clock`` starts again at 0.

        Raises:
            ExceptionGroup: a bug of ours; what a target does is in the records.
        """
        under_way: set[asyncio.Task[None]] = set()
        with _no_pauses(), open_timer() as timer:
            clock.restart()
            async with asyncio.TaskGroup() as tasks:
                leaver = tasks.create_task(self._leave_when_stopped(under_way, timer))
                for planned, record in zip(self._planned, self.records, strict=True):
                    await self._until(planned.due, clock, timer)
                    if self.stopped.is_set():
                        break
                    task = tasks.create_task(self._target.send(planned, record, clock))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                if under_way:
                    await asyncio.wait(under_way)
                leaver.cancel()

    async def _leave_when_stopped(self, under_way: set[asyncio.Task[None]], timer: Timer) -> None:
        await self.stopped.wait()
        timer.ring()
        for task in under_way:
            task.cancel()

    async def _until(self, due: float, clock: Clock, timer: Timer) -> None:
        if (early_s := due - clock() - timer.late_s) > 0:
            await timer.sleep(early_s)
        while clock() < due and not self.stopped.is_set():  # noqa: ASYNC110 - what is left is short
            await asyncio.sleep(0)


@contextmanager
def _no_pauses() -> Iterator[None]:
    """The garbage collector leaves alone what there is already: looking through a long plan again
    and again would hold requests up."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
