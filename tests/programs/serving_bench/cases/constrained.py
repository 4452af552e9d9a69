"""Gaps of streams whose output a JSON schema constrains, and of free ones beside them."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.programs.serving_bench.cases.base import Context, Row
from tests.programs.serving_bench.cases.window import described, window
from tests.programs.serving_bench.client import (
    RequestRefused,
    connected,
    event_loop,
    prompts,
)

_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
            "kind": {"enum": ["first", "second", "third"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
        },
        "required": ["name", "count", "kind", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
"""Schema of the constrained answers, which are too long to end within a window."""


@dataclass(frozen=True)
class Constrained:
    """Gaps of streams in windows: all free, one constrained, all constrained, in turn.

    Attributes:
        streams: numbers of running streams, at least two.
        prompt: prompt length, in tokens.
        answer: maximum answer length in tokens; the streams are cancelled at the end.
        seconds: duration of each window.
        rounds: number of windows of each kind.
    """

    streams: tuple[int, ...] = (64,)
    prompt: int = 128
    answer: int = 4000
    seconds: float = 5.0
    rounds: int = 3
    name: str = "constrained"

    def rows(self, context: Context) -> Iterator[Row]:
        for streams in self.streams:
            context.console.print(f"  gaps of {streams} streams, free and constrained")
            try:
                with event_loop() as loop:
                    yield loop.run(self._measure(context, streams))
            except (RequestRefused, TimeoutError) as error:
                yield {"streams": streams, "error": str(error) or "time limit"}

    async def _measure(self, context: Context, streams: int) -> Row:
        specs = prompts(context.server, self.prompt, self.answer, 3, streams)
        fields: dict[str, Any] = {"structured_outputs": {"json": _SCHEMA}, "ignore_eos": False}
        async with (
            asyncio.timeout(context.limit_s),
            connected(context.server, context.limit_s) as free,
            connected(context.server, context.limit_s, fields) as constrained,
        ):
            gaps: dict[str, list[float]] = {"free": [], "beside_one": [], "constrained": []}
            for _ in range(self.rounds):
                for name, bound in zip(gaps, (0, 1, streams), strict=True):
                    clients = [constrained] * bound + [free] * (streams - bound)
                    found = await window([*zip(clients, specs, strict=True)], self.seconds)
                    beside = slice(1, None) if name == "beside_one" else slice(None)
                    gaps[name] += found.gaps(beside)
        return {"streams": streams, **{name: described(found) for name, found in gaps.items()}}
