"""Hashes of the content of pages, and the longest cached prefix of a prompt.

The content of a page is the KV of its tokens, which depends on all tokens before them. A page is
therefore identified by a chain of hashes: that of page ``i`` covers the tokens of the page and the
hash of page ``i - 1``. The first hash covers a *root*: model, KV format with its calibration, and a
salt. Sequences with different salts never share pages.

The hash is BLAKE2b with 256 bits, for which no collisions can be computed.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from runtime.pages.plan import PagePlan
from runtime.pages.pool import PagePool

_HASH_BYTES = 32


def root_hash(*facts: str | bytes) -> bytes:
    """Return a hash of facts; each is hashed with its length, so that their borders count."""
    hashed = blake2b(digest_size=_HASH_BYTES)
    for fact in facts:
        content = fact if isinstance(fact, bytes) else fact.encode()
        hashed.update(len(content).to_bytes(8, "little") + content)
    return hashed.digest()


class PageHashes:
    """Hashes of the full pages of one sequence, each computed once, when it is needed.

    Args:
        root: hash that precedes the first page.
        page_size: tokens in a page.
    """

    __slots__ = ("_hashes", "_page_size", "_root")

    def __init__(self, root: bytes, page_size: int) -> None:
        self._root = root
        self._page_size = page_size
        self._hashes: list[bytes] = []

    def copy(self) -> "PageHashes":
        """Return a copy for a sequence that starts with the same pages."""
        copied = PageHashes(self._root, self._page_size)
        copied._hashes = self._hashes.copy()
        return copied

    def of(self, tokens: Sequence[int], page: int) -> bytes:
        """Return the hash of a page of the sequence.

        Args:
            tokens: tokens of the sequence, at least those of the page and of all pages before it.
                They must be the same in all calls.
            page: index of the page in the sequence.
        """
        hashes, size = self._hashes, self._page_size
        while len(hashes) <= page:
            first = len(hashes) * size
            content = array("I", tokens[first : first + size]).tobytes()
            before = hashes[-1] if hashes else self._root
            hashes.append(blake2b(before + content, digest_size=_HASH_BYTES).digest())
        return hashes[page]


def cached_pages(
    plan: PagePlan,
    pools: Sequence[PagePool],
    hashes: PageHashes,
    tokens: Sequence[int],
    *,
    received: bool,
) -> int:
    """Return the length in pages of the longest prefix of a prompt whose pages are in the pools.

    `PagePlan.reused` says which pages of each group it needs. At least one token of the prompt is
    not part of the prefix, because its logits are needed. Pages after the first one that is missing
    are not hashed, unless all groups are sliding windows.

    Args:
        pools: pool of each page group.
        tokens: tokens of the prompt, none of which will be evicted.
        received: whether another worker sends the rest of the KV.
    """
    groups = range(len(pools))
    limit = plan.full(len(tokens) - 1)
    windows = [at for at in groups if plan.slides(at) and not received]
    needed = [
        (pools[at], pages)
        for at in groups
        if at not in windows
        for pages in plan.reused(limit, at, len(tokens), received=received)
    ]
    found = 0
    while found < limit:
        content = hashes.of(tokens, found)
        if any(found in pages and pool.find(content) is None for pool, pages in needed):
            break
        found += 1
    return _with_windows(plan, {at: pools[at] for at in windows}, hashes, tokens, found)


def _with_windows(
    plan: PagePlan,
    windows: Mapping[int, PagePool],
    hashes: PageHashes,
    tokens: Sequence[int],
    pages: int,
) -> int:
    """Return the length of the longest prefix of at most ``pages`` pages with all windows.

    Args:
        windows: pools of the groups that are sliding windows.
    """
    checked = dict.fromkeys(windows, False)
    while pages and not all(checked.values()):
        for at, pool in windows.items():
            [*_, window] = plan.reused(pages, at, len(tokens), received=False)
            missing = next(
                (page for page in reversed(window) if pool.find(hashes.of(tokens, page)) is None),
                None,
            )
            checked[at] = missing is None
            if missing is not None:
                pages = missing
                checked = dict.fromkeys(windows, False)
                break
    return pages
