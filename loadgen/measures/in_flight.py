"""Queue, as a client sees it: requests that were sent and have not ended.

The mean is over time: the seconds that requests were under way within the window, over its length.
The growth is that of the mean from the window's first quarter to its last, over the three quarters
of the window that lie between their middles: a server that cannot keep up answers so many requests
a second fewer than come.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from loadgen.measures.base import Window
from loadgen.record import Record


@dataclass(frozen=True)
class InFlight:
    """Requests under way at a time: on average, and at most; and by how many they grew a second."""

    mean: float
    most: int
    growth: float

    @classmethod
    def of(cls, records: Sequence[Record], window: Window) -> Self:
        spans = _spans(records, window)
        changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
        quarter = window.seconds / 4
        first = Window(window.begin, window.begin + quarter)
        last = Window(window.end - quarter, window.end)
        grown = _mean(_spans(records, last), last) - _mean(_spans(records, first), first)
        return cls(
            mean=_mean(spans, window),
            most=max(accumulate(change for _, change in changes), default=0),
            growth=grown / (3 * quarter),
        )


def _spans(records: Sequence[Record], window: Window) -> list[tuple[float, float]]:
    """Of each request, while it was under way within the window."""
    spans = [
        (max(record.sent, window.begin), min(_end(record, window), window.end))
        for record in records
        if record.sent is not None
    ]
    return [(begin, end) for begin, end in spans if end > begin]


def _mean(spans: Sequence[tuple[float, float]], window: Window) -> float:
    return sum(end - begin for begin, end in spans) / window.seconds


def _end(record: Record, window: Window) -> float:
    return window.end if record.ended is None else record.ended
