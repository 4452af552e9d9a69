"""Target of several equal servers without a router of their own."""

import asyncio
from collections.abc import Sequence

from loadgen.clock import Clock
from loadgen.record import Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Target


class Replicas:
    """Distributes requests over targets in turn, so that each receives the same rate.

    All turns of a chat are sent to the target of its first one, whose prefix cache has its history.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self.name = ", ".join(target.name for target in targets)

    async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
        """Send a request to the target given by the index of its chat, or by its own index."""
        index = record.number if record.chat is None else record.chat
        target = self._targets[index % len(self._targets)]
        await target.send(scheduled, record, clock)

    async def close(self) -> None:
        await asyncio.gather(*(target.close() for target in self._targets))
