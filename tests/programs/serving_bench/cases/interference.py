"""Gaps of running streams, without and with the KV of new prompts arriving."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import Any

from loadgen.record import Record
from loadgen.statistics import Distribution
from loadgen.workload.base import RequestSpec
from tests.programs.serving_bench.cases.base import Context, Row
from tests.programs.serving_bench.client import (
    Client,
    RequestRefused,
    check,
    connected,
    event_loop,
    prompts,
)
from tests.programs.serving_bench.counters import MetricsReader, stages

_SETTLE_S = 0.5
"""Seconds before each window that are not measured."""


@dataclass(frozen=True)
class Interference:
    """Gaps of streams without and beside other requests, sent as fast as they are answered.

    Attributes:
        streams: numbers of running streams.
        prompt: prompt length of the streams, in tokens.
        answer: maximum answer length of the streams, in tokens; they are cancelled at the end.
        seconds: duration of each of both windows.
        arriving: prompt length of the arriving requests, in tokens. Each has two output tokens, so
            that its KV moves to the decode worker.
        concurrency: arriving requests that are in flight at a time.
    """

    streams: tuple[int, ...] = (32,)
    prompt: int = 128
    answer: int = 8000
    seconds: float = 5.0
    arriving: int = 2048
    concurrency: int = 8
    name: str = "interference"

    def rows(self, context: Context) -> Iterator[Row]:
        for streams in self.streams:
            context.console.print(f"  gaps of {streams} streams while prompts arrive")
            try:
                with event_loop() as loop:
                    yield loop.run(self._measure(context, streams))
            except (RequestRefused, TimeoutError) as error:
                yield {"streams": streams, "error": str(error) or "time limit"}

    async def _measure(self, context: Context, streams: int) -> Row:
        server = context.server
        running = prompts(server, self.prompt, self.answer, 1, streams)
        requests = _distinct(prompts(server, self.arriving, 2, 2, 32))
        answered: list[Record] = []
        async with (
            asyncio.timeout(context.limit_s),
            connected(server, context.limit_s) as client,
        ):
            quiet = await self._window(client, running, [])
            metrics = MetricsReader(server.metrics)
            feeds = [partial(_feed, client, requests, answered)] * self.concurrency
            busy = await self._window(client, running, feeds)
            collected = metrics.collect()
        begin, end = busy.begin, busy.end
        ended = [one for one in answered if one.ended and begin <= one.ended < end]
        return {
            "streams": streams,
            "quiet": quiet.gaps,
            "busy": busy.gaps,
            "arrived": {
                "requests": len(ended) / self.seconds,
                "tokens": sum(one.input_tokens for one in ended) / self.seconds,
            },
            "stages": stages(collected),
            "metrics": collected,
        }

    async def _window(
        self,
        client: Client,
        running: list[RequestSpec],
        feeds: Sequence[Callable[[], Coroutine[None, None, None]]],
    ) -> "_Window":
        """Measure the gaps of new streams, with ``feeds`` running beside them.

        The streams are new in each window, so that both windows see contexts of the same lengths.

        Raises:
            RequestRefused: if a stream or a feed has failed, or a stream ended too early.
        """
        records = [client.start(spec) for spec in running]
        streams = [
            asyncio.create_task(client.finish(*pair)) for pair in zip(running, records, strict=True)
        ]
        feeders: list[asyncio.Task[None]] = []
        try:
            await _all_started(records, streams)
            feeders += [asyncio.create_task(feed()) for feed in feeds]
            await asyncio.sleep(_SETTLE_S)
            begin = client.clock()
            await asyncio.sleep(self.seconds)
            end = client.clock()
            for feeder in feeders:
                if feeder.done():
                    feeder.result()
        finally:
            for task in (*streams, *feeders):
                task.cancel()
            await asyncio.gather(*streams, *feeders, return_exceptions=True)
        if any(record.ended is not None and record.ended < end for record in records):
            raise RequestRefused("a stream ended before the measurement")
        return _Window(begin, end, _gaps(records, begin, end))


@dataclass(frozen=True)
class _Window:
    begin: float
    end: float
    gaps: dict[str, Any]


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


def _distinct(requests: list[RequestSpec]) -> Iterator[RequestSpec]:
    """Yield requests endlessly, each with another prompt, so that no prefix cache has it."""
    for by in count():
        for request in requests:
            ids = request.prompt
            assert isinstance(ids, tuple)
            shift = by % len(ids)
            yield replace(request, prompt=(*ids[shift:], *ids[:shift]))


async def _feed(client: Client, requests: Iterator[RequestSpec], answered: list[Record]) -> None:
    """Send requests one after the other until cancelled."""
    while True:
        answered.append(check(await client.send(next(requests))))


def _gaps(records: list[Record], begin: float, end: float) -> dict[str, Any]:
    """Return the distribution of the gaps that end within a window."""
    gaps = [
        later - at
        for record in records
        for at, later in pairwise(record.times)
        if begin <= later < end
    ]
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
