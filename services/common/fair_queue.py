"""Queue that is fair among tenants, ordered by urgency within a tenant.

The order is that of deficit round robin (Shreedhar and Varghese, 1996) with rounds of one unit of
cost. In each round, every tenant with queued items receives as many units as its weight. Its first
item is due when it has received the cost of the item. The rounds are not executed: the round in
which an item is due is computed from the costs, and items are ordered by it.

While two tenants both have queued items, the cost served for each, divided by its weight, differs
by at most the cost of one item of each tenant, divided by its weight.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

_MAX_SEARCHED = 64
"""Items that `FairQueue.earliest_ahead` looks at for each urgency, to bound its duration."""


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
class _Rank(Generic[_Item]):
    """Items of one tenant with equal urgency, in order of arrival, with their arrival numbers."""

    cost: int = 0
    items: OrderedDict[_Item, int] = field(default_factory=OrderedDict)


@dataclass
class _Line(Generic[_Item]):
    """The queued items of one tenant, by urgency.

    Attributes:
        start: round after which the tenant receives units of cost for its first item.
        urgencies: keys of ``ranks``, sorted.
    """

    start: float
    weight: int = 1
    cost: int = 0
    ranks: dict[Any, _Rank[_Item]] = field(default_factory=dict)
    urgencies: list[Any] = field(default_factory=list)

    def rank(self, urgency: object) -> _Rank[_Item]:
        """Return the rank of this urgency; create it if there is none."""
        if (rank := self.ranks.get(urgency)) is None:
            rank = self.ranks[urgency] = _Rank()
            insort(self.urgencies, urgency)
        return rank

    def until(self, item: _Item) -> Iterator[_Rank[_Item]]:
        """Yield the ranks that are at least as urgent as an item, the most urgent first.

        The last rank is that of the item.
        """
        for urgency in self.urgencies:
            yield self.ranks[urgency]
            if urgency == item.urgency:
                return

    def due(self, wanted: Callable[[_Item], bool]) -> Iterator[tuple[float, int, _Item]]:
        """Yield (round in which it is due, arrival number, item) where ``wanted(item)`` is true."""
        due, weight = self.start, self.weight
        for urgency in self.urgencies:
            for item, number in self.ranks[urgency].items.items():
                due += item.cost / weight
                if wanted(item):
                    yield due, number, item


class FairQueue(Generic[_Item]):
    """Items in the order of deficit round robin among their tenants."""

    def __init__(self) -> None:
        self._arrivals = 0
        self._round = 0.0
        self._length = 0
        self._lines: dict[Hashable, _Line[_Item]] = {}

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[_Item]:
        """Iterate over a copy of the queue, in the order in which items should be served."""
        return iter(list(self.ordered(lambda _: True)))

    def ordered(self, wanted: Callable[[_Item], bool]) -> Iterator[_Item]:
        """Yield the wanted items in the order in which they should be served.

        The queue must not change in the meantime. ``wanted`` may: it is called for each item when
        the items of its tenant that precede it have been yielded.
        """
        lines = [line.due(wanted) for line in self._lines.values()]
        return (item for _, _, item in merge(*lines))

    @property
    def tenants(self) -> Iterable[Hashable]:
        """The tenants with queued items."""
        return self._lines.keys()

    def surplus(self, wanted: Callable[[_Item], bool] = lambda _: True) -> _Item | None:
        """Return the last wanted item of the tenant with the highest cost relative to its weight.

        Tenants without wanted items are passed over. None if nobody has any.
        """
        lines = sorted(self._lines.values(), key=lambda line: line.cost / line.weight, reverse=True)
        items = (
            item
            for line in lines
            for urgency in reversed(line.urgencies)
            for item in reversed(line.ranks[urgency].items)
        )
        return next(filter(wanted, items), None)

    def add(self, item: _Item) -> None:
        """Queue an item after those of its tenant that are at least as urgent."""
        self._arrivals += 1
        self._length += 1
        line = self._lines.setdefault(item.tenant, _Line(self._round))
        line.weight = item.weight
        line.cost += item.cost
        rank = line.rank(item.urgency)
        rank.cost += item.cost
        rank.items[item] = self._arrivals

    def remove(self, item: _Item, *, served: bool = False) -> bool:
        """Remove an item; return whether it was queued.

        Args:
            served: whether the item was served, so that its cost is charged to its tenant.
        """
        line = self._lines.get(item.tenant)
        rank = line.ranks.get(item.urgency) if line else None
        if line is None or rank is None or rank.items.pop(item, None) is None:
            return False
        self._length -= 1
        rank.cost -= item.cost
        line.cost -= item.cost
        if served:
            line.start += item.cost / line.weight
            self._round = max(self._round, line.start)
        if not rank.items:
            del line.ranks[item.urgency]
            line.urgencies.remove(item.urgency)
        if not line.ranks:
            del self._lines[item.tenant]
        return True

    def charge(self, tenant: Hashable, cost: int) -> None:
        """Delay the queued items of a tenant as if an item of this cost had been served.

        Deficit round robin keeps no account of a tenant without queued items: it is not charged.
        """
        if line := self._lines.get(tenant):
            line.start += cost / line.weight

    def earliest_ahead(self, item: _Item, wanted: Callable[[_Item], bool]) -> Iterator[_Item]:
        """Yield the first wanted item of each urgency among the preceding ones of the same tenant.

        Only the first `_MAX_SEARCHED` items of each urgency are searched.
        """
        for rank in self._lines[item.tenant].until(item):
            first = next(filter(wanted, islice(rank.items, _MAX_SEARCHED)), None)
            if first is not None and first is not item:
                yield first

    def cost_before(self, item: _Item) -> float:
        """Return the cost that is served before a queued item.

        While its tenant receives the units for the item, other tenants receive as many for each
        unit of their weight, or fewer if they have less queued.
        """
        line = self._lines[item.tenant]
        before = sum(rank.cost for rank in line.until(item))
        for behind in reversed(line.ranks[item.urgency].items):
            before -= behind.cost
            if behind is item:
                break
        share = (before + item.cost) / line.weight
        others = (other for other in self._lines.values() if other is not line)
        return before + sum(min(each.cost, share * each.weight) for each in others)
