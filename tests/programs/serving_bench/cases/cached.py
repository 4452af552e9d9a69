"""Single requests with prompts that share their first tokens, cold and with a warm prefix cache."""

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadgen.record import Record
from loadgen.workload.base import RequestSpec
from tests.programs.serving_bench.cases.base import Context, Row
from tests.programs.serving_bench.client import (
    RequestRefused,
    check,
    connected,
    event_loop,
    prompts,
)
from tests.programs.serving_bench.counters import MetricsReader, stages

_SEED = 1_000_003
"""Seed of the prompts, which differ from those of other cases."""


@dataclass(frozen=True)
class Cached:
    """Latency of single requests, cold and with a warm prefix cache.

    Cold prompts share no tokens with each other. Then a request with a new prompt fills the cache,
    and the measured prompts begin with the first ``shared`` tokens of that one.

    Attributes:
        lengths: prompt lengths in tokens. One that the server refuses gets a row with its error.
        shared: number of equal tokens at the beginning of the warm prompts.
        repeats: measured requests of each kind.
        warm_up: requests of each kind that are sent before and not measured, at least 1.
        answer: answer length in tokens, at least 2.
    """

    lengths: tuple[int, ...] = (7900,)
    shared: int = 7424
    repeats: int = 6
    warm_up: int = 2
    answer: int = 8
    name: str = "cached"

    def rows(self, context: Context) -> Iterator[Row]:
        for tokens in self.lengths:
            context.console.print(f"  {tokens} tokens, cold, then {self.shared} of them cached")
            try:
                with event_loop() as loop:
                    yield loop.run(self._measure(context, tokens))
            except (RequestRefused, TimeoutError) as error:
                yield {"tokens": tokens, "shared": self.shared, "error": str(error) or "time limit"}

    async def _measure(self, context: Context, tokens: int) -> Row:
        server, count = context.server, self.warm_up + self.repeats
        drawn = prompts(server, tokens, self.answer, _SEED + tokens, 2 * count)
        cold, warm = drawn[:count], _sharing(drawn[count:], self.shared)
        async with (
            asyncio.timeout(2 * context.limit_s),
            connected(server, context.limit_s) as client,
        ):
            found: dict[str, Any] = {}
            for name, requests in (("cold", cold), ("warm", warm)):
                for request in requests[: self.warm_up]:
                    check(await client.send(request))
                metrics = MetricsReader(server.metrics)
                records = [check(await client.send(one)) for one in requests[self.warm_up :]]
                collected = metrics.collect()
                found[name] = _latencies(records) | {
                    "stages": stages(collected),
                    "metrics": collected,
                }
        ratios = {key: found["warm"][key] / found["cold"][key] for key in ("first", "second")}
        return {"tokens": tokens, "shared": self.shared, **found, "ratio": ratios}


def _sharing(requests: Sequence[RequestSpec], shared: int) -> list[RequestSpec]:
    """Return the requests with the first ``shared`` tokens of the first one."""
    start = requests[0].prompt
    assert isinstance(start, tuple)
    made = []
    for request in requests:
        assert isinstance(request.prompt, tuple)
        made.append(replace(request, prompt=(*start[:shared], *request.prompt[shared:])))
    return made


def _latencies(records: Sequence[Record]) -> dict[str, Any]:
    """Return the medians of the times from the send to the first and the second token.

    ``cached_tokens`` is the median that the server reports, or None.

    Raises:
        RequestRefused: if no answer had two tokens.
    """
    times = [
        [at - (record.sent or 0.0) for at in record.times[:2]]
        for record in records
        if len(record.times) >= 2
    ]
    if not times:
        raise RequestRefused("no answer had two tokens")
    cached = [one.cached_tokens for one in records if one.cached_tokens is not None]
    return {
        "first": statistics.median(one[0] for one in times),
        "second": statistics.median(one[1] for one in times),
        "times": times,
        "cached_tokens": statistics.median(cached) if cached else None,
    }
