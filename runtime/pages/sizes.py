"""Bytes of the KV of sequences, and sizes of the page pools of a worker.

Groups of `Part.ENDS` need pages for the windows of a batch and for prompts, which are bounded
(`PagePlan.batch`). All other groups grow with the sequences, and each of them gets as many pages.
"""

from bisect import bisect_right

from runtime.pages.plan import PageCount, PagePlan, Part


def pools_of_tokens(plan: PagePlan, tokens: int, windows: PageCount) -> PageCount:
    """Return the pages for ``tokens`` token slots.

    Args:
        windows: pages of the groups of `Part.ENDS`, if they are not more than those of the tokens.
    """
    pages = plan.full(tokens)
    return _pools(plan, windows, pages, pages)


def pools_of_bytes(plan: PagePlan, size: int, windows: PageCount, most: int) -> PageCount:
    """Return the pages that fit into ``size`` bytes, at least `least_bytes`.

    Args:
        windows: pages of the groups of `Part.ENDS`, if they take at most half of the bytes.
            Otherwise, the most pages of each of these groups are so few that they do.
        most: maximum number of pages of a group.
    """
    _, growing = _page_bytes(plan)
    share = min(size // 2, size - growing) if growing else size

    def windows_bytes(most_windows: int) -> int:
        return plan.page_bytes(_pools(plan, windows, most_windows, 0))

    most_windows = bisect_right(range(1, most + 1), share, key=windows_bytes)
    left = size - windows_bytes(most_windows)
    return _pools(plan, windows, most_windows, min(left // growing, most) if growing else 0)


def sequence_bytes(plan: PagePlan, tokens: int) -> float:
    """Return the bytes of the KV of a sequence in decode, without the rest of its last page."""
    return sum(
        plan.filled(pages, tokens) * group.page_bytes / plan.page_size
        for group in plan.groups
        for pages in group.held(tokens, plan.page_size)
    )


def token_bytes(plan: PagePlan) -> float:
    """Return the bytes that another token adds to the KV of a long sequence, on average."""
    return _page_bytes(plan)[1] / plan.page_size


def least_bytes(plan: PagePlan) -> int:
    """Return the bytes at which `pools_of_bytes` has a page of each group."""
    ends, growing = _page_bytes(plan)
    return 2 * ends + growing if growing else ends


def _pools(plan: PagePlan, windows: PageCount, most_windows: int, growing: int) -> PageCount:
    return PageCount(
        *(
            min(pages, most_windows) if group.part is Part.ENDS else growing
            for group, pages in zip(plan.groups, windows, strict=True)
        )
    )


def _page_bytes(plan: PagePlan) -> tuple[int, int]:
    """Return the bytes of a page of all groups of `Part.ENDS`, and of all others."""
    sizes = [0, 0]
    for group in plan.groups:
        sizes[group.part is not Part.ENDS] += group.page_bytes
    return sizes[0], sizes[1]
