"""Dispatch lag: sent - due, the lateness of the load generator itself."""

from collections.abc import Sequence

from loadgen.measures.base import Measure
from loadgen.record import Record


def _late(record: Record) -> Sequence[float]:
    return () if record.sent is None else (record.sent - record.due,)


LAG = Measure("dispatch_lag", "Dispatch lag", "s", "sent - due", _late)
