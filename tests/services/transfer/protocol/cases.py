"""Cases that the tests search."""

from dataclasses import dataclass, replace

from tests.services.transfer.protocol.cached_kv import CacheBounds, Prompt
from tests.services.transfer.protocol.paged_engine import PageBounds
from tests.services.transfer.protocol.parts import Bounds

FAULTS = frozenset(
    {
        *("cancel", "deadline", "sender deadline", "lease expiry"),
        *("read failed", "overdue", "corrupted", "doubled"),
        *("prefill crash", "decode crash"),
    }
)


HISTORY_FAULTS = frozenset({"cancel", "lease expiry", "corrupted", "read failed"})
CRASHES = frozenset({"prefill crash", "decode crash", "lost messages", "stale read"})


@dataclass(frozen=True)
class Case:
    """A search.

    Attributes:
        max_states: number of states after which it ends.
    """

    name: str
    bounds: Bounds | PageBounds | CacheBounds
    max_states: int = 10_000_000

    def __str__(self) -> str:
        return self.name


_ANSWERED = Prompt((2, 2))
_FIRST, _SECOND = Prompt((2, 2, 3)), Prompt((2, 2, 4))
_TWO_DECODES = CacheBounds(
    (_FIRST, replace(_SECOND, decode=1)), decodes=2, cached=_ANSWERED, decode_pages=4
)
_ONE_DECODE = CacheBounds((_FIRST,), cached=_ANSWERED, decode_pages=4)

SMALL = (
    Case("one sequence with late notifications", Bounds(sequences=1)),
    Case(
        "one sequence with a fault",
        Bounds(sequences=1, layers=1, faults=1, kinds=FAULTS, notifications=False),
    ),
    Case("pages of one decode worker and one prefill worker", PageBounds()),
    Case(
        "pages of a decode worker that computes prompts",
        PageBounds(streams=2, computes=True, decode_pages=2, prompt=15, outputs=4),
    ),
    Case(
        "second turn of a chat",
        CacheBounds((Prompt((2, 2, 2, 1, 1, 3)),), cached=Prompt((2, 2, 2), outputs=3)),
    ),
    Case(
        "history for two choices",
        replace(_ONE_DECODE, requests=(replace(_FIRST, choices=2),)),
    ),
    Case("history with a fault", replace(_ONE_DECODE, faults=1, kinds=HISTORY_FAULTS)),
    Case(
        "eviction of cached pages",
        CacheBounds(
            (_FIRST, Prompt((5, 5, 5))),
            cached=_ANSWERED,
            prefill_pages=2,
            decode_pages=3,
            ways=("with pages",),
        ),
    ),
)

CASES = (
    Case("one sequence with any fault", Bounds(sequences=1, faults=1, kinds=FAULTS), 400_000),
    Case("two sequences with late notifications", Bounds(), 400_000),
    Case(
        "two sequences with late notifications and a cancel",
        Bounds(faults=1, kinds=frozenset({"cancel"})),
        250_000,
    ),
    Case(
        "two sequences with any fault",
        Bounds(faults=1, kinds=FAULTS, notifications=False),
        100_000,
    ),
    Case("pages of two decode workers", PageBounds(decodes=2)),
    Case(
        "pages of two decode workers and a prefill worker that decodes",
        PageBounds(decodes=2, wholes=1, prefill_pages=2, decode_pages=2, prompt=15, outputs=4),
        200_000,
    ),
    Case("pages with a cancelled stream", PageBounds(cancels=1), 200_000),
    Case(
        "pages of a decode worker that computes prompts, with a cancelled stream",
        PageBounds(cancels=1, computes=True, decode_pages=2, prompt=15, outputs=4),
        200_000,
    ),
    Case("history of two decode workers", _TWO_DECODES, 1_000_000),
    Case(
        "history of two decode workers with a fault",
        replace(_TWO_DECODES, faults=1, kinds=HISTORY_FAULTS | CRASHES | {"deadline"}),
        200_000,
    ),
    Case(
        "two requests with the same history and a fault",
        replace(_ONE_DECODE, requests=(_FIRST, _SECOND), faults=1, kinds=HISTORY_FAULTS),
        20_000,
    ),
    Case(
        "history with a crash",
        replace(_ONE_DECODE, slots=4, faults=1, kinds=CRASHES),
        20_000,
    ),
)
"""All cases. Some end before all states are reached."""
