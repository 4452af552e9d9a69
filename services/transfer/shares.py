"""The slots of a sender, shared among readers so that a stopped one cannot hold all of them."""

from collections import Counter

from services.transfer.slab import SlotPool, SlotRef

_TIMES_FREE = 3  # a reader holds at most this multiple of the slots left free


class SharedSlots:
    """Slots shared by readers that may stop without releasing them. Pure bookkeeping.

    A reader without a slot gets any free slot. A reader with slots gets another one only if it then
    holds at most three times the number of slots that remain free. This is the dynamic threshold
    algorithm of shared-memory switches (Choudhury and Hahne, 1998). Consequently:

    - a single reader gets three quarters of the slots, rounded down;
    - each further reader gets up to three quarters of the remaining slots;
    - if there are at least two slots, the first reader always leaves one for a second reader.

    A fixed share per reader would depend on the number of readers and waste slots if there are few.
    """

    def __init__(self, slots: int) -> None:
        self._pool = SlotPool(slots)
        self._held: Counter[str] = Counter()
        self._readers: dict[SlotRef, str] = {}

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self._pool.free

    @property
    def in_use(self) -> int:
        """Number of slots that readers hold."""
        return self._pool.in_use

    def acquire(self, reader: str) -> SlotRef | None:
        """Return a free slot for a reader, or None if there is none within its share."""
        held, left = self._held[reader] + 1, self._pool.free - 1
        if held > 1 and held > _TIMES_FREE * left:
            return None
        ref = self._pool.acquire()
        if ref is not None:
            self._readers[ref] = reader
            self._held[reader] = held
        return ref

    def release(self, ref: SlotRef) -> None:
        """Free a slot. Raises SlotError unless ``ref`` is held."""
        self._pool.release(ref)
        reader = self._readers.pop(ref)
        self._held[reader] -= 1
        if not self._held[reader]:
            del self._held[reader]
