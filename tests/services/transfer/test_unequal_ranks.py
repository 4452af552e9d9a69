"""Workers with different numbers of ranks exchange KV of all formats, bit for bit.

READs are copies within this process; those of `test_ranks_over_nixl` are real.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headrace.v1 import prefill_pb2 as pb
from runtime.config import ModelConfig
from runtime.engine import Computed
from runtime.kv import kvquant
from runtime.kv.calibration import Artifact, KVMoments
from runtime.kv.fdc import FdcFormat
from runtime.kv.registry import COMPRESSED
from runtime.kv.rotation import PageRotation
from runtime.offline.bench.kv_formats import fdc_artifact, palu_artifact
from runtime.pages.sent import SentTokens
from services.transfer.codecs import SegmentCodecs
from services.transfer.extent import Extent
from services.transfer.frame import FrameHeader
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.manifest import Coverage
from services.transfer.metrics import TransferMetrics
from services.transfer.outgoing import Outgoing
from services.transfer.policy import LinkPolicy
from services.transfer.routes import routes_between
from services.transfer.sender import Sender
from services.transfer.slab import Slab
from tests.runtime.kv.quantized import text
from tests.runtime.tiny import CONFIG
from tests.services.transfer.inline_agent import InlineAgent
from tests.services.transfer.ranked_kv import RankedKV

PAGES, TOKENS = 10, 155  # the last page is not full
SLOTS, SLOT_BYTES = 32, 1 << 16
EPOCH = "00" * 16
SIZES = (1, 2, 3)

THREE_HEADS = replace(CONFIG, num_heads=6, num_kv_heads=3, head_dim=64)
"""Two ranks have one KV head and two."""
TWO_HEADS = replace(THREE_HEADS, num_kv_heads=2)
"""Two of three ranks have the same KV head."""


def kvquant_artifact(config: ModelConfig) -> Artifact:
    return kvquant.calibrate(moments_of(config), kvquant.KvQuantOptions(v_outliers=1), "", config)


def quantized_fdc_artifact(config: ModelConfig) -> Artifact:
    made = fdc_artifact(config, (32, 32))
    latents = FdcFormat(config, made)
    return kvquant.quantize_latents(made, latents, moments_of(config), kvquant.CodeOptions())


def moments_of(config: ModelConfig) -> list[KVMoments]:
    _, k, v = (x[: config.num_kv_heads][None] for x in text(tokens=320))
    found = KVMoments.of(config, page_every=1)
    found.add(k, k, v, PageRotation(config))
    return [found] * config.num_layers


CALIBRATED: dict[str, Callable[[ModelConfig], Artifact]] = {
    "fdc": lambda config: fdc_artifact(config, (16, 48, 32)),
    "palu": lambda config: palu_artifact(config, (48, 32), 1),
    "kvquant": kvquant_artifact,
    "fdc+kvquant": quantized_fdc_artifact,
}


@cache
def artifact_of(kind: str, config: ModelConfig) -> Artifact | None:
    return CALIBRATED[kind](config) if kind in CALIBRATED else None


@cache
def kv_of(kind: str, config: ModelConfig, size: int, *, filled: bool) -> RankedKV:
    kv = RankedKV.of(config, size, PAGES, kind.partition("+")[0], artifact_of(kind, config))
    if filled:
        kv.fill()
    return kv


def endpoints_of(kv: RankedKV) -> list[LocalEndpoint]:
    found = []
    for heads, own in zip(kv.heads, kv.caches, strict=True):
        agent: Any = InlineAgent()
        codecs = SegmentCodecs(own.layout, kv.books(), first_kv_head=heads.start)
        found.append(LocalEndpoint(own, codecs, Slab(SLOTS, SLOT_BYTES), agent))
    return found


class Transfer:
    """A sequence that one worker sends to another."""

    def __init__(self, sender: RankedKV, reader: RankedKV, mode: str) -> None:
        self.senders, self.readers = endpoints_of(sender), endpoints_of(reader)
        self.sent = SentTokens.whole(sender.whole.layout.plan, TOKENS)
        self.routes = routes_between(sender.heads, reader.heads)
        self.segments: list[pb.Segment] = []
        self.ready: dict[int, pb.SegmentReady] = {}
        self._sender = Sender(
            self.senders,
            LinkPolicy.of(mode, has_codebooks=True),
            epoch=EPOCH,
            lease_s=60,
            metrics=TransferMetrics(CollectorRegistry()),
        )

    async def send(self, pages: tuple[tuple[int, ...], ...], credits: int = SLOTS) -> None:
        """Encode segments, as many for each reader as it grants credits."""
        sequence = Outgoing(
            *("s", "reader", "peer", 1, self.sent, "request", 0, "agent", SLOT_BYTES),
            self.routes,
            self._emit,
            self._fail,
        )
        self._sender.open(sequence)
        for rank in range(len(self.readers)):
            self._sender.credit("s", rank, credits)
        self._sender.add_computed(Computed("s", 0, TOKENS, pages))
        self._sender.finish_computing("s")
        async with asyncio.timeout(60):
            while self._sender._tasks:  # noqa: ASYNC110 - encodes end within a few iterations
                await asyncio.sleep(0)

    def read(self) -> None:
        """Copy all segments to their readers, and decode them; no segment is missing."""
        split = {route.reader for route in self.routes if route.split}
        coverages = [
            Coverage(
                self.sent,
                endpoint.layout,
                first_kv_head=endpoint.kv_heads.start,
                split=rank in split,
            )
            for rank, endpoint in enumerate(self.readers)
        ]
        for segment in self.segments:
            reader = self.readers[segment.reader_rank]
            pages = coverages[segment.reader_rank].add(Extent.of(segment))
            ready = self.ready[segment.index]
            frame = self.senders[segment.rank].slab.view(segment.slot, ready.length)
            reader.slab.view(0, ready.length).copy_(frame)
            expected = FrameHeader.of(segment, epoch=EPOCH, request_id="request", attempt=0)
            reader.decode(
                *(segment, ready, expected, 0, tuple(pages)), after=None, is_wanted=lambda: True
            ).result()
        assert all(coverage.complete for coverage in coverages)

    def _emit(self, event: pb.PrefillEvent) -> None:
        if event.WhichOneof("event") == "segment":
            self.segments.append(event.segment)
        if event.WhichOneof("event") == "ready":
            self.ready[event.ready.index] = event.ready

    def _fail(self, code: object, message: str) -> None:
        raise AssertionError(message)


async def check(kind: str, config: ModelConfig, senders: int, readers: int, mode: str) -> None:
    sender = kv_of(kind, config, senders, filled=True)
    reader = kv_of(kind, config, readers, filled=False)
    reader.fill(seed=1)
    pages = (tuple(reversed(range(PAGES))),) * len(sender.whole.layout.page_groups)
    transfer = Transfer(sender, reader, mode)
    assert not reader.holds(sender, transfer.sent, pages)
    await transfer.send(pages)
    transfer.read()
    assert reader.holds(sender, transfer.sent, pages)
    for rank, heads in enumerate(reader.heads):
        sources = {s.rank for s in transfer.segments if s.reader_rank == rank}
        assert sources == {route.sender for route in transfer.routes if route.reader == rank}
        for segment in transfer.segments:
            if segment.reader_rank == rank:
                assert segment.first_kv_head in heads
                assert segment.first_kv_head in sender.heads[segment.rank]
    if mode == "splitzip":
        assert not all(segment.raw for segment in transfer.segments)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "config", [THREE_HEADS, TWO_HEADS], ids=["uneven heads", "copies of a head"]
)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, "splitzip") for kind in ("dense", *COMPRESSED, *CALIBRATED)),
        *((kind, "raw") for kind in ("dense", "fp8", "int4")),
    ],
)
async def test_kv_arrives_bit_for_bit_at_any_number_of_ranks(
    kind: str, config: ModelConfig, mode: str
) -> None:
    for senders, readers in product(SIZES, SIZES):
        await check(kind, config, senders, readers, mode)


async def test_formats_with_blocks_send_whole_blocks_between_equal_ranks() -> None:
    for senders, readers, is_block in ((2, 2, True), (2, 1, False), (1, 3, False)):
        sender, reader = (kv_of("int4", THREE_HEADS, n, filled=True) for n in (senders, readers))
        transfer = Transfer(sender, reader, "raw")
        pages = (tuple(range(PAGES)),) * len(sender.whole.layout.page_groups)
        await transfer.send(pages)
        groups = sender.whole.layout.groups
        sent = {segment.plane_group for segment in transfer.segments}
        assert any(groups[number].is_block for number in sent) is is_block
        assert any(groups[number].in_block for number in sent) is not is_block


async def test_ranks_take_turns_to_use_the_credits_of_a_reader() -> None:
    sender, reader = (kv_of("int4", THREE_HEADS, size, filled=True) for size in (3, 1))
    for credits in (1, 3, 4):
        transfer = Transfer(sender, reader, "raw")
        pages = (tuple(range(PAGES)),) * len(sender.whole.layout.page_groups)
        await transfer.send(pages, credits)
        assert [segment.rank for segment in transfer.segments] == [0, 1, 2, 0][:credits]
