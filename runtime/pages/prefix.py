"""Hashes of the content of pages, and the longest cached prefix of a prompt.

The content of a page is the KV of its tokens, which depends on all tokens before them. A page is
therefore identified by a chain of hashes: that of page ``i`` covers the tokens of the page and the
hash of page ``i - 1``. The first hash covers a *root*: model, KV format with its calibration, and a
salt. Sequences with different salts never share pages.

The hash is BLAKE2b with 256 bits, for which computing a collision is infeasible.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from sys import getsizeof

from runtime.pages.plan import PagePlan
from runtime.pages.pool import PagePool
from runtime.pages.recent import Recent

_HASH_BYTES = 32
_TOKEN_BYTES = array("I").itemsize
_MAX_BLOCK = 64
"""Maximum number of pages that are hashed before they are looked up."""


def root_hash(*facts: str | bytes) -> bytes:
    """Return a hash of facts. Each is hashed with its length, so that their boundaries count."""
    hashed = blake2b(digest_size=_HASH_BYTES)
    for fact in facts:
        content = fact if isinstance(fact, bytes) else fact.encode()
        hashed.update(len(content).to_bytes(8, "little") + content)
    return hashed.digest()


class PageHashes:
    """Hashes of the full pages of one sequence, each computed once, when it is needed.

    Several threads may use one object. At worst, they compute the same hash twice.

    Args:
        root: hash that precedes the first page.
        page_size: tokens in a page.
        packed: the first tokens of the sequence, ``uint32[n]``.
        known: hashes of the first pages.

    Attributes:
        root: hash that precedes the first page.
    """

    __slots__ = ("_hashes", "_packed", "_page_size", "root")

    def __init__(
        self,
        root: bytes,
        page_size: int,
        packed: "array[int] | None" = None,
        known: Sequence[bytes] = (),
    ) -> None:
        self.root = root
        self._page_size = page_size
        self._packed = array("I") if packed is None else packed
        self._hashes = list(known)

    def copy(self) -> "PageHashes":
        """Return a copy for a sequence that starts with the same pages."""
        return PageHashes(self.root, self._page_size, self._packed, self._hashes)

    @property
    def hashed(self) -> "HashedPages":
        """The pages of ``packed`` whose hashes are known."""
        pages = min(len(self._hashes), len(self._packed) // self._page_size)
        return HashedPages(
            self._packed[: pages * self._page_size].tobytes(), tuple(self._hashes[:pages])
        )

    def of(self, tokens: Sequence[int], pages: range) -> list[bytes]:
        """Return the hashes of full pages of the sequence.

        Args:
            tokens: tokens of the sequence, at least those of the pages and of all pages before
                them. They must be the same in all calls.
            pages: indices of the pages in the sequence.
        """
        known = len(self._hashes)
        if known < pages.stop:
            added = self._hash(tokens, range(known, pages.stop))
            # One step of the interpreter. If another thread has added some of these hashes in the
            # meantime, they are replaced by equal ones.
            self._hashes[known : pages.stop] = added
        return self._hashes[pages.start : pages.stop]

    def _hash(self, tokens: Sequence[int], pages: range) -> list[bytes]:
        """Return the hashes of pages that follow those with known hashes."""
        size, page_bytes = self._page_size, _TOKEN_BYTES * self._page_size
        first, end = pages.start * size, pages.stop * size
        is_packed = end <= len(self._packed)
        packed = self._packed[first:end] if is_packed else array("I", tokens[first:end])
        content = packed.tobytes()
        before = self._hashes[pages.start - 1] if pages.start else self.root
        hashes = []
        for at in range(0, len(content), page_bytes):
            page = before + content[at : at + page_bytes]
            before = blake2b(page, digest_size=_HASH_BYTES).digest()
            hashes.append(before)
        return hashes


@dataclass(frozen=True)
class HashedPages:
    """The first pages of a sequence.

    Attributes:
        data: token ids, ``uint32[n]``.
        hashes: hash of each page.
    """

    data: bytes
    hashes: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Size in memory, bytes, about."""
        return len(self.data) + len(self.hashes) * (8 + getsizeof(bytes(_HASH_BYTES)))


