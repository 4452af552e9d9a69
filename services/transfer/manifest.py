"""The manifest: cutting computed KV into segments, and checking that they cover a sequence."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from runtime.kv.cache import CacheLayout
from services.transfer.errors import ForeignSegment
from services.transfer.extent import Extent


@dataclass(frozen=True)
class SegmentPlan:
    """One segment to encode.

    Attributes:
        pages: the sender's pages that hold the tokens, in token order.
    """

    extent: Extent
    pages: tuple[int, ...]


def plan_segments(
    layout: CacheLayout,
    *,
    first_token: int,
    num_tokens: int,
    pages: tuple[int, ...],
    capacity: int,
    bound: Callable[[int, int, int], int],
    rank: int = 0,
    first_kv_head: int = 0,
) -> Iterator[SegmentPlan]:
    """Cut a chunk of tokens into segments that fit a slot.

    As many layers as fit go into one segment. If not even one layer of the chunk fits, the chunk is
    cut by pages first.

    Args:
        layout: the sender's cache, which holds the KV heads of its rank.
        first_token: a multiple of the page size.
        pages: pages of the chunk, in token order.
        capacity: bytes of a slot.
        bound: returns the maximum frame size in bytes for (plane group, layers, tokens).
        first_kv_head: index of the rank's first KV head, counted over all ranks.

    Raises:
        ValueError: one page of one layer does not fit.
    """
    page_size = layout.page_size
    for number, group in enumerate(layout.groups):
        tokens = num_tokens
        while tokens > page_size and bound(number, 1, tokens) > capacity:
            tokens = -(-tokens // (2 * page_size)) * page_size
        if bound(number, 1, tokens) > capacity:
            raise ValueError(
                f"a slot of {capacity} bytes does not hold one page of one layer; raise slot_bytes"
            )
        layers = max(len(run) for run in group.runs)
        while bound(number, layers, tokens) > capacity:
            layers = -(-layers // 2)
        for offset in range(0, num_tokens, tokens):
            count = min(tokens, num_tokens - offset)
            first_page = offset // page_size
            held = pages[first_page : first_page + -(-count // page_size)]
            for run in group.runs:
                for layer in range(run.start, run.stop, layers):
                    extent = Extent(
                        first_token=first_token + offset,
                        num_tokens=count,
                        first_layer=layer,
                        num_layers=min(layers, run.stop - layer),
                        first_kv_head=first_kv_head,
                        num_kv_heads=layout.kv_heads,
                        plane_group=number,
                        rank=rank,
                    )
                    yield SegmentPlan(extent, held)


class Coverage:
    """Records which (plane group, page, layer, KV head) cells of a sequence have arrived.

    Args:
        layout: the receiver's cache, which holds all KV heads.
        ranks: number of ranks that send.
    """

    def __init__(self, num_tokens: int, layout: CacheLayout, *, ranks: int = 1) -> None:
        self._tokens, self._page_size, self._ranks = num_tokens, layout.page_size, ranks
        pages = -(-num_tokens // layout.page_size)
        self._present = [[bool(planes) for planes in group.members] for group in layout.groups]
        shape = len(layout.groups), pages, len(layout.layers), layout.kv_heads
        self._arrived = np.zeros(shape, dtype=np.bool_)
        self._missing = sum(map(sum, self._present)) * pages * layout.kv_heads

    @property
    def complete(self) -> bool:
        """Whether every cell has arrived."""
        return self._missing == 0

    def add(self, extent: Extent) -> range:
        """Claim the cells of a segment.

        Returns:
            Indices of the segment's pages within the sequence.

        Raises:
            ForeignSegment: the extent is outside the sequence, is not on page boundaries, or
                overlaps an earlier segment. No cell is claimed then.
        """
        pages = self._pages(extent)
        layers, heads = self._layers(extent), self._heads(extent)
        cells = self._arrived[
            extent.plane_group,
            pages.start : pages.stop,
            layers.start : layers.stop,
            heads.start : heads.stop,
        ]
        if cells.any():
            raise ForeignSegment(f"part of {extent} arrived twice")
        cells[...] = True
        self._missing -= cells.size
        return pages

    def _pages(self, extent: Extent) -> range:
        first, end = extent.first_token, extent.first_token + extent.num_tokens
        on_pages = first % self._page_size == 0 and (
            end == self._tokens or end % self._page_size == 0
        )
        if extent.num_tokens < 1 or end > self._tokens or not on_pages:
            raise ForeignSegment(
                f"tokens {first} to {end} are not whole pages of {self._tokens} tokens"
            )
        return range(first // self._page_size, -(-end // self._page_size))

    def _layers(self, extent: Extent) -> range:
        first, count, group = extent.first_layer, extent.num_layers, extent.plane_group
        if group >= len(self._present):
            raise ForeignSegment(
                f"plane group {group} does not exist; there are {len(self._present)}"
            )
        present = self._present[group]
        if count < 1 or first + count > len(present):
            raise ForeignSegment(f"{count} layers from {first} exceed the {len(present)} layers")
        if not all(present[first : first + count]):
            raise ForeignSegment(f"{count} layers from {first} have no planes of group {group}")
        return range(first, first + count)

    def _heads(self, extent: Extent) -> range:
        first, count, kv_heads = extent.first_kv_head, extent.num_kv_heads, self._arrived.shape[3]
        if extent.rank >= self._ranks:
            raise ForeignSegment(f"rank {extent.rank} does not exist; there are {self._ranks}")
        if count < 1 or first + count > kv_heads:
            raise ForeignSegment(f"{count} KV heads from {first} exceed the {kv_heads} KV heads")
        return range(first, first + count)
