"""Target of several equal servers without a router of their own."""

import asyncio
from collections.abc import Sequence

from loadgen.clock import Clock
from loadgen.record import Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Target


class Replicas:
    """Distributes requests over targets in turn, so that each receives the same rate."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self.name = ", ".join(target.name for target in targets)

    async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
        """Send the request to the target with the index ``record.number`` modulo their number."""
        target = self._targets[record.number % len(self._targets)]
        await target.send(scheduled, record, clock)

    async def close(self) -> None:
        await asyncio.gather(*(target.close() for target in self._targets))
