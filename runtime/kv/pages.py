"""Which pages are whose: bookkeeping alone, without the memory."""

from collections import deque
from collections.abc import Iterable, Sequence

from runtime.errors import OutOfPages


class PagePool:
    """Hands out page ids and counts who holds each.

    Deterministic: pages are given in the order in which they became free, from 0 at the start.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self.total = num_pages
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with one holder each. Raises `OutOfPages`, and then takes none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.total} free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of ``pages``."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each of ``pages``; those without any are free again.

        Raises ValueError if a page has no holder: somebody returned it twice.
        """
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} was freed twice")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)
