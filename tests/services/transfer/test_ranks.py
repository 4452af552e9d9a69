"""A decode worker assembles one sequence from the segments of two tensor-parallel ranks."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from headrace.v1 import prefill_pb2 as pb
from runtime.engine import Computed
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.format import Plane
from runtime.pages.plan import PageCount
from runtime.pages.sent import SentTokens
from services.transfer.codecs import SegmentCodecs
from services.transfer.errors import ForeignSegment
from services.transfer.extent import Extent
from services.transfer.frame import FrameHeader
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.manifest import Coverage
from services.transfer.metrics import TransferMetrics
from services.transfer.outgoing import Outgoing
from services.transfer.policy import LinkPolicy
from services.transfer.routes import Route
from services.transfer.sender import Sender
from services.transfer.slab import Slab
from tests.services.transfer.inline_agent import InlineAgent
from tests.services.workers import normal_codebook

HEADS, PAGE, LAYERS, PAGES = 4, 16, 3, 4
RANKS = 2
TOKENS = 55  # the last page is not full
EPOCHS = ("00" * 16, "11" * 16)


def layout_of(heads: int) -> CacheLayout:
    """Two plane groups: encodable K, and V as codes with a scale per head and token."""
    planes = (
        Plane("k", torch.bfloat16, (heads, PAGE, 8)),
        Plane("v", torch.int8, (heads, PAGE, 8), encodable=False),
    )
    return CacheLayout(PAGE, heads, (planes,) * LAYERS)


BOOKS = {(layer, "k"): normal_codebook() for layer in range(LAYERS)}


@pytest.fixture
def whole() -> PagedCache:
    """The KV of the sequence, with all heads, in pages 0 to 3."""
    cache = PagedCache(layout_of(HEADS), PageCount(PAGES))
    generator = torch.Generator().manual_seed(0)
    for plane in cache.planes:
        if plane.is_floating_point():
            plane.normal_(generator=generator)
        else:
            plane.random_(-128, 128, generator=generator)
    return cache


@dataclass
class Rank:
    """One rank's sender with its half of the heads, and the segments that it announced."""

    number: int
    slab: Slab
    segments: list[pb.Segment] = field(default_factory=list)
    ready: dict[int, pb.SegmentReady] = field(default_factory=dict)

    @classmethod
    async def sending(cls, number: int, whole: PagedCache) -> "Rank":
        heads = HEADS // 2
        cache = PagedCache(layout_of(heads), PageCount(PAGES))
        for plane, full in zip(cache.planes, whole.planes, strict=True):
            plane.copy_(full[:, number * heads : (number + 1) * heads])
        rank = cls(number, Slab(8, 1 << 14))
        codecs = SegmentCodecs(cache.layout, BOOKS, first_kv_head=number * heads)
        agent: Any = InlineAgent()
        endpoint = LocalEndpoint(cache, codecs, rank.slab, agent)
        sender = Sender(
            (endpoint,) * RANKS,
            LinkPolicy.of("splitzip", has_codebooks=True),
            epoch=EPOCHS[number],
            lease_s=60,
            metrics=TransferMetrics(CollectorRegistry()),
        )

        def emit(event: pb.PrefillEvent) -> None:
            if event.WhichOneof("event") == "segment":
                rank.segments.append(event.segment)
            if event.WhichOneof("event") == "ready":
                rank.ready[event.ready.index] = event.ready

        def fail(code: object, message: str) -> None:
            raise AssertionError(message)

        sequence = Outgoing(
            *("s", "reader", "peer", 1, SentTokens.whole(cache.layout.plan, TOKENS)),
            *("request", 0, "agent", 1 << 14),
            (Route(number, 0, endpoint.kv_heads, split=True),),
            emit,
            fail,
        )
        sender.open(sequence)
        sender.credit("s", 0, 8)
        sender.add_computed(Computed("s", 0, TOKENS, (tuple(range(PAGES)),)))
        sender.finish_computing("s")
        async with asyncio.timeout(20):
            while sender._tasks:  # noqa: ASYNC110 - encodes end within a few loop iterations
                await asyncio.sleep(0)
        return rank


