"""Inter-token latency: between one piece of an answer and the next.

A piece is what came at a time: a token, or several where a server sends several. Each gap is a
number of its own, so that a stall is seen whatever the length of the answer around it.
"""

from collections.abc import Sequence
from itertools import pairwise

from loadgen.measures.base import Measure
from loadgen.record import Record


def _gaps(record: Record) -> Sequence[float]:
    return () if record.failure else [after - before for before, after in pairwise(record.times)]


ITL = Measure("itl", "Inter-token latency", "s", "piece - the piece before it", _gaps)
