"""The prefix cache of a simulated worker, which keeps the most recently used pages of KV."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

Pages = Sequence[range]
"""Ids of the pages of a prompt, in order."""


class SimulatedCache:
    """Pages of prompts that a worker has computed or received.

    If the cache is full, the least recently used pages are evicted, and of one prompt the last page
    first. Pages that running sequences use are evicted as well: there are few of them.

    Args:
        pages: maximum number of pages; 0: no cache.
    """

    def __init__(self, pages: int) -> None:
        self._limit = pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, prompt: Pages) -> int:
        """Return how many pages at the beginning of a prompt are cached."""
        number = 0
        for page in chain.from_iterable(prompt):
            if page not in self._pages:
                break
            number += 1
        return number

    def insert(self, prompt: Pages) -> None:
        """Add the pages of a prompt, or mark them as used now."""
        if not self._limit:
            return
        for part in reversed(prompt):
            for page in reversed(part):
                self._pages[page] = None
                self._pages.move_to_end(page)
        while len(self._pages) > self._limit:
            self._pages.popitem(last=False)
