"""Bytes of the KV of sequences, and sizes of the page pools of a worker.

Page groups of `Part.ENDS` (sinks and window) need a bounded number of pages: the sinks and windows
of a full batch, and all pages of one prompt (`PagePlan.batch`). The other groups need pages for
every token, and all get the same number.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace

from runtime.pages.plan import PageCount, PagePlan, Part

_MAX_BYTES = 1 << 40


@dataclass(frozen=True)
class PageBytes:
    """Sizes of the pages of a plan: on one rank, or on all ranks of a worker together.

    Attributes:
        groups: bytes of a page of each group, summed over all planes of the group.

    Raises:
        ValueError: there is not one size for each group of the plan, or one is out of bounds.
    """

    plan: PagePlan
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.groups) != len(self.plan.groups):
            raise ValueError(f"{len(self.groups)} sizes for {len(self.plan.groups)} page groups")
        if not all(0 <= size <= _MAX_BYTES for size in self.groups):
            raise ValueError(f"sizes of pages are out of bounds: {self.groups}")

    def of(self, pages: PageCount) -> int:
        """Return the total bytes of ``pages``."""
        return sum(size * count for size, count in zip(self.groups, pages, strict=True))

    def with_scratch(self, size: int) -> "PageBytes":
        """Return sizes with ``size`` more bytes for each page of the first group.

        Args:
            size: bytes that attention needs besides the cache for each of these pages.
        """
        return replace(self, groups=(self.groups[0] + size, *self.groups[1:]))

    @property
    def ends(self) -> int:
        """Sum of the page sizes of all groups of `Part.ENDS`, in bytes."""
        groups = zip(self.plan.groups, self.groups, strict=True)
        return sum(size for group, size in groups if group.part is Part.ENDS)

    @property
    def growing(self) -> int:
        """Sum of the page sizes of all other groups, in bytes."""
        return sum(self.groups) - self.ends


def pools_of_tokens(plan: PagePlan, tokens: int, windows: PageCount) -> PageCount:
    """Return the number of pages of each group for a pool of ``tokens`` token slots.

    Args:
        windows: pages wanted for the groups of `Part.ENDS`, see `PagePlan.batch`. A group gets at
            most the pages of ``tokens``.
    """
    pages = plan.full(tokens)
    return _pools(plan, windows, pages, pages)


def pools_of_bytes(pages: PageBytes, size: int, windows: PageCount, most: int) -> PageCount:
    """Return the number of pages of each group that fit into ``size`` bytes.

    Groups of `Part.ENDS` take at most half of the bytes, if there are other groups. If ``windows``
    takes more, their numbers of pages are reduced to a common maximum.

    Args:
        size: bytes, at least `least_bytes`.
        windows: pages wanted for the groups of `Part.ENDS`, see `PagePlan.batch`.
        most: maximum number of pages of a group.
    """
    plan, growing = pages.plan, pages.growing
    share = min(size // 2, size - growing) if growing else size

    def windows_bytes(most_windows: int) -> int:
        return pages.of(_pools(plan, windows, most_windows, 0))

    most_windows = bisect_right(range(1, most + 1), share, key=windows_bytes)
    left = size - windows_bytes(most_windows)
    return _pools(plan, windows, most_windows, min(left // growing, most) if growing else 0)


def sequence_bytes(pages: PageBytes, tokens: int) -> float:
    """Return the bytes of a sequence's KV in decode, without unused slots of its last page."""
    plan = pages.plan
    return sum(
        plan.filled(held, tokens) * size / plan.page_size
        for group, size in zip(plan.groups, pages.groups, strict=True)
        for held in group.held(tokens, plan.page_size)
    )


def token_bytes(pages: PageBytes) -> float:
    """Return the bytes that another token adds to the KV of a long sequence, on average."""
    return pages.growing / pages.plan.page_size


def least_bytes(pages: PageBytes) -> int:
    """Return the minimum number of bytes with which `pools_of_bytes` gives each group a page."""
    return 2 * pages.ends + pages.growing if pages.growing else pages.ends


def _pools(plan: PagePlan, windows: PageCount, most_windows: int, growing: int) -> PageCount:
    return PageCount(
        *(
            min(pages, most_windows) if group.part is Part.ENDS else growing
            for group, pages in zip(plan.groups, windows, strict=True)
        )
    )
