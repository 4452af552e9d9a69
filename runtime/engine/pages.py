"""Pages of sequences: the pools of one engine, the need for pages, and deferred release.

A compressed KV format has two pools. A prompt is computed over exact pages. In the step that
completes it, those that are not recent are encoded into stored pages. A decode step encodes the
page that has just left the window of recent tokens. Encoded exact pages are freed.

A page released while steps are in flight becomes free when the latest of them has completed.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from runtime.core.sequence import FREED, Purpose, Sequence, SequenceGroup
from runtime.core.window import SINK_PAGES, WINDOW, first_recent, max_exact_pages, stored_pages
from runtime.errors import OutOfPages
from runtime.kv.pages import PagePool, pages_for


class PageCount(NamedTuple):
    """Numbers of exact and of stored pages."""

    exact: int
    stored: int = 0

    def fits(self, free: "PageCount") -> bool:
        """Return whether there are enough pages of both kinds."""
        return self.exact <= free.exact and self.stored <= free.stored


class SequencePages:
    """Allocates pages to sequences.

    Args:
        num_pages: number of exact pages.
        num_stored: number of stored pages; 0 if the KV format has none.

    Attributes:
        exact: pool of exact pages.
        stored: pool of stored pages; None if the KV format has none.
    """

    def __init__(self, num_pages: int, num_stored: int, page_size: int) -> None:
        self._page_size = page_size
        self.exact = PagePool(num_pages)
        self.stored = PagePool(num_stored) if num_stored else None
        self._deferred: deque[tuple[list[int], list[int]]] = deque()  # one for each in-flight step

    @property
    def free(self) -> PageCount:
        """Number of free pages."""
        return PageCount(self.exact.free, self.stored.free if self.stored else 0)

    @property
    def total(self) -> PageCount:
        """Number of pages."""
        return PageCount(self.exact.total, self.stored.total if self.stored else 0)

    def need(self, group: SequenceGroup) -> PageCount:
        """Return the number of free pages needed to admit a group and run one decode step.

        Stored pages are counted for forced tokens, too, as sequences keep them.
        """
        first, size = group.sequences[0], self._page_size
        tokens, choices = len(first.tokens), len(group.sequences)
        kept = tokens - first.evicts  # once the prompt is complete
        if group.purpose is Purpose.HOLD:
            return PageCount(pages_for(tokens, size), stored_pages(kept, size) * bool(self.stored))
        longest = first.limit - 1
        if group.purpose is Purpose.RECEIVE:
            tokens, longest = kept, longest - first.evicts
        shared = tokens // size
        exact = shared + choices * (pages_for(min(tokens + 1, longest), size) - shared)
        length = min(first.known + 1, first.limit - 1) - first.evicts
        if not self.stored:
            shared = kept // size
            return PageCount(max(exact, shared + choices * (pages_for(length, size) - shared)))
        if group.purpose is Purpose.RECEIVE:  # the others arrive as stored pages
            exact -= stored_pages(tokens, size)
        if first.forced:
            exact = max(exact, choices * min(pages_for(length, size), max_exact_pages(size)))
        shared = stored_pages(kept, size)
        return PageCount(exact, shared + choices * (stored_pages(length, size) - shared))

    def check_fits(self, group: SequenceGroup) -> None:
        """Raise `OutOfPages` if a group needs more pages than there are."""
        need, total, tokens = self.need(group), self.total, group.sequences[0].known
        if need.exact > total.exact:
            raise OutOfPages(f"{tokens} tokens need {need.exact} of {total.exact} pages")
        if need.stored > total.stored:
            raise OutOfPages(f"{tokens} tokens need {need.stored} of {total.stored} stored pages")

    def suffice_for_step(self, running: int) -> bool:
        """Return whether the free pages suffice for a step of any ``running`` sequences.

        A sequence needs at most one more page of each kind that the KV format has.
        """
        return PageCount(running, running * bool(self.stored)).fits(self.free)

    def lacking(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the running sequences that lack a page for their next step.

        Called in every step with the whole batch, so it is fast.
        """
        size = self._page_size
        if not self.stored:
            return [s for s in sequences if s.kv_length > size * len(s.pages)]
        return [
            s
            for s in sequences
            if (length := s.kv_length) > size * len(s.pages)
            or length - WINDOW >= size * (SINK_PAGES + 1 + len(s.stored))
        ]

    def missing(self, sequence: Sequence) -> PageCount:
        """Return the number of pages that a running sequence lacks for its next step.

        It lacks at most one of each kind.
        """
        length, size = sequence.kv_length, self._page_size
        exact = max(0, pages_for(length, size) - len(sequence.pages))
        if not self.stored:
            return PageCount(exact)
        return PageCount(exact, max(0, stored_pages(length, size) - len(sequence.stored)))

    def grow(self, sequence: Sequence, missing: PageCount) -> None:
        """Allocate the missing pages of a running sequence."""
        sequence.pages += self.exact.allocate(missing.exact)
        if self.stored:
            sequence.stored += self.stored.allocate(missing.stored)

    def admit(self, group: SequenceGroup) -> None:
        """Allocate the pages of a group's prompt.

        Choices share stored pages and full exact pages, but not a partly filled last page. A prompt
        whose KV will be received has no exact pages beside its stored ones, and none for tokens
        that the other worker evicts.
        """
        first, *others = group.sequences
        tokens, size = len(group.tokens), self._page_size
        kept = tokens - first.evicts
        if self.stored:
            first.stored = self.stored.allocate(stored_pages(kept, size))
        if group.purpose is Purpose.RECEIVE:
            tokens = kept
            for sequence in group.sequences:
                sequence.evict(range(0))
        count = pages_for(tokens, size)
        if group.purpose is Purpose.RECEIVE and self.stored:
            encoded = len(first.stored)
            exact = self.exact.allocate(count - encoded)
            first.pages = exact[:SINK_PAGES] + [FREED] * encoded + exact[SINK_PAGES:]
        else:
            first.pages = self.exact.allocate(count)
        if group.purpose is Purpose.HOLD:
            return
        full = first.pages[: tokens // size]
        for sequence in others:
            self.exact.share([page for page in full if page != FREED])
            sequence.pages = full + self.exact.allocate(count - len(full))
            if self.stored:
                self.stored.share(first.stored)
                sequence.stored = first.stored.copy()

    def release_encoded(self, sequence: Sequence) -> None:
        """Release the exact pages that steps have encoded, with a compressed KV format.

        Call it when the step that computes the KV of the last token but one was launched with the
        right token: it encodes all pages that are not recent at that length.
        """
        pages = sequence.pages
        if not self.stored or not pages:  # other choices of a held prompt have no pages
            return
        length = len(sequence.tokens) - sequence.evicted
        first = end = first_recent(length - 1, self._page_size)
        while first > SINK_PAGES and pages[first - 1] != FREED:
            first -= 1
        if first < end:
            self._release(pages[first:end], [])
            pages[first:end] = [FREED] * (end - first)

    def release_vacated(self, sequences: Iterable[Sequence]) -> None:
        """Release the exact pages that an eviction has left without tokens.

        Call it when the step that evicts was launched.
        """
        for sequence in sequences:
            self._release(sequence.vacated, [])
            sequence.vacated = []

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Release all pages of sequences. Their prompts must be computed again."""
        for sequence in sequences:
            sequence.evicted = 0
            held = [page for page in sequence.pages if page != FREED]
            self._release(held, sequence.stored)
            sequence.pages, sequence.stored = [], []

    def step_launched(self) -> None:
        """Record the launch of a step. Pages released from now on may be used by it."""
        self._deferred.append(([], []))

    def step_completed(self) -> None:
        """Record the completion of the oldest in-flight step and free its deferred pages."""
        self._free(*self._deferred.popleft())

    def _release(self, exact: list[int], stored: list[int]) -> None:
        """Release pages now, or when the latest in-flight step completes."""
        if self._deferred:
            self._deferred[-1][0].extend(exact)
            self._deferred[-1][1].extend(stored)
        else:
            self._free(exact, stored)

    def _free(self, exact: list[int], stored: list[int]) -> None:
        self.exact.release(exact)
        if self.stored:
            self.stored.release(stored)
