"""Latencies over time: median and 99th percentile of each time bin."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loadgen.measures import E2E, ITL, TTFT, Measure
from loadgen.record import Record
from loadgen.report.bins import edges_of

_MAX_BINS = 60
_MIN_PER_BIN = 8
"""Mean number of requests per bin: percentiles of fewer say little."""
_TIMES: dict[Measure, Callable[[Record], Sequence[float]]] = {
    TTFT: lambda record: (record.due,),
    ITL: lambda record: record.times[1:],
    E2E: lambda record: (record.due,),
}
"""Functions that return the times of the values: the end of a gap (ITL), else the due time."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Latencies:
    """Percentiles of a measure by time bin, in seconds; NaN in a bin without values.

    Attributes:
        edges: bin edges, shape (bins + 1,).
        p50, p99: shape (bins,).
    """

    measure: Measure
    edges: Floats
    p50: Floats
    p99: Floats

    @classmethod
    def of(cls, records: Sequence[Record], measure: Measure, edges: Floats) -> Self:
        """Return the percentiles of all requests with values."""
        kept = [(measure.of(one), _TIMES[measure](one)) for one in records]
        kept = [(values, times) for values, times in kept if len(values) == len(times)]
        values = np.fromiter(chain.from_iterable(one for one, _ in kept), np.float64)
        times = np.fromiter(chain.from_iterable(one for _, one in kept), np.float64)
        at = np.searchsorted(edges, times, side="right") - 1
        order = np.argsort(at, kind="stable")
        parts = np.split(values[order], np.searchsorted(at[order], np.arange(1, edges.size - 1)))
        found = [np.percentile(part, (50, 99)) if part.size else (np.nan, np.nan) for part in parts]
        p50, p99 = np.asarray(found, dtype=np.float64).T
        return cls(measure, edges, p50, p99)


def latencies(records: Sequence[Record], end: float) -> list[Latencies]:
    """Return the latencies of all measures that have values.

    Args:
        end: end of the last bin at the earliest, in seconds.
    """
    sent = sum(record.sent is not None for record in records)
    edges = edges_of(end, min(_MAX_BINS, max(1, sent // _MIN_PER_BIN)))
    found = [Latencies.of(records, measure, edges) for measure in _TIMES]
    return [one for one in found if not np.isnan(one.p50).all()]
