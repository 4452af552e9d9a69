"""The manifest: cutting computed KV into segments, and checking that they cover a sequence."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.kv.cache import CacheLayout, PlaneGroup
from runtime.pages.plan import PagePlan
from runtime.pages.sent import SentTokens
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
    page_tables: Sequence[tuple[int, ...]],
    capacity: int,
    bound: Callable[[int, int, int], int],
    sent: SentTokens | None = None,
    rank: int = 0,
    kv_heads: range | None = None,
    split: bool = False,
) -> Iterator[SegmentPlan]:
    """Cut a chunk of tokens into segments that fit a slot.

    As many layers as fit go into one segment. If not even one layer of the chunk fits, the chunk is
    cut by pages first.

    Args:
        layout: the sender's cache, which holds the KV heads of its rank.
        first_token: a multiple of the page size.
        page_tables: pages of the chunk in each page group, by their index in the chunk.
        capacity: bytes of a slot.
        bound: returns the maximum frame size in bytes for (plane group, layers, tokens).
        sent: tokens and pages of the sequence that are sent; default: all of a sequence that ends
            with the chunk.
        kv_heads: KV heads of the segments, counted over all ranks; default: those of a worker of
            one rank.
        split: see `Route`.

    Raises:
        ValueError: one page of one layer does not fit.
    """
    kv_heads = range(layout.kv_heads) if kv_heads is None else kv_heads
    plan, end = layout.plan, first_token + num_tokens
    sent = SentTokens.whole(plan, end) if sent is None else sent
    chunk = plan.span(first_token, end)
    for number, group in enumerate(layout.groups):
        for pages in _sent_pages(sent, group, split=split):
            begin, stop = max(pages.start, chunk.start), min(pages.stop, chunk.stop)
            if begin >= stop:
                continue
            own_tokens = plan.filled(range(begin, stop), end)
            layers, count = _segment_shape(group, number, own_tokens, plan, capacity, bound)
            for page in range(begin, stop, count):
                last = min(page + count, stop)
                own = page_tables[group.page_group][page - chunk.start : last - chunk.start]
                for run in group.runs:
                    for layer in range(run.start, run.stop, layers):
                        extent = Extent(
                            first_token=page * plan.page_size,
                            num_tokens=plan.filled(range(page, last), end),
                            first_layer=layer,
                            num_layers=min(layers, run.stop - layer),
                            first_kv_head=kv_heads.start,
                            num_kv_heads=len(kv_heads),
                            plane_group=number,
                            rank=rank,
                        )
                        yield SegmentPlan(extent, own)


def _sent_pages(sent: SentTokens, group: PlaneGroup, *, split: bool) -> tuple[range, ...]:
    """Return the pages of a sequence that are sent in a plane group.

    Args:
        split: see `Route`.
    """
    return sent.pages(group.page_group) if group.is_sent(split=split) else ()


def _segment_shape(
    group: PlaneGroup,
    number: int,
    tokens: int,
    plan: PagePlan,
    capacity: int,
    bound: Callable[[int, int, int], int],
) -> tuple[int, int]:
    """Return the maximum layers and pages of a segment of a plane group.

    Args:
        tokens: tokens of the chunk that are sent in this group.
    """
    pages = plan.pages(tokens)
    while pages > 1 and bound(number, 1, plan.filled(range(pages), tokens)) > capacity:
        pages -= pages // 2
    tokens = plan.filled(range(pages), tokens)
    if bound(number, 1, tokens) > capacity:
        raise ValueError(
            f"a slot of {capacity} bytes does not hold one page of one layer; raise slot_bytes"
        )
    layers = max(len(run) for run in group.runs)
    while bound(number, layers, tokens) > capacity:
        layers = -(-layers // 2)
    return layers, pages


class Coverage:
    """Records which (plane group, page, layer, KV head) cells of a sequence a rank was announced.

    Args:
        sent: tokens and pages of the sequence that are sent.
        layout: the cache of the rank, with its KV heads.
        first_kv_head: index of its first KV head, counted over all ranks.
        split: whether the routes to the rank are split, see `Route`.
    """

    def __init__(
        self,
        sent: SentTokens,
        layout: CacheLayout,
        *,
        first_kv_head: int = 0,
        split: bool = False,
    ) -> None:
        self._tokens = sent.kept
        self._plan = layout.plan
        self._first_kv_head = first_kv_head
        self._split = split
        self._present = [[bool(tensors) for tensors in group.members] for group in layout.groups]
        self._sent = [_sent_pages(sent, group, split=split) for group in layout.groups]
        shape = (
            len(layout.groups),
            layout.plan.pages(sent.kept),
            len(layout.layers),
            layout.kv_heads,
        )
        self._announced = np.zeros(shape, dtype=np.bool_)
        self._missing = layout.kv_heads * sum(
            sum(map(len, ranges)) * sum(present)
            for ranges, present in zip(self._sent, self._present, strict=True)
        )

    @property
    def complete(self) -> bool:
        """Whether every cell is announced."""
        return self._missing == 0

    def add(self, extent: Extent) -> range:
        """Record that the cells of a segment are announced.

        Returns:
            Indices of the segment's pages within the sequence.

        Raises:
            ForeignSegment: the extent is outside the sequence or the cache, is not on page
                boundaries, has only some KV heads without ``split``, or overlaps an earlier
                segment. No cell is recorded then.
        """
        pages = self._pages(extent)
        layers, heads = self._layers(extent), self._heads(extent)
        cells = self._announced[
            extent.plane_group,
            pages.start : pages.stop,
            layers.start : layers.stop,
            heads.start : heads.stop,
        ]
        if cells.any():
            raise ForeignSegment(f"part of {extent} announced twice")
        cells[...] = True
        self._missing -= cells.size
        return pages

    def _pages(self, extent: Extent) -> range:
        first, end = extent.first_token, extent.first_token + extent.num_tokens
        pages = self._plan.span(first, end)
        on_pages = self._plan.filled(pages, self._tokens) == extent.num_tokens
        if extent.num_tokens < 1 or end > self._tokens or not on_pages:
            raise ForeignSegment(
                f"tokens {first} to {end} are not whole pages of {self._tokens} tokens"
            )
        group = extent.plane_group
        if group >= len(self._sent):
            raise ForeignSegment(f"plane group {group} does not exist; there are {len(self._sent)}")
        if not any(
            sent.start <= pages.start and pages.stop <= sent.stop for sent in self._sent[group]
        ):
            raise ForeignSegment(f"tokens {first} to {end} are not sent in plane group {group}")
        return pages

    def _layers(self, extent: Extent) -> range:
        first, count, group = extent.first_layer, extent.num_layers, extent.plane_group
        present = self._present[group]
        if count < 1 or first + count > len(present):
            raise ForeignSegment(f"{count} layers from {first} exceed the {len(present)} layers")
        if not all(present[first : first + count]):
            raise ForeignSegment(f"{count} layers from {first} have no planes of group {group}")
        return range(first, first + count)

    def _heads(self, extent: Extent) -> range:
        """Return the KV heads of a segment, counted from the first of the rank."""
        first, count, kv_heads = extent.first_kv_head, extent.num_kv_heads, self._announced.shape[3]
        first -= self._first_kv_head
        if count < 1 or first < 0 or first + count > kv_heads:
            raise ForeignSegment(
                f"{count} KV heads from {extent.first_kv_head} exceed the {kv_heads} KV heads from "
                f"{self._first_kv_head}"
            )
        if count < kv_heads and not self._split:
            raise ForeignSegment(f"{count} of {kv_heads} KV heads, which are not sent separately")
        return range(first, first + count)
