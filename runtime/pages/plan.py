"""Numbers of KV pages that sequences need.

Without a compressed KV format, all pages are exact. A compressed format has two pools. A prompt is
computed over exact pages; in the step that completes it, those that are not recent are encoded into
stored pages. A decode step encodes the page that has just left the window of recent tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from runtime.pages.window import SINK_PAGES, WINDOW, first_recent

PAGE_SIZE = 16
"""Tokens in a page of all workers."""


class PageCount(NamedTuple):
    """Numbers of exact and of stored pages."""

    exact: int
    stored: int = 0

    def fits(self, free: "PageCount") -> bool:
        """Return whether there are enough pages of both kinds."""
        return self.exact <= free.exact and self.stored <= free.stored

    def times(self, count: int) -> "PageCount":
        """Return ``count`` times as many pages."""
        return PageCount(self.exact * count, self.stored * count)

    def minus(self, other: "PageCount") -> "PageCount":
        """Return the difference of both kinds; it may be negative."""
        return PageCount(self.exact - other.exact, self.stored - other.stored)

    @classmethod
    def total(cls, counts: Iterable["PageCount"]) -> "PageCount":
        """Return the sum of page counts."""
        exact = stored = 0
        for count in counts:
            exact, stored = exact + count.exact, stored + count.stored
        return cls(exact, stored)


class Paged(Protocol):
    """A sequence in the decode batch; see `runtime.core.sequence.Sequence`."""

    pages: list[int]
    stored: list[int]

    @property
    def kv_length(self) -> int: ...


_Paged = TypeVar("_Paged", bound=Paged)


def pages_for(tokens: int, page_size: int) -> int:
    """Return the number of pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Number and kind of the pages of sequences on one worker.

    Attributes:
        page_size: tokens in a page.
        compressed: whether the KV format has stored pages.
        sink_pages, window: pages and tokens that stay exact; see `runtime.pages.window`.
    """

    page_size: int
    compressed: bool = False
    sink_pages: int = SINK_PAGES
    window: int = WINDOW

    def pages(self, tokens: int) -> int:
        """Return the pages of a sequence, exact and stored ones."""
        return pages_for(tokens, self.page_size)

    def stored(self, tokens: int) -> int:
        """Return how many of the `pages` are stored once the tokens' KV is encoded."""
        return self.first_recent(tokens) - self.sink_pages if self.compressed else 0

    def first_recent(self, tokens: int) -> int:
        """Return the index of the first page after the stored ones; see `window.first_recent`."""
        return first_recent(tokens, self.page_size, self.sink_pages, self.window)

    @property
    def step(self) -> PageCount:
        """Pages that a sequence lacks at most for its next decode step."""
        return PageCount(1, int(self.compressed))

    @property
    def max_window(self) -> int:
        """Maximum number of exact pages that a decode step of one sequence uses.

        With a compressed format, these are the sinks, the pages of the window, and the page that
        has just left it, which the step encodes.
        """
        return self.sink_pages + pages_for(self.window, self.page_size) + 1

    def computed(self, tokens: int, evicted: int = 0) -> PageCount:
        """Return the pages of a prompt that is computed, and then held or decoded.

        Args:
            evicted: number of the tokens that are evicted once the prompt is complete.
        """
        return PageCount(self.pages(tokens), self.stored(tokens - evicted))

    def received(self, tokens: int) -> PageCount:
        """Return the pages into which the KV of a prompt is received, without evicted tokens."""
        stored = self.stored(tokens)
        return PageCount(self.pages(tokens) - stored, stored)

    def sent(self, tokens: int, *, stored: bool) -> tuple[range, ...]:
        """Return which exact or stored pages of a sequence have KV, as indices within it.

        Every page is either exact or stored.
        """
        pages = self.pages(tokens)
        if not self.compressed:
            return () if stored else (range(pages),)
        recent = self.first_recent(tokens)
        if stored:
            return (range(self.sink_pages, recent),)
        return range(min(self.sink_pages, pages)), range(recent, pages)

    def admission(
        self,
        tokens: int,
        *,
        limit: int,
        known: int,
        evicted: int = 0,
        choices: int = 1,
        received: bool = False,
    ) -> PageCount:
        """Return the free pages that choices of a request need to run their first decode step.

        Stored pages are counted for forced tokens, too, as sequences keep them.

        Args:
            tokens: tokens of the prompt.
            limit: maximum length of a choice, including the prompt.
            known: number of tokens that the host knows, including forced ones after the prompt.
            evicted: number of prompt tokens that are evicted once the prompt is complete.
            received: whether another worker sends the KV; it has evicted the tokens then.
        """
        kept, longest = tokens - evicted, limit - 1
        held, most = (kept, longest - evicted) if received else (tokens, longest)
        exact = self._shared(held, min(held + 1, most), choices)
        length = min(known + 1, limit - 1) - evicted
        if not self.compressed:
            return PageCount(max(exact, self._shared(kept, length, choices)))
        if received:  # the others arrive as stored pages
            exact -= self.stored(held)
        if known > tokens:
            exact = max(exact, choices * min(self.pages(length), self.max_window))
        shared = self.stored(kept)
        return PageCount(exact, shared + choices * (self.stored(length) - shared))

    def decode(
        self, prompt: int, length: int, *, choices: int = 1, computed: bool = False
    ) -> PageCount:
        """Return the pages that choices of a request occupy at most up to a length.

        Choices share the stored pages of the prompt, and its full exact pages.

        Args:
            prompt: tokens of the prompt.
            length: tokens of each choice with KV, including the prompt.
            computed: whether this worker also computes the prompt.
        """
        if not self.compressed:
            return PageCount(self._shared(prompt, length, choices))
        full, stored = prompt // self.page_size, self.stored(prompt)
        sinks = min(full, self.sink_pages)
        window = min(self.pages(length), self.max_window)
        exact = sinks + choices * (window - sinks)
        if computed:  # the first decode step, before exact pages of the prompt are free
            exact = max(exact, self._shared(prompt, min(prompt + 1, length), choices))
        return PageCount(exact, stored + choices * (self.stored(length) - stored))

    def max_tokens(self, pages: PageCount) -> int:
        """Return the KV tokens of the longest sequence that these pages hold in decode."""
        exact = pages.exact * self.page_size
        if not self.compressed:
            return exact
        stored = (pages.stored + self.sink_pages + 1) * self.page_size - 1 + self.window
        return stored if pages.exact >= self.max_window else min(exact, stored)

    def lacking(self, sequences: Iterable[_Paged]) -> list[_Paged]:
        """Return the sequences that lack a page for their next decode step.

        Called in every step with the whole batch, so it is fast.
        """
        size = self.page_size
        if not self.compressed:
            return [s for s in sequences if s.kv_length > size * len(s.pages)]
        unstored = self.sink_pages + 1
        return [
            s
            for s in sequences
            if (length := s.kv_length) > size * len(s.pages)
            or length - self.window >= size * (unstored + len(s.stored))
        ]

    def missing(self, sequence: Paged) -> PageCount:
        """Return the pages that a sequence lacks for its next decode step, at most `step`."""
        length = sequence.kv_length
        return PageCount(
            max(0, self.pages(length) - len(sequence.pages)),
            max(0, self.stored(length) - len(sequence.stored)),
        )

    def batch(self, sequences: int, prompt: int) -> int:
        """Return the exact pages of a full batch, and of one prompt, with a compressed format.

        A sequence keeps one page more than its last step used, until that step has completed. The
        engine waits for this step if no page is free (`Scheduler.must_preempt`).
        """
        return sequences * self.max_window + self.pages(prompt)

    def _shared(self, prompt: int, length: int, choices: int) -> int:
        """Return the pages of choices that share the full pages of a prompt."""
        full = prompt // self.page_size
        return full + choices * (self.pages(length) - full)
