"""Requests of chats by turn: time to first token, prompt lengths and cached tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from loadgen.measures.base import Window
from loadgen.measures.cached import Cached
from loadgen.measures.ttft import TTFT
from loadgen.record import Failure, Record
from loadgen.statistics import Distribution


@dataclass(frozen=True)
class Turn:
    """The requests of one turn, over all chats.

    Attributes:
        turn: number of the turn, from 1.
        sent: requests that were sent.
        failed: requests sent that failed.
        not_sent: requests that were not sent, because an earlier turn of the chat failed.
        input_tokens: mean prompt tokens of the answered requests; None if there are none.
        ttft: time to first token, seconds; None without values.
        cached: cached prompt tokens; None if the target does not report them.
    """

    turn: int
    sent: int
    failed: int
    not_sent: int
    input_tokens: float | None
    ttft: Distribution | None
    cached: Cached | None

    @classmethod
    def of(cls, turn: int, records: Sequence[Record]) -> Self:
        """Return the figures of the requests of one turn."""
        sent = [record for record in records if record.sent is not None]
        lengths = [record.input_tokens for record in sent if record.succeeded]
        return cls(
            turn,
            sent=len(sent),
            failed=sum(record.failure is not None for record in sent),
            not_sent=sum(record.failure is Failure.NOT_SENT for record in records),
            input_tokens=sum(lengths) / len(lengths) if lengths else None,
            ttft=Distribution.of([value for record in sent for value in TTFT.of(record)]),
            cached=Cached.of(sent),
        )


def turns_of(records: Sequence[Record], window: Window) -> tuple[Turn, ...]:
    """Return the turns of the chats in a window, in their order; empty without chats."""
    found: dict[int, list[Record]] = {}
    for record in records:
        if record.chat is not None and window.has(record.due):
            found.setdefault(record.turn, []).append(record)
    return tuple(Turn.of(turn, found[turn]) for turn in sorted(found))