class Reader:
    """Decode side of a transfer; its READs are copies within this process."""

    def __init__(self) -> None:
        self.cache = PagedCache(layout_of(HEADS), PageCount(PAGES))
        self.coverage = Coverage(
            SentTokens.whole(self.cache.layout.plan, TOKENS), self.cache.layout, split=True
        )
        self._landing = Slab(1, 1 << 14)
        codecs = SegmentCodecs(self.cache.layout, BOOKS)
        agent: Any = InlineAgent()
        self._endpoint = LocalEndpoint(self.cache, codecs, self._landing, agent)

    def pull(self, rank: Rank, segment: pb.Segment) -> None:
        pages = self.coverage.add(Extent.of(segment))
        ready = rank.ready[segment.index]
        frame = rank.slab.view(segment.slot, ready.length)
        self._landing.view(0, ready.length).copy_(frame)
        expected = FrameHeader.of(
            segment, epoch=EPOCHS[rank.number], request_id="request", attempt=0
        )
        held = tuple(pages)
        decoding = self._endpoint.decode(
            segment, ready, expected, 0, held, after=None, is_wanted=lambda: True
        )
        decoding.result()

    def holds(self, whole: PagedCache) -> bool:
        """Whether the KV of all tokens is bitwise identical to that in ``whole``."""

        def tokens(plane: torch.Tensor) -> torch.Tensor:
            return plane.transpose(1, 2).flatten(0, 1)[:TOKENS].contiguous().view(torch.uint8)

        return all(
            tokens(mine).equal(tokens(theirs))
            for mine, theirs in zip(self.cache.planes, whole.planes, strict=True)
        )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_sequence_is_assembled_from_two_ranks_in_any_order(
    whole: PagedCache, order: tuple[int, int]
) -> None:
    reader = Reader()
    for number in order:
        assert not reader.coverage.complete
        rank = await Rank.sending(number, whole)
        assert {segment.rank for segment in rank.segments} == {number}
        assert {segment.plane_group for segment in rank.segments} == {0, 1}
        for segment in rank.segments:
            reader.pull(rank, segment)
    assert reader.coverage.complete
    assert reader.holds(whole)


async def test_sequence_without_one_ranks_heads_is_incomplete(whole: PagedCache) -> None:
    reader = Reader()
    rank = await Rank.sending(0, whole)
    for segment in rank.segments:
        reader.pull(rank, segment)
    assert not reader.coverage.complete
    assert not reader.holds(whole)


async def test_duplicate_head_range_is_refused(whole: PagedCache) -> None:
    reader = Reader()
    rank = await Rank.sending(0, whole)
    reader.pull(rank, rank.segments[0])
    with pytest.raises(ForeignSegment, match="announced twice"):
        reader.pull(rank, rank.segments[0])


async def test_overlapping_head_range_is_refused(whole: PagedCache) -> None:
    reader = Reader()
    first, second = await Rank.sending(0, whole), await Rank.sending(1, whole)
    reader.pull(first, first.segments[0])
    overlapping = pb.Segment()
    overlapping.CopyFrom(second.segments[0])
    overlapping.first_kv_head = 1
    with pytest.raises(ForeignSegment, match="announced twice"):
        reader.pull(second, overlapping)


async def test_header_with_another_head_range_is_refused(whole: PagedCache) -> None:
    """The manifest entry was changed, the frame was not."""
    reader = Reader()
    rank = await Rank.sending(0, whole)
    moved = pb.Segment()
    moved.CopyFrom(rank.segments[0])
    moved.first_kv_head = 2
    with pytest.raises(ForeignSegment, match="first_kv_head is 0, but the manifest has 2"):
        reader.pull(rank, moved)
