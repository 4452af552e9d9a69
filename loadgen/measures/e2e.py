"""End-to-end latency (job completion time, JCT): ended - due.

The variant ``ended - sent`` excludes the dispatch lag of the load generator.
"""

from collections.abc import Sequence

from loadgen.measures.base import Measure
from loadgen.record import Record


def _from_due(record: Record) -> Sequence[float]:
    if not record.succeeded or record.ended is None:
        return ()
    return (record.ended - record.due,)


def _from_sent(record: Record) -> Sequence[float]:
    if not record.succeeded or record.ended is None or record.sent is None:
        return ()
    return (record.ended - record.sent,)


E2E = Measure("e2e", "End-to-end latency (JCT)", "s", "end - due", _from_due)
E2E_SENT = Measure(
    "e2e_from_send", "End-to-end latency, from the send", "s", "end - sent", _from_sent
)
