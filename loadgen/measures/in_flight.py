"""Queue, as a client sees it: requests that were sent and have not ended.

The mean is over time: the seconds that requests were under way within the window, over its length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from loadgen.measures.base import Window
from loadgen.record import Record


@dataclass(frozen=True)
class InFlight:
    """Requests under way at a time: on average, and at most."""

    mean: float
    most: int

    @classmethod
    def of(cls, records: Sequence[Record], window: Window) -> Self:
        spans = [
            (max(record.sent, window.begin), min(_end(record, window), window.end))
            for record in records
            if record.sent is not None
        ]
        spans = [(begin, end) for begin, end in spans if end > begin]
        changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
        return cls(
            mean=sum(end - begin for begin, end in spans) / window.seconds,
            most=max(accumulate(change for _, change in changes), default=0),
        )


def _end(record: Record, window: Window) -> float:
    return window.end if record.ended is None else record.ended
