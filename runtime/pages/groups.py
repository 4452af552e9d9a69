"""Page groups: planes of a KV cache whose pages are allocated and freed together.

A KV format declares the groups of its planes (`runtime.kv.format.Plane`). Workers register their
groups, so that all processes count pages alike.
"""

from dataclasses import dataclass
from enum import StrEnum

_MAX_TOKENS = 1 << 31
_MAX_NAME = 64


class Part(StrEnum):
    """Pages of a sequence that a group holds.

    The *sinks* are the first pages of a sequence, and its *window* are the last tokens. A page
    leaves the window with its last token.
    """

    ALL = "all"
    ENDS = "ends"  # the sinks, and the pages of the window
    MIDDLE = "middle"  # all pages between the sinks and the window


def pages_for(tokens: int, page_size: int) -> int:
    """Return the number of pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Planes of a KV cache whose pages are allocated and freed together.

    A group of `Part.ENDS` without sinks is a sliding window.

    Attributes:
        name: name, unique among the groups of a cache.
        part: pages of a sequence that the group holds.
        sink_pages: number of sinks, in pages.
        window: number of tokens in the window, including the one that attends.

    Raises:
        ValueError: a value is out of bounds, a group of `Part.ALL` has sinks or a window, or
            another group has no window.
    """

    name: str
    part: Part = Part.ALL
    sink_pages: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        sizes = self.sink_pages, self.window
        bounded = 0 <= min(sizes) <= max(sizes) < _MAX_TOKENS
        if not bounded or not 1 <= len(self.name) <= _MAX_NAME:
            raise ValueError(f"not a page group: {self}")
        if max(sizes) if self.part is Part.ALL else not self.window:
            raise ValueError(f"groups of a part of a sequence alone have a window: {self}")

    def first_recent(self, tokens: int, page_size: int) -> int:
        """Return the index of the first page after the sinks that is in the window.

        Args:
            tokens: length of the sequence, including the token that attends.
        """
        return max(self.sink_pages, (tokens - self.window) // page_size)

    def middle(self, tokens: int, page_size: int) -> int:
        """Return the number of pages between the sinks and the window; 0 for `Part.ALL`."""
        if self.part is Part.ALL:
            return 0
        return self.first_recent(tokens, page_size) - self.sink_pages

    def end(self, tokens: int, page_size: int) -> int:
        """Return the index after the last page of a sequence that the group holds."""
        if self.part is Part.MIDDLE:
            return self.first_recent(tokens, page_size)
        return pages_for(tokens, page_size)

    def held(self, tokens: int, page_size: int) -> tuple[range, ...]:
        """Return the pages that hold KV of a sequence in decode, as indices within the sequence."""
        if self.part is Part.ALL:
            return (range(pages_for(tokens, page_size)),)
        recent = self.first_recent(tokens, page_size)
        if self.part is Part.MIDDLE:
            return (range(self.sink_pages, recent),)
        pages = pages_for(tokens, page_size)
        return range(min(self.sink_pages, pages)), range(recent, pages)

    def max_held(self, page_size: int) -> int:
        """Return the maximum number of pages of a group of `Part.ENDS` that one decode step uses.

        These are the sinks, the pages of the window, and the page that leaves the window.
        """
        return self.sink_pages + pages_for(self.window, page_size) + 1
