"""Requests in flight: requests that were sent and have not ended.

The mean is over time: request-seconds in flight within the window, divided by its length. The
growth per second is the difference between the means of the window's last and first quarters,
divided by the distance of their centres (three quarters of the window). If the server cannot keep
up, requests in flight grow steadily, and the growth is the arrival rate minus the completion rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from loadgen.measures.base import Window
from loadgen.record import Record


@dataclass(frozen=True)
class InFlight:
    """Requests in flight: mean, maximum (``most``), and growth per second."""

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
            growth=window.rate(grown) / 0.75,
        )


def _spans(records: Sequence[Record], window: Window) -> list[tuple[float, float]]:
    """Return (begin, end) of each request's time in flight, clipped to the window.

    Requests that were not in flight within the window are omitted.
    """
    spans = [
        (max(record.sent, window.begin), min(_end(record, window), window.end))
        for record in records
        if record.sent is not None
    ]
    return [(begin, end) for begin, end in spans if end > begin]


def _mean(spans: Sequence[tuple[float, float]], window: Window) -> float:
    return window.rate(sum(end - begin for begin, end in spans))


def _end(record: Record, window: Window) -> float:
    return window.end if record.ended is None else record.ended
