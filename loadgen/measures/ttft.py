"""Time to first token: first - due, the wait of a client that arrives at the scheduled time.

The variant ``first - sent`` excludes the dispatch lag of the load generator. Both are measured for
successful requests and for requests cancelled after their first token.
"""

from collections.abc import Sequence

from loadgen.measures.base import Measure
from loadgen.record import Record


def _from_due(record: Record) -> Sequence[float]:
    return () if record.first is None or record.failure else (record.first - record.due,)


def _from_sent(record: Record) -> Sequence[float]:
    if record.first is None or record.failure or record.sent is None:
        return ()
    return (record.first - record.sent,)


TTFT = Measure("ttft", "Time to first token", "s", "first token - due", _from_due)
TTFT_SENT = Measure(
    "ttft_from_send", "Time to first token, from the send", "s", "first token - sent", _from_sent
)
