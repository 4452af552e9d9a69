"""Closed loop: a fixed number of requests or chats in flight, each followed by another one."""

import asyncio
from dataclasses import replace

from loadgen.clock import Clock
from loadgen.lookahead import Lookahead
from loadgen.runner import Runner, gc_frozen
from loadgen.target.base import Target

FAILURE_PERIOD_S = 1.0
"""Minimum seconds from sending a request that fails to sending the next one in its slot.

A server that refuses requests at once receives at most one per second and slot.
"""


class ClosedLoop(Runner):
    """Sends requests in ``concurrency`` slots; each slot sends one request after another.

    If requests begin chats, each slot plays one chat after another.

    A request is due when its slot is free: when the request before it has ended or, if that one
    failed, `FAILURE_PERIOD_S` after it was sent. It is sent at once unless it is not prepared yet.
    `schedule` and `records` grow during the run, in the order of the workload.

    Args:
        duration_s: seconds after which no more requests are sent; None for no limit.
        keep_answers: whether records keep the answers that targets store in them.
    """

    def __init__(
        self,
        requests: Lookahead,
        target: Target,
        concurrency: int,
        duration_s: float | None,
        *,
        keep_answers: bool = True,
    ) -> None:
        super().__init__([], target, duration_s=duration_s, keep_answers=keep_answers)
        self._requests = requests
        self._concurrency = concurrency
        self._exhausted = False

    @property
    def load_end(self) -> float:
        """Time until which all slots were in use: the duration, or when the run was stopped.

        If the requests ran out before, it is the last send. If no slot had a second request, the
        requests were sent at once; then it is the end of the last one.
        """
        if not self._exhausted:
            return (
                self.ended_at if self._duration_s is None else min(self.ended_at, self._duration_s)
            )
        return super().load_end if len(self.records) > self._concurrency else self.ended_at

    async def run(self, clock: Clock) -> None:
        """Restart the clock, send requests until the end, and wait until all sent ones have ended.

        If `stopped` is set, requests in flight are cancelled.

        Raises:
            ExceptionGroup: on a bug in the load generator. Failures of the target are recorded.
        """
        with gc_frozen():
            clock.restart()
            async with asyncio.TaskGroup() as tasks:
                refill = tasks.create_task(self._requests.refill())
                slots = [
                    tasks.create_task(self._fill_slot(clock)) for _ in range(self._concurrency)
                ]
                canceller = tasks.create_task(self._cancel_slots_when_stopped(slots))
                await asyncio.wait(slots)
                refill.cancel()
                canceller.cancel()
            # Not the end of the slots, which pause after failures.
            ends = [record.ended for record in self.records if record.ended is not None]
            stops_now = self.stopped.is_set() or not self._exhausted
            self.ended_at = clock() if stops_now else max(ends, default=clock())

    async def _fill_slot(self, clock: Clock) -> None:
        while not self._is_over(due := clock()):
            request = await self._requests.next()
            if request is None:
                self._exhausted = True
                return
            if self._is_over(clock()):
                return
            record = self._add(replace(request, due=due))
            last = await self._play(self.schedule[record.number], record, clock)
            if last.failure is not None and last.sent is not None:
                await asyncio.sleep(last.sent + FAILURE_PERIOD_S - clock())

    def _is_over(self, now: float) -> bool:
        return self._duration_s is not None and now >= self._duration_s

    async def _cancel_slots_when_stopped(self, slots: list[asyncio.Task[None]]) -> None:
        await self.stopped.wait()
        for slot in slots:
            slot.cancel()
