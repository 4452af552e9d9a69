"""Slots for concurrent work, which are granted fairly among tenants."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.common.errors import Overloaded
from services.common.fair_queue import FairQueue


@dataclass(eq=False)
class _Waiter:
    tenant: str
    weight: int
    cost: int
    urgency: int = 0
    granted: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class FairSlots:
    """A number of slots, for which tenants queue in the order of `FairQueue`.

    Args:
        slots: number of slots.
        per_tenant: maximum slots of one tenant. If it is lower than ``slots``, a tenant that always
            has work leaves a slot for the others.
        max_waiting: maximum number of waiting callers. Beyond it, the last caller of the tenant
            with the highest queued cost relative to its weight is refused.
    """

    def __init__(self, slots: int, *, per_tenant: int, max_waiting: int) -> None:
        self._free = slots
        self._per_tenant = per_tenant
        self._max_waiting = max_waiting
        self._held: Counter[Hashable] = Counter()
        self._queue: FairQueue[_Waiter] = FairQueue()

    def is_free(self, tenant: str) -> bool:
        """Return whether `hold` would grant this tenant a slot without waiting."""
        return self._free > 0 and self._held[tenant] < self._per_tenant

    def is_wanted(self, tenant: str) -> bool:
        """Return whether a tenant should give a slot back to a waiting caller.

        This is the case if no other tenant holds more slots, and the caller would get the slot.
        """
        return self._held[tenant] == max(self._held.values(), default=0) and any(
            waiting == tenant or self._held[waiting] < self._per_tenant
            for waiting in self._queue.tenants
        )

    @asynccontextmanager
    async def hold(self, tenant: str, *, weight: int = 1, cost: int = 1) -> AsyncGenerator[None]:
        """Wait for a slot, and hold it in the ``with`` block. Cancellation leaves the queue.

        Raises:
            Overloaded: if too many callers wait.
        """
        waiter = _Waiter(tenant, weight, cost)
        self._queue.add(waiter)
        self._grant()
        if len(self._queue) > self._max_waiting:
            surplus = self._queue.surplus()
            assert surplus is not None, "an overfull queue has items"
            self._queue.remove(surplus)
            surplus.decided.set()
        try:
            await waiter.decided.wait()
            if not waiter.granted:
                raise Overloaded(f"more than {self._max_waiting} requests are waiting")
            yield
        finally:
            self._queue.remove(waiter)
            if waiter.granted:
                self._release(tenant)

    def charge(self, tenant: str, cost: int) -> None:
        """Add the cost of work in a held slot that was not known when it was granted."""
        self._queue.charge(tenant, cost)

    def _grant(self) -> None:
        """Grant the free slots in the order of the queue."""
        if not self._free:
            return
        for waiter in self._queue:
            if self._held[waiter.tenant] < self._per_tenant:
                self._queue.remove(waiter, served=True)
                self._held[waiter.tenant] += 1
                self._free -= 1
                waiter.granted = True
                waiter.decided.set()
                if not self._free:
                    return

    def _release(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()
