"""Inter-token latency: gap between consecutive chunks of an answer.

A chunk contains one token, or several if the server sends several at once. Each gap is a separate
value, because a mean per answer would hide a stall in a long answer.
"""

from collections.abc import Sequence
from itertools import pairwise

from loadgen.measures.base import Measure
from loadgen.record import Record


def _gaps(record: Record) -> Sequence[float]:
    return () if record.failure else [after - before for before, after in pairwise(record.times)]


ITL = Measure("itl", "Inter-token latency", "s", "chunk - previous chunk", _gaps)
