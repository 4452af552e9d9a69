"""Runner: sends each request at its scheduled time, and later turns of chats after the answers."""

import asyncio
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loadgen.chat import later_turns, next_turn
from loadgen.clock import Clock
from loadgen.record import Failure, Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Target
from loadgen.timer import Timer, open_timer


class Runner:
    """Sends a schedule of requests, and of chats, whose later turns follow the answers.

    If a turn fails, its chat ends, and the later turns are recorded as not sent.

    Args:
        end: time at which the load of ``schedule`` ends, if later turns of chats do not prolong it.
        duration_s: seconds after which no later turn of a chat is sent; None for no limit.
        keep_answers: whether records keep the answers that targets store in them.

    Attributes:
        schedule: requests with their send times. The later turns of chats are added during the run.
        records: one record per request of `schedule`, filled during the run.
        stopped: event that ends the run when set. No more requests are sent, and requests in flight
            are cancelled.
        turns_left: number of later turns that may still be sent.
        ended_at: time at which the last request had ended or, in a run that was stopped, was
            cancelled; infinite until then.
    """

    def __init__(
        self,
        schedule: Sequence[ScheduledRequest],
        target: Target,
        *,
        end: float = 0.0,
        duration_s: float | None = None,
        keep_answers: bool = True,
    ) -> None:
        self.schedule: list[ScheduledRequest] = []
        self.records: list[Record] = []
        self.stopped = asyncio.Event()
        self.turns_left = 0
        self.ended_at = math.inf
        self._target = target
        self._end = end
        self._duration_s = duration_s
        self._keep_answers = keep_answers
        self._chats = 0
        for scheduled in schedule:
            self._add(scheduled)

    @property
    def load_end(self) -> float:
        """Time at which the load ends: with the schedule or with the last turn of a chat.

        If the duration cuts off a chat, it is the duration.
        """
        return max([self._end, *(record.due for record in self.records)])

    async def run(self, clock: Clock) -> None:
        """Restart the clock, send all requests, and wait until all have ended or `stopped` is set.

        Raises:
            ExceptionGroup: on a bug in the load generator. Failures of the target are recorded.
        """
        in_flight: set[asyncio.Task[Record]] = set()
        with gc_frozen(), open_timer() as timer:
            clock.restart()
            async with asyncio.TaskGroup() as tasks:
                canceller = tasks.create_task(self._cancel_when_stopped(in_flight, timer))
                for scheduled, record in list(zip(self.schedule, self.records, strict=True)):
                    await self._sleep_until(scheduled.due, clock, timer)
                    if self.stopped.is_set():
                        break
                    task = tasks.create_task(self._play(scheduled, record, clock))
                    in_flight.add(task)
                    task.add_done_callback(in_flight.discard)
                if in_flight:
                    await asyncio.wait(in_flight)
                canceller.cancel()
            self.ended_at = clock()

    def _add(self, scheduled: ScheduledRequest, before: Record | None = None) -> Record:
        """Add a request to the schedule and return its record.

        Args:
            before: record of the previous turn; None for a single request or a first turn.
        """
        spec = scheduled.spec
        record = Record(len(self.records), scheduled.due, spec.input_tokens, spec.output_tokens)
        if before is not None:
            record.chat, record.turn = before.chat, before.turn + 1
            self.turns_left -= 1
        elif spec.later is not None:
            record.chat = self._chats
            self._chats += 1
            self.turns_left += len(spec.later)
        self.schedule.append(scheduled)
        self.records.append(record)
        return record

    async def _play(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> Record:
        """Send a request and all later turns of its chat; return the record of the last one."""
        while True:
            await self._target.send(scheduled, record, clock)
            if not scheduled.spec.later or not record.succeeded:
                self._end_chat(scheduled, record)
                return record
            scheduled = next_turn(scheduled, record)
            self._forget(record)
            if self._duration_s is not None and scheduled.due >= self._duration_s:
                self.turns_left -= 1 + len(scheduled.spec.later or ())
                self._end = self._duration_s
                return record
            while (early_s := scheduled.due - clock()) > 0:  # noqa: ASYNC110 - timers may be early
                await asyncio.sleep(early_s)
            record = self._add(scheduled, record)

    def _end_chat(self, scheduled: ScheduledRequest, last: Record) -> None:
        """Record the turns after the last one as not sent; there are some only if it failed."""
        self._forget(last)
        detail = f"turn {last.turn} of its chat {last.failure and last.failure.words}"
        due = last.due if last.ended is None else last.ended
        before = last
        for later in later_turns(scheduled, due):
            before = self._add(later, before)
            before.ended, before.failure, before.detail = due, Failure.NOT_SENT, detail

    def _forget(self, record: Record) -> None:
        if not self._keep_answers:
            record.text = ""
            record.token_ids = []

    async def _cancel_when_stopped(
        self, in_flight: set[asyncio.Task[Record]], timer: Timer
    ) -> None:
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
