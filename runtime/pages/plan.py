"""Numbers of KV pages that sequences need.

A sequence has pages of each page group. A prompt is computed over all of its pages in the groups of
`Part.ALL` and `Part.ENDS`. When it is complete, the pages that have left the window are encoded
into pages of `Part.MIDDLE`, if the cache has such a group, and freed in `Part.ENDS`. A decode step
does the same with the page that has just left the window.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from runtime.pages.count import PageCount as PageCount
from runtime.pages.groups import PageGroup as PageGroup
from runtime.pages.groups import Part as Part
from runtime.pages.groups import pages_for as pages_for

PAGE_SIZE = 16
"""Tokens in a page of all workers."""
UNBOUNDED = 1 << 31
"""Result of `PagePlan.max_tokens` if the pages do not limit the length of a sequence."""
_MAX_PAGE_SIZE = 4096
_MAX_GROUPS = 64


class Paged(Protocol):
    """A sequence in the decode batch; see `runtime.core.sequence.SequenceState`."""

    @property
    def page_tables(self) -> list[list[int]]: ...

    @property
    def kv_length(self) -> int: ...


_Paged = TypeVar("_Paged", bound=Paged)


@dataclass(frozen=True)
class PagePlan:
    """Computes the numbers of pages that sequences need on one worker.

    Methods take a group as its index in ``groups``.

    Attributes:
        page_size: tokens in a page.
        groups: page groups of the cache; those of `Part.MIDDLE` are the last.

    Raises:
        ValueError: there is no group, the order is wrong, two groups have the same name, or a value
            is out of bounds.
    """

    page_size: int
    groups: tuple[PageGroup, ...] = (PageGroup("kv"),)

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= _MAX_PAGE_SIZE:
            raise ValueError(f"pages of {self.page_size} tokens; the maximum is {_MAX_PAGE_SIZE}")
        if not 1 <= len(self.groups) <= _MAX_GROUPS:
            raise ValueError(f"{len(self.groups)} page groups; the maximum is {_MAX_GROUPS}")
        if len({group.name for group in self.groups}) < len(self.groups):
            raise ValueError(f"page groups need distinct names: {self.groups}")
        middle = [group.part is Part.MIDDLE for group in self.groups]
        if middle[0] or middle != sorted(middle):
            raise ValueError(f"groups into which pages are encoded must be the last: {self.groups}")

    def count(self, pages: Mapping[str, int]) -> PageCount:
        """Return numbers of pages, given by group name, as a `PageCount`.

        Raises:
            ValueError: the names are not those of the groups.
        """
        names = self._names
        if pages.keys() != names.keys():
            raise ValueError(f"pages of {', '.join(pages)} instead of {', '.join(names)}")
        return PageCount(*map(pages.__getitem__, names))

    def by_name(self, pages: PageCount) -> dict[str, int]:
        """Return the numbers of ``pages`` by group name."""
        return {group.name: count for group, count in zip(self.groups, pages, strict=True)}

    @cached_property
    def prompt_groups(self) -> int:
        """Number of groups that prompts use while computed: all but those of `Part.MIDDLE`."""
        return sum(group.part is not Part.MIDDLE for group in self.groups)

    @property
    def encodes(self) -> bool:
        """Whether pages that leave a window are encoded.

        Decode then attends to other KV than the computation of a prompt does.
        """
        return self.prompt_groups < len(self.groups)

    def pages(self, tokens: int) -> int:
        """Return the number of pages of a sequence, including those that have left a window."""
        return pages_for(tokens, self.page_size)

    def full(self, tokens: int) -> int:
        """Return the number of full pages of a sequence of ``tokens`` tokens."""
        return tokens // self.page_size

    def span(self, first_token: int, end: int) -> range:
        """Return the pages with tokens ``first_token … end - 1``, as indices within a sequence."""
        return range(first_token // self.page_size, pages_for(end, self.page_size))

    def filled(self, pages: range, tokens: int) -> int:
        """Return the number of tokens in ``pages`` of a sequence of ``tokens`` tokens."""
        return max(0, min(pages.stop * self.page_size, tokens) - pages.start * self.page_size)

    def each(self, pages: int) -> PageCount:
        """Return a count of ``pages`` pages of each group."""
        return PageCount(*(pages for _ in self.groups))

    @cached_property
    def step(self) -> PageCount:
        """Maximum number of pages of each group that a sequence lacks for its next decode step."""
        return self.each(1)

    @property
    def null_pages(self) -> PageCount:
        """Number of null pages of each group. Padding of replayed passes writes to them."""
        return PageCount(*(int(at < self.prompt_groups) for at in range(len(self.groups))))

    def ends(self, tokens: int) -> PageCount:
        """Return, for each group, the index after the last page of a sequence that it holds."""
        return PageCount(*(group.end(tokens, self.page_size) for group in self.groups))

    def computed(self, tokens: int, evicted: int = 0) -> PageCount:
        """Return the numbers of pages to allocate for a prompt before its first chunk.

        They include the pages of `Part.MIDDLE` into which the complete prompt is encoded.

        Args:
            tokens: number of prompt tokens to compute.
            evicted: number of the tokens that are evicted after the prompt is complete.
        """
        if self._dense:
            return PageCount(self.pages(tokens))
        groups = range(len(self.groups))
        return PageCount(*(len(self.prompt(tokens, group, evicted)) for group in groups))

    def received(self, tokens: int) -> PageCount:
        """Return the numbers of pages that receive the KV of a prompt of ``tokens`` kept tokens."""
        sent = (self.sent(tokens, group) for group in range(len(self.groups)))
        return PageCount(*(sum(map(len, ranges)) for ranges in sent))

    def prompt(self, tokens: int, group: int, evicted: int = 0) -> range:
        """Return which pages of a group to allocate for a prompt, as indices within the sequence.

        Args:
            evicted: see `computed`.
        """
        found = self.groups[group]
        if found.part is Part.MIDDLE:
            return range(found.sink_pages, found.end(tokens - evicted, self.page_size))
        return range(self.pages(tokens))

    def prefilled(self, tokens: int, prompt_tokens: int, evicted: int = 0) -> int:
        """Return how many of the known tokens of a sequence are prefilled.

        These are all tokens, unless pages are encoded or tokens are evicted. Output tokens then
        attend to other KV than a prompt does, so decode steps compute them again.

        Args:
            tokens: number of known tokens, including those of the output.
            evicted: see `computed`.
        """
        return prompt_tokens if self.encodes or evicted else tokens

    def sent(self, tokens: int, group: int) -> tuple[range, ...]:
        """Return which pages of a prompt are sent in a group, as indices within the sequence."""
        return self.groups[group].held(tokens, self.page_size)

    def slides(self, group: int) -> bool:
        """Return whether prompts are computed over a window of a group, not over all its pages."""
        return self.groups[group].part is Part.ENDS and not self.encodes

    def reused(
        self, pages: int, group: int, tokens: int, *, received: bool = False
    ) -> tuple[range, ...]:
        """Return which pages of a group a prompt needs if its first ``pages`` pages are reused.

        A prompt that is computed needs all pages to which its other tokens attend, and the encoded
        pages, because each chunk encodes its own pages alone. A prompt that is received needs the
        pages that would otherwise be sent.

        Args:
            pages: number of full pages whose tokens are neither computed nor sent.
            tokens: number of prompt tokens, none of which will be evicted.
            received: whether another worker sends the rest of the KV.

        Returns:
            Indices within the sequence, in ascending order.
        """
        if received:
            ranges = self.sent(tokens, group)
        elif self.slides(group):
            ranges = self.groups[group].held(pages * self.page_size, self.page_size)
        else:
            ranges = (self.prompt(tokens, group),)
        return tuple(range(min(found.start, pages), min(found.stop, pages)) for found in ranges)

    def reusable(self, tokens: int, prompt_tokens: int) -> int:
        """Return how many of the computed tokens of a sequence have KV that others may reuse.

        If pages are encoded, output tokens attend to other KV than a prompt does. A prompt with
        these tokens would have other KV, so only that of the prompt may be reused.
        """
        return min(tokens, prompt_tokens) if self.encodes else tokens

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
        """Return the numbers of free pages that a request needs up to its first decode step.

        Pages of `Part.MIDDLE` are counted for all known tokens, including forced ones, because the
        sequence keeps them.

        Args:
            tokens: number of prompt tokens to prefill or receive, including evicted ones.
            limit: maximum length of a choice, including the prompt.
            known: number of tokens that the host knows, including forced ones after the prompt.
            evicted: number of prompt tokens that are evicted after the prompt is complete.
            received: whether another worker sends the KV. It sends no KV of evicted tokens.
        """
        kept, longest = tokens - evicted, limit - 1
        held, most = (kept, longest - evicted) if received else (tokens, longest)
        first_step = self._shared(held, min(held + 1, most), choices)
        length = min(known + 1, limit - 1) - evicted

        def need(group: PageGroup) -> int:
            match group.part:
                case Part.ALL:
                    return max(first_step, self._shared(kept, length, choices))
                case Part.MIDDLE:
                    return self._encoded(group, kept, length, choices)
                case Part.ENDS:
                    arriving = group.middle(held, self.page_size) if received else 0
                    forced = choices * self._recent(group, length) if known > tokens else 0
                    return max(first_step - arriving, forced)

        return PageCount(*map(need, self.groups))

    def decode(
        self, prompt: int, length: int, *, choices: int = 1, computed: bool = False
    ) -> PageCount:
        """Return the maximum pages of all choices of a request until each has ``length`` tokens.

        Choices share full pages of the prompt, except those in their windows.

        Args:
            prompt: number of prompt tokens.
            length: number of tokens of each choice that have KV, including the prompt.
            computed: whether this worker also computes the prompt.
        """
        if self._dense:
            return PageCount(self._shared(prompt, length, choices))

        def need(group: PageGroup) -> int:
            match group.part:
                case Part.ALL:
                    return self._shared(prompt, length, choices)
                case Part.MIDDLE:
                    return self._encoded(group, prompt, length, choices)
                case Part.ENDS:
                    sinks = min(self.full(prompt), group.sink_pages)
                    pages = sinks + choices * (self._recent(group, length) - sinks)
                    if computed:  # the first decode step, before pages of the prompt are free
                        first_step = self._shared(prompt, min(prompt + 1, length), choices)
                        pages = max(pages, first_step)
                    return pages

        return PageCount(*map(need, self.groups))

    def max_tokens(self, pages: PageCount) -> int:
        """Return the KV tokens of the longest sequence that fits into ``pages`` in decode."""
        longest = UNBOUNDED
        for group, count in zip(self.groups, pages, strict=False):
            if group.part is Part.MIDDLE:
                tokens = (count + group.sink_pages + 1) * self.page_size - 1 + group.window
            elif group.part is Part.ENDS and count >= group.max_held(self.page_size):
                continue
            else:
                tokens = count * self.page_size
            longest = min(longest, tokens)
        return longest

    def lacking(self, sequences: Iterable[_Paged]) -> list[_Paged]:
        """Return the sequences that lack a page for their next decode step.

        It is fast, because it is called in every step with the whole batch: only the first page
        table is examined for all groups that are not of `Part.MIDDLE`, as these have equal lengths.
        """
        size, encoded = self.page_size, self._encoded_groups
        if not encoded:
            return [s for s in sequences if s.kv_length > size * len(s.page_tables[0])]
        return [
            s
            for s in sequences
            if (length := s.kv_length) > size * len(s.page_tables[0])
            or any(length - window >= size * (1 + len(s.page_tables[at])) for at, window in encoded)
        ]

    def missing(self, sequence: Paged) -> PageCount:
        """Return the pages that a sequence lacks for its next decode step, at most `step`."""
        ends = zip(self.ends(sequence.kv_length), sequence.page_tables, strict=True)
        return PageCount(*(max(0, end - len(pages)) for end, pages in ends))

    def batch(self, sequences: int, prompt: int) -> PageCount:
        """Return the pages of `Part.ENDS` that a full batch and one prompt use; 0 for other groups.

        A sequence keeps one page more than its last step used, until that step has completed. The
        engine waits for this step if no page is free (`Scheduler.must_preempt`).

        Args:
            sequences: number of sequences in the batch.
            prompt: number of tokens of the prompt that is computed beside it.
        """
        return PageCount(
            *(
                sequences * group.max_held(self.page_size) + self.pages(prompt)
                if group.part is Part.ENDS
                else 0
                for group in self.groups
            )
        )

    @cached_property
    def _names(self) -> dict[str, None]:
        """Names of the groups, in their order."""
        return dict.fromkeys(group.name for group in self.groups)

    @cached_property
    def _dense(self) -> bool:
        """Whether the only group is of `Part.ALL`."""
        return len(self.groups) == 1 and self.groups[0].part is Part.ALL

    @cached_property
    def _encoded_groups(self) -> tuple[tuple[int, int], ...]:
        """Pairs of the index of each group of `Part.MIDDLE` and its window in tokens."""
        groups = range(self.prompt_groups, len(self.groups))
        return tuple((at, self.groups[at].window) for at in groups)

    def _recent(self, group: PageGroup, length: int) -> int:
        """Return the maximum pages of one sequence in a group of `Part.ENDS` up to a length."""
        return min(self.pages(length), group.max_held(self.page_size))

    def _encoded(self, group: PageGroup, prompt: int, length: int, choices: int) -> int:
        """Return the pages of a group of `Part.MIDDLE` that all choices of a request use together.

        The choices share the pages of the prompt.
        """
        shared = group.middle(prompt, self.page_size)
        return shared + choices * (group.middle(length, self.page_size) - shared)

    def _shared(self, prompt: int, length: int, choices: int) -> int:
        """Return the number of pages of all choices together, which share full prompt pages."""
        full = self.full(prompt)
        return full + choices * (self.pages(length) - full)
