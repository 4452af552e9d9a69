"""One request at a time: time to first token, time to second token, gap between later tokens."""

import asyncio
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.programs.serving_bench.cases.base import Context, Row
from tests.programs.serving_bench.client import (
    RequestRefused,
    check,
    connected,
    event_loop,
    prompts,
)
from tests.programs.serving_bench.counters import MetricsReader, stages


@dataclass(frozen=True)
class Single:
    """Latency of single requests.

    Attributes:
        lengths: prompt lengths in tokens. One that the server refuses gets a row with its error.
        repeats: measured requests for each length.
        warm_up: requests for each length that are sent before and not measured.
        answer: answer length in tokens, at least 3.
    """

    lengths: tuple[int, ...] = (512, 2048, 7900, 32000)
    repeats: int = 6
    warm_up: int = 2
    answer: int = 16
    name: str = "single"

    def rows(self, context: Context) -> Iterator[Row]:
        for tokens in self.lengths:
            context.console.print(f"  single request of {tokens} tokens")
            try:
                with event_loop() as loop:
                    yield loop.run(self._measure(context, tokens))
            except (RequestRefused, TimeoutError) as error:
                yield {"tokens": tokens, "error": str(error) or "time limit"}

    async def _measure(self, context: Context, tokens: int) -> Row:
        requests = prompts(context.server, tokens, self.answer, tokens, self.warm_up + self.repeats)
        async with (
            asyncio.timeout(context.limit_s),
            connected(context.server, context.limit_s) as client,
        ):
            for request in requests[: self.warm_up]:
                check(await client.send(request))
            metrics = MetricsReader(context.server.metrics)
            records = [check(await client.send(each)) for each in requests[self.warm_up :]]
            collected = metrics.collect()
        times = [
            [at - (record.sent or 0.0) for at in record.times]
            for record in records
            if len(record.times) >= 3
        ]
        if not times:
            raise RequestRefused("no answer had three tokens")
        gaps = [later - at for one in times for at, later in pairwise(one[1:])]
        return {
            "tokens": tokens,
            "first": statistics.median(one[0] for one in times),
            "second": statistics.median(one[1] for one in times),
            "gap": statistics.median(gaps),
            "times": times,
            "stages": stages(collected),
            "metrics": collected,
        }
