"""Slots shared among holders, so that one that has stopped cannot hold all of them."""

from collections import Counter

from services.transfer.slab import SlotPool, SlotRef

_TIMES_FREE = 3
"""A holder has at most this multiple of the slots that are left free."""


def may_take(held: int, free: int) -> bool:
    """Return whether a holder of ``held`` slots may take one of ``free`` slots.

    A holder without a slot gets any free slot. A holder with slots gets another one only if it then
    has at most three times the number of slots that remain free. This is the dynamic threshold
    algorithm of shared-memory switches (Choudhury and Hahne, 1998). Consequently:

    - a single holder gets three quarters of the slots, rounded down, see `single_share`;
    - each further holder gets up to three quarters of the remaining slots;
    - if there are at least two slots, the first holder always leaves one for a second holder.

    A fixed share would depend on the number of holders and waste slots if there are few.
    """
    return free > 0 and (held == 0 or held + 1 <= _TIMES_FREE * (free - 1))


def single_share(slots: int) -> int:
    """Return the number of slots that one holder may have if there are at least two slots."""
    return slots * _TIMES_FREE // (_TIMES_FREE + 1)


class SharedSlots:
    """Slots shared by readers that may stop without releasing them. Pure bookkeeping.

    The shares of the readers follow `may_take`.

    Args:
        slots: numbers of the slots in their slab.
    """

    def __init__(self, slots: range) -> None:
        self._pool = SlotPool(slots)
        self._held: Counter[str] = Counter()

    @property
    def in_use(self) -> int:
        """Number of slots that readers hold."""
        return self._pool.in_use

    def acquire(self, reader: str) -> SlotRef | None:
        """Return a free slot for a reader, or None if there is none within its share."""
        if not may_take(self._held[reader], self._pool.free):
            return None
        self._held[reader] += 1
        return self._pool.acquire()

    def release(self, ref: SlotRef, reader: str) -> None:
        """Free a slot of a reader. Raises SlotError unless ``ref`` is held."""
        self._pool.release(ref)
        self._held[reader] -= 1
        if not self._held[reader]:
            del self._held[reader]
