"""Pages of sequences: the pools of one engine, the need for pages, and deferred release.

A compressed KV format has two pools. A prompt is computed over exact pages. In the step that
completes it, those that are not recent are encoded into stored pages. A decode step encodes the
page that has just left the window of recent tokens. Encoded exact pages are freed.

A page released while steps are in flight becomes free when the latest of them has completed.
"""

from collections import deque
from collections.abc import Iterable

from runtime.core.sequence import FREED, Purpose, Sequence, SequenceGroup
from runtime.errors import OutOfPages
from runtime.pages.plan import PageCount, PagePlan
from runtime.pages.pool import PagePool
from runtime.pages.window import SINK_PAGES


class SequencePages:
    """Allocates pages to sequences.

    Args:
        total: number of pages; of stored ones too with a compressed KV format.

    Attributes:
        plan: counts of the pages that sequences need.
        exact: pool of exact pages.
        stored: pool of stored pages; None if the KV format has none.
    """

    def __init__(self, plan: PagePlan, total: PageCount) -> None:
        self.plan = plan
        self.exact = PagePool(total.exact)
        self.stored = PagePool(total.stored) if plan.compressed else None
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
        """Return the number of free pages needed to admit a group and run one decode step."""
        first = group.sequences[0]
        if group.purpose is Purpose.HOLD:
            return self.plan.computed(len(first.tokens), first.evicts)
        return self.plan.admission(
            len(first.tokens),
            limit=first.limit,
            known=first.known,
            evicted=first.evicts,
            choices=len(group.sequences),
            received=group.purpose is Purpose.RECEIVE,
        )

    def check_fits(self, group: SequenceGroup) -> None:
        """Raise `OutOfPages` if a group needs more pages than there are."""
        need, total, tokens = self.need(group), self.total, group.sequences[0].known
        if need.exact > total.exact:
            raise OutOfPages(f"{tokens} tokens need {need.exact} of {total.exact} pages")
        if need.stored > total.stored:
            raise OutOfPages(f"{tokens} tokens need {need.stored} of {total.stored} stored pages")

    def suffice_for_step(self, running: int) -> bool:
        """Return whether the free pages suffice for a step of any ``running`` sequences."""
        return self.plan.step.times(running).fits(self.free)

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
        tokens = len(group.tokens)
        if group.purpose is Purpose.RECEIVE:
            tokens -= first.evicts
            for sequence in group.sequences:
                sequence.evict(range(0))
            need = self.plan.received(tokens)
        else:
            need = self.plan.computed(tokens, first.evicts)
        first.pages = self.exact.allocate(need.exact)
        if self.stored:
            first.stored = self.stored.allocate(need.stored)
        if group.purpose is Purpose.HOLD:
            return
        if group.purpose is Purpose.RECEIVE:
            first.pages[SINK_PAGES:SINK_PAGES] = [FREED] * need.stored
        full, count = first.pages[: tokens // self.plan.page_size], len(first.pages)
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
        first = end = self.plan.first_recent(length - 1)
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
