"""Cases that the tests search."""

from dataclasses import dataclass

from tests.services.transfer.protocol.paged_engine import PageBounds
from tests.services.transfer.protocol.parts import Bounds

FAULTS = frozenset(
    {
        *("cancel", "deadline", "sender deadline", "lease expiry"),
        *("read failed", "overdue", "corrupted", "doubled"),
        *("prefill crash", "decode crash"),
    }
)


@dataclass(frozen=True)
class Case:
    """A search.

    Attributes:
        max_states: number of states after which it ends.
    """

    name: str
    bounds: Bounds | PageBounds
    max_states: int = 10_000_000

    def __str__(self) -> str:
        return self.name


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
)
"""A million states. Some cases end before all states are reached."""
