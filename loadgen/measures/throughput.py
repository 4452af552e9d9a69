"""Throughput: requests completed and tokens received in the window, per second.

A request counts if it ended in the window with a complete answer. A token counts if it arrived in
the window, whatever the outcome of its request. If the target reports a token count that differs
from the number counted in the chunks, the counts of all chunks are scaled to add up to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from loadgen.measures.base import Window
from loadgen.record import Record


@dataclass(frozen=True)
class Throughput:
    """Rates of one run, per second.

    Attributes:
        offered: requests scheduled in the window.
        requests: successful requests.
        output_tokens: output tokens received.
        input_tokens: prompt tokens of successful requests.
    """

    offered: float
    requests: float
    output_tokens: float
    input_tokens: float

    @classmethod
    def of(cls, records: Sequence[Record], window: Window) -> Self:
        ended = [r for r in records if r.succeeded and r.ended is not None and window.has(r.ended)]
        return cls(
            offered=window.rate(sum(window.has(record.due) for record in records)),
            requests=window.rate(len(ended)),
            output_tokens=window.rate(sum(_received(record, window) for record in records)),
            input_tokens=window.rate(sum(record.input_tokens for record in ended)),
        )


def _received(record: Record, window: Window) -> float:
    counted = sum(record.counts)
    share = record.output_tokens / counted if counted else 0.0
    received = (n for at, n in zip(record.times, record.counts, strict=True) if window.has(at))
    return share * sum(received)
