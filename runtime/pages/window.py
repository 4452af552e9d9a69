"""Pages of a sequence that a compressed KV format does not encode."""

SINK_PAGES = 1
"""Pages at the start of a sequence that are never encoded."""
WINDOW = 64
"""Minimum number of recent tokens that are not encoded."""


def first_recent(length: int, page_size: int) -> int:
    """Return the index of the first page after the encoded pages of a sequence.

    Pages from `SINK_PAGES` up to this one are encoded, and no others.

    Args:
        length: number of tokens of the sequence, including the one that attends.
    """
    return max(SINK_PAGES, (length - WINDOW) // page_size)
