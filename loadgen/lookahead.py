"""Requests prepared ahead of their use, for a closed loop, which cannot know how many it needs."""

import asyncio
from collections.abc import Iterator
from itertools import islice

from loadgen.errors import LoadgenError, UsageError
from loadgen.schedule import ScheduledRequest
from loadgen.workload.prompts import BLOCK

_MIN_COUNT, _PER_SLOT = 64, 8


class Lookahead:
    """Queue of prepared requests, in the order of the workload.

    Args:
        requests: requests, prepared when they are drawn; `make_requests` yields them.
        count: number of requests to prepare at first. Later, `refill` keeps this number prepared.

    Attributes:
        failed: why the preparation of further requests failed; None if it did not.
    """

    def __init__(self, requests: Iterator[ScheduledRequest], count: int) -> None:
        self._requests = requests
        self._ready: asyncio.Queue[ScheduledRequest | None] = asyncio.Queue(count)
        self.failed: str | None = None
        for request in islice(requests, count):
            self._ready.put_nowait(request)

    @classmethod
    def of(
        cls, requests: Iterator[ScheduledRequest], concurrency: int, total: int | None
    ) -> "Lookahead":
        """Prepare all requests if their number ``total`` is known, else the first ones.

        Raises:
            UsageError: if there are not more requests than slots.
        """
        made = cls(requests, total or max(_MIN_COUNT, _PER_SLOT * concurrency))
        if len(made) <= concurrency:
            raise UsageError(
                f"a closed loop of {concurrency} needs more than {concurrency} requests, and the "
                f"workload or --requests gives {len(made)}"
            )
        return made

    def __len__(self) -> int:
        """Return the number of prepared requests."""
        return self._ready.qsize()

    async def refill(self) -> None:
        """Prepare requests in a thread whenever fewer than ``count`` are left, until the last."""
        try:
            while block := await asyncio.to_thread(self._draw):
                for request in block:
                    await self._ready.put(request)
        except LoadgenError as error:  # keeps the records of the requests sent so far
            self.failed = str(error)
        await self._ready.put(None)

    async def next(self) -> ScheduledRequest | None:
        """Return the next request, or None after the last one; wait if it is not prepared yet."""
        request = await self._ready.get()
        if request is None:
            self._ready.put_nowait(None)  # the next caller gets None, too
        return request

    def _draw(self) -> list[ScheduledRequest]:
        return list(islice(self._requests, BLOCK))
