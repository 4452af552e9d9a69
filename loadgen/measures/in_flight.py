"""Requests in flight: sent and not ended, the queue as seen by the client.

The mean is over time: request-seconds in flight within the window, divided by its length. The
growth per second is the difference between the means of the window's last and first quarters,
divided by the distance of their centres (three quarters of the window). It equals the arrival rate
minus the completion rate of a server that cannot keep up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from loadgen.measures.base import Window
from loadgen.record import Record


@dataclass(frozen=True)
class InFlight:
    """Mean and maximum number of requests in flight, and its growth per second."""

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
    """Return the interval in flight within the window, for each request that has one."""
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