class PageHasher:
    """Hashes the pages of prompts. Thread-safe.

    The hashes of a prompt are copied as far as it begins like a recent one. To compute those of
    7,000 tokens takes about a millisecond.

    Args:
        root: see `EngineOptions.prefix_root`. The salt of each prompt is added to it.
        page_size: tokens in a page.
    """

    def __init__(self, root: bytes, page_size: int) -> None:
        self._root = root
        self._page_size = page_size
        self._recent = Recent[HashedPages]()

    def hashes(self, packed: "array[int]", salt: bytes) -> PageHashes:
        """Return the hashes of a prompt.

        Args:
            packed: tokens of the prompt, ``uint32[n]``.
            salt: only prompts with the same salt have equal hashes.
        """
        root = root_hash(self._root, salt)
        found, common = self._recent.longest(root, packed.tobytes())
        pages = common // (_TOKEN_BYTES * self._page_size)
        return PageHashes(root, self._page_size, packed, found.hashes[:pages] if found else ())

    def remember(self, hashes: PageHashes) -> None:
        """Keep the hashes of a prompt, of which those of all pages are known."""
        added = hashes.hashed
        self._recent.add(hashes.root, added, self._recent.longest(hashes.root, added.data)[0])


def cached_pages(
    plan: PagePlan,
    pools: Sequence[PagePool],
    hashes: PageHashes,
    tokens: Sequence[int],
    *,
    received: bool,
    may_reuse: int | None = None,
) -> int:
    """Return the length in pages of the longest prefix of a prompt whose pages are in the pools.

    `PagePlan.reused` defines which pages of each group a prefix needs. At least the last token of
    the prompt is not part of the prefix, because its logits are needed. Pages are hashed and looked
    up in blocks of at most `_MAX_BLOCK`, so that few pages after the first missing one are hashed,
    unless all groups are sliding windows.

    Args:
        pools: pool of each page group.
        tokens: tokens of the prompt, none of which will be evicted.
        received: whether another worker sends the rest of the KV.
        may_reuse: maximum number of tokens of the prefix; None for no limit.
    """
    groups = range(len(pools))
    most = len(tokens) - 1 if may_reuse is None else min(may_reuse, len(tokens) - 1)
    limit = max(0, plan.full(most))
    windows = {at: pools[at] for at in groups if plan.slides(at) and not received}
    needed = [
        (pools[at], pages)
        for at in groups
        if at not in windows
        for pages in plan.reused(limit, at, len(tokens), received=received)
    ]
    found, count = 0, 1
    while found < limit:
        block = range(found, min(found + count, limit))
        found = min(
            (_first_missing(pool, pages, hashes, tokens, block) for pool, pages in needed),
            default=block.stop,
        )
        if found < block.stop:
            break
        count = min(2 * count, _MAX_BLOCK)
    return _with_windows(plan, windows, hashes, tokens, found)


def _first_missing(
    pool: PagePool, pages: range, hashes: PageHashes, tokens: Sequence[int], block: range
) -> int:
    """Return the first page of a block that is among ``pages`` and not in the pool, or its end."""
    looked_up = range(max(pages.start, block.start), min(pages.stop, block.stop))
    if not looked_up:
        return block.stop
    found = pool.find(hashes.of(tokens, looked_up))
    return block.stop if len(found) == len(looked_up) else looked_up.start + len(found)


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
    shorter = pages + 1
    while pages < shorter:
        shorter = pages
        for at, pool in windows.items():
            while missing := _last_missing(plan, at, pool, hashes, tokens, pages):
                pages = missing - 1
    return pages


def _last_missing(
    plan: PagePlan,
    at: int,
    pool: PagePool,
    hashes: PageHashes,
    tokens: Sequence[int],
    pages: int,
) -> int:
    """Return the number of pages up to the last one that a window lacks; 0 if it has all."""
    [*_, window] = plan.reused(pages, at, len(tokens))
    for page in reversed(window):
        if not pool.find(hashes.of(tokens, range(page, page + 1))):
            return page + 1
    return 0
