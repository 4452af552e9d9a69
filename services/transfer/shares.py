"""A sender's slots, shared so that no reader that stops can keep them all."""

from collections import Counter

from services.transfer.slab import SlotPool, SlotRef

_TIMES_FREE = 3  # a reader holds at most so many times what it leaves free


class SharedSlots:
    """Slots for several readers, each of which may stop and keep what it holds. Pure bookkeeping.

    A reader's first slot may be the last free one. A further slot it gets only where it then holds
    at most three times as many as are left free: dynamic thresholds (Choudhury and Hahne, 1998), as
    switches share their buffers. So

    - a reader that is alone has three quarters of the slots, rounded down;
    - whatever it does, the others have the rest, and each of them three quarters of what is left;
    - of two slots or more, a second reader always finds one.

    A fixed share for each reader would need to know how many will come, and would take from the
    only one what nobody else wants.
    """

    def __init__(self, slots: int) -> None:
        self._pool = SlotPool(slots)
        self._held: Counter[str] = Counter()
        self._readers: dict[SlotRef, str] = {}

    @property
    def free(self) -> int:
        return self._pool.free

    @property
    def in_use(self) -> int:
        return self._pool.in_use

    def acquire(self, reader: str) -> SlotRef | None:
        """A free slot for a reader; None where there is none, or none that it may take."""
        held, left = self._held[reader] + 1, self._pool.free - 1
        if held > 1 and held > _TIMES_FREE * left:
            return None
        ref = self._pool.acquire()
        if ref is not None:
            self._readers[ref] = reader
            self._held[reader] = held
        return ref

    def release(self, ref: SlotRef) -> None:
        """Raises SlotError unless ``ref`` is held."""
        self._pool.release(ref)
        reader = self._readers.pop(ref)
        self._held[reader] -= 1
        if not self._held[reader]:
            del self._held[reader]
