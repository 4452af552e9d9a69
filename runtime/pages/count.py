"""Numbers of pages by page group."""

from collections.abc import Iterable
from itertools import zip_longest
from operator import le, sub
from typing import Self


class PageCount(tuple[int, ...]):
    """Numbers of pages of each page group, in the order of `PagePlan.groups`.

    Numbers beyond the end are 0.
    """

    __slots__ = ()

    def __new__(cls, *pages: int) -> Self:
        return tuple.__new__(cls, pages)

    def __getnewargs__(self) -> tuple[int, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"PageCount{tuple(self)}"

    def fits(self, free: "PageCount") -> bool:
        """Return whether ``free`` has at least this many pages of each group."""
        return all(map(le, self, free)) and not any(self[len(free) :])

    def times(self, count: int) -> "PageCount":
        """Return ``count`` times as many pages."""
        return PageCount(*(pages * count for pages in self))

    def plus(self, other: "PageCount") -> "PageCount":
        """Return the sum in each group."""
        return PageCount(*(a + b for a, b in zip_longest(self, other, fillvalue=0)))

    def minus(self, other: "PageCount") -> "PageCount":
        """Return the difference in each group; it may be negative."""
        if len(self) == len(other):  # a hot path of routers
            return PageCount(*map(sub, self, other))
        return PageCount(*(a - b for a, b in zip_longest(self, other, fillvalue=0)))

    @classmethod
    def total(cls, counts: Iterable["PageCount"]) -> "PageCount":
        """Return the sum of page counts; empty if there are none."""
        return cls(*map(sum, zip_longest(*counts, fillvalue=0)))
