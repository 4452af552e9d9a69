"""Early end of a run, and hang-up of all clients: all requests in flight are cancelled at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.clock import Clock
from loadgen.measures import TTFT, Objective, Window
from loadgen.record import Record
from loadgen.runner import Runner

_PERIOD_S = 0.2


@dataclass
class EarlyEnd:
    """Ends a run as soon as the required attainment cannot be reached any more.

    Attributes:
        attainment: required fraction of requests that meet all objectives; None never ends a run.
        window: measured part of the run.
        gave_up: whether the run was ended.
    """

    attainment: float | None
    window: Window
    objectives: Sequence[Objective]
    gave_up: bool = False

    async def watch(self, runner: Runner, clock: Clock) -> None:
        """Check the records periodically, and stop the runner if `is_out_of_reach`.

        Returns when it has stopped the runner, or at once if ``attainment`` is None.
        """
        while self.attainment is not None and not self.gave_up:
            await asyncio.sleep(_PERIOD_S)
            if not runner.stopped.is_set() and self.is_out_of_reach(
                runner.records, clock(), runner.turns_left
            ):
                self.gave_up = True
                runner.stopped.set()

    def is_out_of_reach(self, records: Sequence[Record], now: float, more: int = 0) -> bool:
        """Return whether the required attainment is missed even if all other requests meet it.

        Args:
            more: number of further requests, which have no records yet.
        """
        if self.attainment is None:
            return False
        measured = [record for record in records if self.window.has(record.due)]
        missed = sum(self._has_missed(record, now) for record in measured)
        total = len(measured) + more
        return bool(measured) and (total - missed) / total < self.attainment

    def _has_missed(self, record: Record, now: float) -> bool:
        if record.cancelled:
            return False
        if record.failure is not None:
            return True
        if record.sent is None:
            return False
        if record.first is None:  # waiting
            bounds = [one.seconds for one in self.objectives if one.measure is TTFT]
            return any(now - record.due > seconds for seconds in bounds)
        return not all(objective.met_by(record) for objective in self.objectives)


@dataclass
class HangUp:
    """Ends a run at a given time.

    Attributes:
        at_s: time since the start of the run, seconds; None never ends it.
        done: whether the run was ended.
    """

    at_s: float | None
    done: bool = False

    async def watch(self, runner: Runner, clock: Clock) -> None:
        """Wait until ``at_s``, and stop the runner unless it was stopped before."""
        if self.at_s is None:
            return
        while (early_s := self.at_s - clock()) > 0:  # noqa: ASYNC110 - timers may be early
            await asyncio.sleep(early_s)
        if not runner.stopped.is_set():
            self.done = True
            runner.stopped.set()
