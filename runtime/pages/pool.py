"""Allocation of KV pages: bookkeeping without the memory."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from runtime.errors import OutOfPages


class PagePool:
    """Allocates page ids, counts the references to each page, and finds pages by their content.

    A page has content with a *hash* once `keep` was called (`runtime.pages.prefix`). Such a page is
    *cached* when its last reference is removed: it is free, but `find` still returns it, and
    `share` takes it back. Pages without content are allocated first, in the order in which they
    became free, starting with page 0. Then cached pages are *evicted* in the order in which their
    last references were removed. Allocation is deterministic.

    `find` may be called on any thread, because it only looks up keys in a dict. Its result is a
    hint there: the pages may be evicted at any time.

    Attributes:
        total: number of pages.
        evicted: number of cached pages that were evicted so far.
        version: number of changes so far after which `find` may return other pages, or `in_use`
            another number for pages with content.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self.total = num_pages
        self.evicted = self.version = 0
        # Free pages without content.
        self._blank = deque(range(num_pages))
        # Free pages with content, in the order in which they became free.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._pages: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Number of pages without references, including cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of free pages whose content can be found."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` pages with one reference each and without content.

        Raises:
            OutOfPages: fewer pages are free; none is allocated.
        """
        if count > self.free:
            raise OutOfPages(f"{count} pages requested, {self.free} of {self.total} free")
        blank = min(count, len(self._blank))
        pages = [self._blank.popleft() for _ in range(blank)]
        pages += [self._evict() for _ in range(count - blank)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each of ``pages``, which have references or are cached.

        Raises:
            ValueError: a page is free and has no content.
        """
        for page in pages:
            if self._references[page] == 0:
                if page not in self._cached:
                    raise ValueError(f"page {page} is free and cannot be shared")
                del self._cached[page]
                self.version += 1
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one reference to each of ``pages``; pages without references become free.

        Cached pages at the end of ``pages`` are evicted before those at its beginning. Thus, if the
        pages are in the order of their sequence, a page is evicted before the page that precedes
        it.

        Raises:
            ValueError: a page is free already.
        """
        blank = []
        for page in reversed(pages):
            if self._references[page] == 0:
                raise ValueError(f"page {page} was freed twice")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._hashes[page] is None:
                blank.append(page)
            else:
                self._cached[page] = None
                self.version += 1
        self._blank.extend(reversed(blank))

    def in_use(self, pages: Iterable[int]) -> int:
        """Return how many of ``pages`` have references."""
        references = list(map(self._references.__getitem__, pages))
        return len(references) - references.count(0)

    def keep(self, page: int, content: bytes) -> None:
        """Record the hash of the content of a page that has references and is no longer written.

        If another page has the same content, nothing is recorded.

        Raises:
            ValueError: the page is free, or has other content.
        """
        known = self._hashes[page]
        if self._references[page] == 0 or known not in (None, content):
            raise ValueError(f"the content of page {page} cannot be recorded")
        if self._pages.setdefault(content, page) == page:
            self._hashes[page] = content
            self.version += 1

    def find(self, contents: Sequence[bytes]) -> list[int]:
        """Return the pages with these contents, up to the first content that no page has."""
        found = []
        for content in contents:
            page = self._pages.get(content)
            if page is None:
                break
            found.append(page)
        return found

    def forget(self, page: int) -> None:
        """Drop the content of a page, which is then not found any more. Idempotent."""
        content = self._hashes[page]
        if content is None:
            return
        self._hashes[page] = None
        del self._pages[content]
        self.version += 1
        if page in self._cached:
            del self._cached[page]
            self._blank.append(page)

    def _evict(self) -> int:
        """Take the page that was cached first."""
        page, _ = self._cached.popitem(last=False)
        content = self._hashes[page]
        assert content is not None
        self._hashes[page] = None
        del self._pages[content]
        self.evicted += 1
        self.version += 1
        return page
