"""Normalized latency: (ended - due) / output tokens.

The definition is from "FDC: Fast KV Dimensionality Compression for Efficient LLM Inference".
"""

from collections.abc import Sequence

from loadgen.measures.base import Measure
from loadgen.record import Record


def _per_token(record: Record) -> Sequence[float]:
    if not record.succeeded or record.ended is None or not record.output_tokens:
        return ()
    return ((record.ended - record.due) / record.output_tokens,)


NORMALIZED = Measure(
    "normalized_latency", "Latency per output token", "s", "(end - due) / tokens", _per_token
)
