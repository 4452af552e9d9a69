"""Landing slots of the reader: granted as credits, and freed when nothing can write to them."""

import asyncio
from collections.abc import Callable
from typing import Any

from services.transfer.credit import CreditPool
from services.transfer.errors import ReadTimeout
from services.transfer.slab import SlotPool, SlotRef


class LandingSlots:
    """The slots of one rank's landing slab, and their credits. Runs on the event loop.

    Args:
        slots: numbers of the slots in the slab.
        credits_per_sequence: maximum slots of one sequence.
        grant: called with a sequence's key and the number of its new credits.

    Attributes:
        slots: number of slots.
        quarantined: number of slots of ended sequences that a READ or a decode may still touch.
            They are neither held nor free.
        overdue: number of slots in quarantine because their READ is overdue. They become free only
            when the peer answers or dies.
    """

    def __init__(
        self, slots: range, credits_per_sequence: int, grant: Callable[[str, int], None]
    ) -> None:
        self.slots = len(slots)
        self._slots = SlotPool(slots)
        self._credits = CreditPool(self.slots, credits_per_sequence)
        self._grant = grant
        self.quarantined = 0
        self.overdue = 0

    @property
    def held(self) -> int:
        """Number of slots of announced segments that are not decoded yet."""
        return self._slots.in_use - self.quarantined

    def join(self, key: str, peer: str) -> None:
        """Queue a sequence for landing slots, after those that joined earlier.

        Args:
            peer: the worker that sends its segments.
        """
        self._credits.join(key, peer)
        self._share()

    def leave(self, key: str) -> None:
        """Take back unused credits; occupied slots return when nothing touches them."""
        self._credits.leave(key)
        self._share()

    def land(self, key: str) -> SlotRef:
        """Use one credit and return a slot for an announced segment.

        Raises:
            CreditError: the sequence has no credit.
        """
        self._credits.land(key)
        return self._slots.acquire()  # there is a free slot for every credit

    def free_after(self, slot: SlotRef, key: str, user: "asyncio.Future[Any] | None") -> None:
        """Release a slot and its credit as soon as nothing can touch the slot.

        Args:
            user: future of a READ or decode that may still touch the slot, or None.
        """
        if user is None:
            self._free(slot, key)
            return
        self.quarantined += 1

        def free(_: "asyncio.Future[Any]") -> None:
            self.quarantined -= 1
            self._free(slot, key)

        def free_drained(drained: "asyncio.Future[None]") -> None:
            self.overdue -= 1
            free(drained)

        def settled(done: "asyncio.Future[Any]") -> None:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, ReadTimeout):  # the transport may write until it has drained
                self.overdue += 1
                asyncio.wrap_future(error.drained).add_done_callback(free_drained)
            else:
                free(done)

        user.add_done_callback(settled)

    def _free(self, slot: SlotRef, key: str) -> None:
        self._slots.release(slot)
        self._credits.freed(key)
        self._share()

    def _share(self) -> None:
        for key, credits in self._credits.grants():
            self._grant(key, credits)
