"""Queue that is fair among tenants, ordered by urgency within a tenant.

The order is that of deficit round robin (Shreedhar and Varghese, 1996) with rounds of one unit of
cost. In each round, every tenant with queued items receives as many units as its weight. Its first
item is due when it has received the cost of the item. The rounds are not executed: the round in
which an item is due is computed from the costs, and items are ordered by it.

While two tenants both have queued items, the cost served for each, divided by its weight, differs
by at most the cost of one item of each tenant, divided by its weight.
"""

from bisect import insort
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from typing import Any, Generic, Protocol, TypeVar


class Queued(Protocol):
    """An item of the queue. Its properties must not change while it is queued.

    Attributes:
        urgency: sort key among the items of a tenant; lower is earlier.
    """

    @property
    def tenant(self) -> Hashable: ...
    @property
    def weight(self) -> int: ...
    @property
    def cost(self) -> int: ...
    @property
    def urgency(self) -> Any: ...


_Item = TypeVar("_Item", bound=Queued)


@dataclass
class _Line(Generic[_Item]):
    """The queued items of one tenant, as (urgency, number of the arrival, item).

    Attributes:
        start: round after which the tenant receives units for its first item.
    """

    start: float
    weight: int = 1
    cost: int = 0
    entries: list[tuple[Any, int, _Item]] = field(default_factory=list)

    def due(self) -> Iterator[tuple[float, int, _Item]]:
        """Yield the round in which each item is due, the number of its arrival, and the item."""
        due = self.start
        for _, number, item in self.entries:
            due += item.cost / self.weight
            yield due, number, item


class FairQueue(Generic[_Item]):
    """Items in the order of deficit round robin among their tenants."""

    def __init__(self) -> None:
        self._arrivals = 0
        self._round = 0.0
        self._lines: dict[Hashable, _Line[_Item]] = {}

    def __len__(self) -> int:
        return sum(len(line.entries) for line in self._lines.values())

    def __iter__(self) -> Iterator[_Item]:
        """Iterate over a copy of the queue, in the order in which items should be served."""
        lines = [line.due() for line in self._lines.values()]
        return iter([item for _, _, item in merge(*lines)])

    @property
    def tenants(self) -> Iterable[Hashable]:
        """The tenants with queued items."""
        return self._lines.keys()

    @property
    def surplus(self) -> _Item:
        """The last item of the tenant with the highest queued cost relative to its weight."""
        line = max(self._lines.values(), key=lambda line: line.cost / line.weight)
        return line.entries[-1][2]

    def add(self, item: _Item) -> None:
        """Queue an item after those of its tenant that are at least as urgent."""
        self._arrivals += 1
        line = self._lines.setdefault(item.tenant, _Line(self._round))
        line.weight = item.weight
        line.cost += item.cost
        insort(line.entries, (item.urgency, self._arrivals, item))

    def remove(self, item: _Item, *, served: bool = False) -> bool:
        """Remove an item; return whether it was queued.

        Args:
            served: whether the item was served, so that its cost is charged to its tenant.
        """
        line = self._lines.get(item.tenant)
        found = [entry for entry in line.entries if entry[2] is item] if line else []
        if not line or not found:
            return False
        line.entries.remove(found[0])
        line.cost -= item.cost
        if served:
            line.start += item.cost / line.weight
            self._round = max(self._round, line.start)
        if not line.entries:
            del self._lines[item.tenant]
        return True

    def ahead(self, item: _Item) -> list[_Item]:
        """Return the queued items of the same tenant that precede a queued item, in order."""
        own = [entry[2] for entry in self._lines[item.tenant].entries]
        return own[: own.index(item)]

    def cost_before(self, item: _Item) -> float:
        """Return the cost that is served before a queued item.

        While its tenant receives the units for the item, other tenants receive as many for each
        unit of their weight, or fewer if they have less queued.
        """
        line = self._lines[item.tenant]
        before = sum(each.cost for each in self.ahead(item))
        share = (before + item.cost) / line.weight
        others = (other for other in self._lines.values() if other is not line)
        return before + sum(min(each.cost, share * each.weight) for each in others)
