"""Throughput: what ended, and what came, in the window, over its length.

Requests count where they ended with all of their answer. Tokens count when they came, of whatever
request; where a target's own count of an answer differs from the pieces that came, each piece has
an equal share of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from loadgen.measures.base import Window
from loadgen.record import Record


@dataclass(frozen=True)
class Throughput:
    """Of one run, a second.

    Attributes:
        offered: requests that were due.
        requests: that succeeded.
        output_tokens: that came.
        input_tokens: of the prompts of the requests that succeeded.
    """

    offered: float
    requests: float
    output_tokens: float
    input_tokens: float

    @classmethod
    def of(cls, records: Sequence[Record], window: Window) -> Self:
        ended = [r for r in records if r.succeeded and r.ended is not None and window.has(r.ended)]
        return cls(
            offered=sum(window.has(record.due) for record in records) / window.seconds,
            requests=len(ended) / window.seconds,
            output_tokens=sum(_came(record, window) for record in records) / window.seconds,
            input_tokens=sum(record.input_tokens for record in ended) / window.seconds,
        )


def _came(record: Record, window: Window) -> float:
    counted = sum(record.counts)
    share = record.output_tokens / counted if counted else 0.0
    came = (n for at, n in zip(record.times, record.counts, strict=True) if window.has(at))
    return share * sum(came)
