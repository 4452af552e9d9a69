"""Gaps of streams that run at the same time, within a window of time."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from loadgen.record import Record
from loadgen.statistics import Distribution
from loadgen.workload.base import RequestSpec
from tests.programs.serving_bench.client import Client, RequestRefused, check

_SETTLE_S = 0.5
"""Seconds before each window that are not measured."""


@dataclass(frozen=True)
class Window:
    """A window in which streams ran.

    Attributes:
        begin, end: seconds of the clients' clock.
        records: record of each stream, in their order.
    """

    begin: float
    end: float
    records: list[Record]

    def gaps(self, streams: slice = slice(None)) -> list[float]:
        """Return the gaps of some streams that end within the window, in seconds."""
        return [
            later - at
            for record in self.records[streams]
            for at, later in pairwise(record.times)
            if self.begin <= later < self.end
        ]


def described(gaps: Sequence[float]) -> dict[str, Any]:
    """Return the distribution of gaps.

    Raises:
        RequestRefused: if there are none.
    """
    found = Distribution.of(gaps)
    if found is None:
        raise RequestRefused("no stream advanced")
    return {
        "count": found.count,
        "mean": found.mean,
        "p50": found.percentile(50.0),
        "p99": found.percentile(99.0),
        "max": found.maximum,
    }


async def window(
    streams: Sequence[tuple[Client, RequestSpec]],
    seconds: float,
    feeds: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
) -> Window:
    """Start streams, and let them run for ``seconds`` after all have begun; then cancel them.

    Args:
        feeds: run beside the streams until the end.

    Raises:
        RequestRefused: if a stream or a feed has failed, or a stream ended too early.
    """
    records = [client.start(spec) for client, spec in streams]
    tasks = [
        asyncio.create_task(client.finish(spec, record))
        for (client, spec), record in zip(streams, records, strict=True)
    ]
    clock = streams[0][0].clock
    feeders: list[asyncio.Task[None]] = []
    try:
        await _all_started(records, tasks)
        feeders += [asyncio.create_task(feed()) for feed in feeds]
        await asyncio.sleep(_SETTLE_S)
        begin = clock()
        await asyncio.sleep(seconds)
        end = clock()
        for feeder in feeders:
            if feeder.done():
                feeder.result()
    finally:
        for task in (*tasks, *feeders):
            task.cancel()
        await asyncio.gather(*tasks, *feeders, return_exceptions=True)
    if any(record.ended is not None and record.ended < end for record in records):
        raise RequestRefused("a stream ended before the measurement")
    return Window(begin, end, records)


async def _all_started(records: list[Record], tasks: list[asyncio.Task[None]]) -> None:
    """Wait until every stream has its first tokens.

    Raises:
        RequestRefused: if a stream has ended instead.
    """
    while not all(len(record.times) > 1 for record in records):
        for record, task in zip(records, tasks, strict=True):
            if task.done():
                check(record)
                raise RequestRefused("a stream ended before the measurement")
        await asyncio.sleep(0.05)
