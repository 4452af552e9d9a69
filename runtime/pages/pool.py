"""Allocation of KV pages: bookkeeping without the memory."""

from collections import deque
from collections.abc import Iterable, Sequence

from runtime.errors import OutOfPages


class PagePool:
    """Allocates page ids and counts the references to each page.

    Allocation is deterministic: pages are allocated in the order in which they became free,
    starting with page 0.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self.total = num_pages
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages

    @property
    def free(self) -> int:
        """Number of pages without references."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` pages with one reference each.

        Raises:
            OutOfPages: fewer pages are free; none is allocated.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages requested, {len(self._free)} of {self.total} free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each of ``pages``.

        Raises:
            ValueError: a page is free.
        """
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one reference to each of ``pages``; pages without references become free.

        Raises:
            ValueError: a page is free already.
        """
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} was freed twice")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
