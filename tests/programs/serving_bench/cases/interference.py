"""Gaps of running streams, without and with the KV of new prompts arriving."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from loadgen.record import Record
from loadgen.workload.base import RequestSpec
from tests.programs.serving_bench.cases.base import Context, Row
from tests.programs.serving_bench.cases.window import described, window
from tests.programs.serving_bench.client import (
    Client,
    RequestRefused,
    check,
    connected,
    event_loop,
    prompts,
)
from tests.programs.serving_bench.counters import MetricsReader, stages


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
            mine = [(client, spec) for spec in running]
            quiet = await window(mine, self.seconds)
            metrics = MetricsReader(server.metrics)
            feeds = [partial(_feed, client, requests, answered)] * self.concurrency
            busy = await window(mine, self.seconds, feeds)
            collected = metrics.collect()
        begin, end = busy.begin, busy.end
        ended = [one for one in answered if one.ended and begin <= one.ended < end]
        return {
            "streams": streams,
            "quiet": described(quiet.gaps()),
            "busy": described(busy.gaps()),
            "arrived": {
                "requests": len(ended) / self.seconds,
                "tokens": sum(one.input_tokens for one in ended) / self.seconds,
            },
            "stages": stages(collected),
            "metrics": collected,
        }


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
