"""Time per output token after the first: (last - first) / (output tokens - 1)."""

from collections.abc import Sequence

from loadgen.measures.base import Measure
from loadgen.record import Record


def _per_token(record: Record) -> Sequence[float]:
    if not record.succeeded or record.first is None or record.last is None:
        return ()
    if record.output_tokens < 2:
        return ()
    return ((record.last - record.first) / (record.output_tokens - 1),)


TPOT = Measure(
    "tpot", "Time per output token", "s", "(last - first token) / (tokens - 1)", _per_token
)
