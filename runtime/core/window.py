"""Which pages of a sequence a compressed KV format leaves exact."""

SINK_PAGES = 1
"""Pages at the start of a sequence that are never encoded."""
WINDOW = 64
"""Minimum number of recent tokens that are not encoded."""


def first_recent(length: int, page_size: int) -> int:
    """Return the index of the first page after the stored pages of a sequence.

    Pages from `SINK_PAGES` up to this one are stored; all others are exact.

    Args:
        length: tokens of the sequence, the one that is being attended included.
    """
    return max(SINK_PAGES, (length - WINDOW) // page_size)


def stored_pages(length: int, page_size: int) -> int:
    """Return the number of stored pages of a sequence of ``length`` tokens."""
    return first_recent(length, page_size) - SINK_PAGES


def max_exact_pages(page_size: int) -> int:
    """Return the maximum number of exact pages that a decode step of one sequence uses.

    These are the sinks, the pages of the window, and the page that has just left it, which the step
    encodes.
    """
    return SINK_PAGES + -(-WINDOW // page_size) + 1
