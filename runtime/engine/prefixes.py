"""Reuse of cached pages: records the content of pages, and finds cached pages of a prompt.

The pools of an engine find pages by the hash of their content (`runtime.pages.prefix`). A page gets
its hash when it is full and its KV is known to be complete:

- pages of a prompt chunk when the step that computes the chunk has completed,
- pages whose KV another worker has sent when all of it was verified,
- pages of output tokens when their sequence stops, unless the format encodes pages.

Only full pages are shared, so no sequence writes to a page of another one. If tokens of a prompt
are evicted, the prompt reuses no pages, and its pages cannot be found, because eviction moves
tokens between pages.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.core.plan import Chunk
from runtime.core.sequence import FREED, Purpose, SequenceGroup, SequenceState
from runtime.pages.plan import PageCount, PagePlan
from runtime.pages.pool import PagePool
from runtime.pages.prefix import PageHasher, cached_pages


@dataclass(frozen=True)
class Prefix:
    """Cached pages with which a prompt starts.

    Attributes:
        pages: number of full pages whose KV need not be computed or sent.
        tables: for each page group, pairs of indices in the sequence and the ids of these pages.
    """

    pages: int
    tables: tuple[list[tuple[range, list[int]]], ...]


@dataclass(frozen=True)
class ComputedPages:
    """Pages that a prompt chunk fills in a step.

    Attributes:
        first: index of the first page in the sequence.
        tables: ids of the pages in each page group; `FREED` where the group has none.
        completes: whether the chunk is the last one of the prompt.
    """

    group: SequenceGroup
    first: int
    tables: list[list[int]]
    completes: bool


@dataclass(frozen=True)
class PrefixCounts:
    """Use of the cached pages of an engine since its start.

    Attributes:
        queried_tokens: tokens of the prompts for which cached pages were searched.
        reused_tokens: tokens of these whose pages were reused.
        evicted: cached pages of each group that were evicted.
        cached: free pages of each group whose content can be found now.
    """

    queried_tokens: int = 0
    reused_tokens: int = 0
    evicted: PageCount = field(default_factory=PageCount)
    cached: PageCount = field(default_factory=PageCount)


class _Search(NamedTuple):
    """Inputs that determine the result of a search for the cached prefix of a group.

    Attributes:
        tokens: number of tokens of the group, which a preemption may change.
        versions: `PagePool.version` of each pool.
    """

    group: SequenceGroup
    purpose: Purpose
    tokens: int
    versions: tuple[int, ...]


class Prefixes:
    """Finds the pages of prompts in the pools, and records the content of pages.

    Args:
        pools: pool of each page group.
        root: see `EngineOptions.prefix_root`.

    Attributes:
        hasher: hashes the pages of prompts; None if no pages are reused.
    """

    def __init__(self, plan: PagePlan, pools: Sequence[PagePool], root: bytes | None) -> None:
        self._plan = plan
        self._pools = pools
        self.hasher = None if root is None else PageHasher(root, plan.page_size)
        self._queried_tokens = self._reused_tokens = 0
        # The last search of `in_use` and its result.
        self._searched: _Search | None = None
        self._in_use = PageCount()

    @property
    def counts(self) -> PrefixCounts:
        """Use of the cached pages so far."""
        return PrefixCounts(
            self._queried_tokens,
            self._reused_tokens,
            PageCount(*(pool.evicted for pool in self._pools)),
            PageCount(*(pool.cached for pool in self._pools)),
        )

    def start(self, group: SequenceGroup) -> None:
        """Let a new group use cached pages, unless its tokens are evicted.

        The first sequence gets the hashes of the request, which may be in use on other threads.
        When the prompt is complete, each sequence gets hashes of its own.
        """
        if self.hasher is not None and not group.evicts:
            group.sequences[0].hashes = group.request.page_hashes(self.hasher)

    def cached_tokens(self, group: SequenceGroup) -> int:
        """Return how many prompt tokens of a group are in cached pages. Callable on any thread."""
        return self._find(group) * self._plan.page_size

    def common_tokens(self, one: SequenceGroup, other: SequenceGroup) -> int:
        """Return how many first tokens of two prompts fill pages with equal content."""
        tokens, plan = min(len(one.tokens), len(other.tokens)), self._plan
        hashes = [group.sequences[0].hashes for group in (one, other)]
        if any(each is None for each in hashes):
            return 0

        def differ(page: int) -> bool:  # as soon as an earlier page does
            found = [
                each.of(group.tokens, range(page, page + 1))
                for each, group in zip(hashes, (one, other), strict=True)
                if each is not None
            ]
            return found[0] != found[1]

        if tokens <= plan.page_size or differ(0):
            return 0
        return plan.page_size * bisect_left(range(plan.full(tokens - 1)), True, key=differ)

    def in_use(self, group: SequenceGroup) -> PageCount:
        """Return how many pages of the cached prefix of a group other sequences use.

        The first group in the queue may wait for many steps. It is searched again only after the
        pools have changed.
        """
        versions = tuple(pool.version for pool in self._pools)
        search = _Search(group, group.purpose, len(group.tokens), versions)
        if search != self._searched:
            self._searched, tables = search, self._tables(group, self._find(group))
            self._in_use = PageCount(
                *(
                    sum(pool.in_use(pages) for _, pages in table)
                    for pool, table in zip(self._pools, tables, strict=True)
                )
            )
        return self._in_use

    def take(self, group: SequenceGroup) -> Prefix:
        """Add a reference to the pages of the longest cached prefix of a group.

        The tokens of a group are counted when it is admitted first, and not after a preemption.
        """
        self._searched = None
        prefix = self._share(group, self._find(group))
        if group.position is None and group.sequences[0].hashes is not None:
            self._queried_tokens += len(group.tokens)
            self._reused_tokens += prefix.pages * self._plan.page_size
        return prefix

    def pin(self, group: SequenceGroup) -> Prefix | None:
        """Add a reference to all full pages before the last token of a group, if all are cached."""
        pages = self._plan.full(len(group.tokens) - 1)
        return self._share(group, pages) if 0 < pages == self._find(group) else None

    def _share(self, group: SequenceGroup, pages: int) -> Prefix:
        tables = self._tables(group, pages)
        for pool, table in zip(self._pools, tables, strict=True):
            for _, shared in table:
                pool.share(shared)
        return Prefix(pages, tables)

    def computed(self, chunk: Chunk) -> ComputedPages:
        """Return the full pages that a chunk computes, before the step changes page tables."""
        group, plan = chunk.group, self._plan
        pages = range(plan.full(chunk.first), plan.full(chunk.end))
        tables = [table[pages.start : pages.stop] for table in group.sequences[0].page_tables]
        return ComputedPages(group, pages.start, tables, chunk.completes)

    def keep_computed(self, pages: ComputedPages) -> None:
        """Record the content of pages that a completed step has computed."""
        group = pages.group
        self._keep(group.sequences[0], pages.first, pages.tables)
        if pages.completes:
            self._copy_hashes(group)

    def keep_received(self, group: SequenceGroup, end: int) -> None:
        """Record the content of prompt pages whose KV was received and verified.

        Args:
            end: position after the last received token.
        """
        plan, first = self._plan, group.sequences[0]
        pages = range(plan.full(group.reused), plan.full(end))
        tables = [table[pages.start : pages.stop] for table in first.page_tables]
        self._keep(first, pages.start, tables)
        if end == len(group.tokens):
            self._copy_hashes(group)

    def keep_decoded(self, sequence: SequenceState) -> None:
        """Record the content of pages with output tokens of a sequence that stops.

        The last token has no KV yet.
        """
        plan, request = self._plan, sequence.request
        computed = plan.reusable(len(sequence.tokens) - 1, request.prompt_tokens)
        pages = range(plan.full(len(request.tokens)), plan.full(computed))
        if pages:
            tables = [table[pages.start : pages.stop] for table in sequence.page_tables]
            self._keep(sequence, pages.start, tables)

    def forget(self, sequence: SequenceState) -> None:
        """Drop the content of all pages of a sequence, which may be damaged."""
        sequence.hashes = None
        for pool, table in zip(self._pools, sequence.page_tables, strict=False):
            for page in table:
                if page != FREED:
                    pool.forget(page)

    def _keep(self, sequence: SequenceState, first: int, tables: Sequence[list[int]]) -> None:
        """Record the content of pages of a sequence.

        Args:
            first: index of the first page in the sequence.
            tables: pages of each group from there on.
        """
        if sequence.hashes is None:
            return
        for pool, table in zip(self._pools, tables, strict=True):
            contents = sequence.hashes.of(sequence.tokens, range(first, first + len(table)))
            for page, content in zip(table, contents, strict=True):
                if page != FREED:
                    pool.keep(page, content)

    def _copy_hashes(self, group: SequenceGroup) -> None:
        """Keep the hashes of a complete prompt for later ones, and give each choice a copy.

        The output of a choice is added to its copy.
        """
        hashes = group.sequences[0].hashes
        if self.hasher is not None and hashes is not None:
            self.hasher.remember(hashes)
            for sequence in group.sequences:
                sequence.hashes = hashes.copy()

    def _find(self, group: SequenceGroup) -> int:
        """Return the number of pages of the longest cached prefix that a group may reuse."""
        hashes = group.sequences[0].hashes
        if hashes is None:
            return 0
        return cached_pages(
            self._plan,
            self._pools,
            hashes,
            group.tokens,
            received=group.purpose is Purpose.RECEIVE,
            may_reuse=group.may_reuse,
        )

    def _tables(
        self, group: SequenceGroup, pages: int
    ) -> tuple[list[tuple[range, list[int]]], ...]:
        """Return the pages of a cached prefix, as in `Prefix`."""
        hashes = group.sequences[0].hashes
        if not pages or hashes is None:
            return tuple([] for _ in self._pools)
        received, tokens = group.purpose is Purpose.RECEIVE, group.tokens
        return tuple(
            [
                (held, pool.find(hashes.of(tokens, held)))
                for held in self._plan.reused(pages, at, len(tokens), received=received)
                if held
            ]
            for at, pool in enumerate(self._pools)
        )
