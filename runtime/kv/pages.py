"""Allocation of KV pages: bookkeeping without the memory."""

from collections import deque
from collections.abc import Iterable, Sequence

from runtime.errors import OutOfPages


class PagePool:
    """Allocates page ids and counts the holders of each page.

    Allocation is deterministic: pages are allocated in the order in which they became free,
    starting with page 0.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self.total = num_pages
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages

    @property
    def free(self) -> int:
        """Number of pages without a holder."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` pages with one holder each.

        Raises:
            OutOfPages: fewer pages are free; none is allocated.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages requested, {len(self._free)} of {self.total} free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each of ``pages``.

        Raises:
            ValueError: a page is free.
        """
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one holder from each of ``pages``; pages without a holder become free.

        Raises:
            ValueError: a page has no holder, so it was released twice.
        """
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} was freed twice")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)


def pages_for(tokens: int, page_size: int) -> int:
    """Return the number of pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)
