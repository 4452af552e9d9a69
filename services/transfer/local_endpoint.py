"""The KV endpoint of a rank in this process."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import codec
from headrace.v1 import prefill_pb2 as pb
from runtime.kv.cache import PagedCache
from runtime.pages.sent import SentTokens
from services.transfer.agent import TransferAgent
from services.transfer.codec_calls import CodecJob, Timed
from services.transfer.codecs import SegmentCodecs, group_tensors
from services.transfer.endpoint import EncodedSegment, KVEndpoint
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES, FrameHeader, verify
from services.transfer.nixl_agent import ReadDone
from services.transfer.policy import WireMode
from services.transfer.slab import Slab


class LocalEndpoint(KVEndpoint):
    """Registers a slab, and runs READs and codec calls on the thread of an agent.

    Args:
        cache: pages of the rank.
        codecs: codecs of that cache.

    Attributes:
        agent: runs the READs and codec calls, and receives notifications.
        cache, slab: used by the warm-up and by tests.

    Raises:
        TransferUnavailable: the transport refuses the memory.
    """

    def __init__(
        self, cache: PagedCache, codecs: SegmentCodecs, slab: Slab, agent: TransferAgent
    ) -> None:
        self.cache = cache
        self.codecs = codecs
        self.slab = slab
        self.agent = agent
        self.slot_bytes = slab.slot_bytes
        self.fault = agent.fault
        agent.register(slab)
        heads = codecs.kv_heads
        self.connection = pb.Endpoint(
            agent_name=agent.name,
            agent_metadata=agent.connection_metadata,
            first_kv_head=heads.start,
            num_kv_heads=len(heads),
        )
        self.readable = pb.Endpoint(
            agent_name=agent.name,
            agent_metadata=agent.metadata,
            first_kv_head=heads.start,
            num_kv_heads=len(heads),
            slab_address=slab.address,
            slots=slab.slots,
            memory_kind=slab.memory_kind,
            device=slab.device_index,
        )

    @property
    def stalled_s(self) -> float:
        return self.agent.stalled_s

    def add_peer(self, name: str, metadata: bytes) -> "Future[None]":
        return self.agent.add_peer(name, metadata)

    def remove_peer(self, name: str) -> "Future[None]":
        return self.agent.remove_peer(name)

    def encode(
        self,
        segment: pb.Segment,
        header: FrameHeader,
        pages: Sequence[int],
        *,
        after: int | None,
        notify: str,
        is_wanted: Callable[[], bool],
    ) -> "Future[Timed[EncodedSegment] | None]":
        start = time.perf_counter()

        def prepare() -> bool:
            if not is_wanted():
                return False
            self.cache.events.wait(after)
            header.pack_into(self.slab.view(segment.slot, HEADER_BYTES))
            return True

        def finish(pending: codec.Pending[codec.Encoded]) -> EncodedSegment:
            encoded = pending.result()
            end = time.perf_counter()
            ready = _message(segment, encoded, end - start)
            self.agent.notify(notify, ready.SerializeToString())
            return EncodedSegment(ready, encoded.escapes, start, end)

        payload = codec.EncodeSegment(
            tuple(pages),
            segment.num_tokens,
            segment.slot * self.slot_bytes + HEADER_BYTES,
            self.slot_bytes - HEADER_BYTES,
        )
        mode = WireMode.RAW if segment.raw else WireMode.SPLITZIP
        encoder = self.codecs.of(self.cache.sendable, Extent.of(segment), mode)
        return self.agent.run_codec(CodecJob(encoder, self._encode, payload, prepare, finish))

    def read(
        self, sender: pb.Endpoint, offset: int, slot: int, length: int, *, deadline_s: float
    ) -> "Future[ReadDone]":
        return self.agent.read(
            sender.agent_name,
            sender.slab_address + offset,
            length,
            self.slab.view(slot, length),
            kind=sender.memory_kind,
            device=sender.device,
            deadline_s=deadline_s,
        )

    def prepare_decode(self, extent: Extent) -> None:
        self.codecs.of(self.cache.sendable, extent)

    def decode(
        self,
        segment: pb.Segment,
        ready: pb.SegmentReady,
        expected: FrameHeader,
        slot: int,
        pages: Sequence[int],
        *,
        after: int | None,
        is_wanted: Callable[[], bool],
    ) -> "Future[Timed[None] | None]":
        def prepare() -> bool:
            if not is_wanted():
                return False
            self.cache.events.wait(after)
            return True

        def finish(decoding: codec.PendingDecode) -> None:
            verify(expected, FrameHeader.unpack(decoding.prefix))
            decoding.result()

        payload = codec.DecodeSegment(
            tuple(pages),
            segment.num_tokens,
            slot * self.slot_bytes + HEADER_BYTES,
            ready.length - HEADER_BYTES,
            ready.checksum,
            segment.raw,
        )
        decoder = self.codecs.of(self.cache.sendable, Extent.of(segment))
        return self.agent.run_codec(CodecJob(decoder, self._decode, payload, prepare, finish))

    def codec_idle(self) -> "Future[None]":
        return self.agent.codec_idle()

    def digest(
        self,
        page_tables: Sequence[Sequence[int]],
        sent: SentTokens,
        *,
        after: int | None = None,
    ) -> dict[int, list[str]]:
        self.cache.events.wait(after)
        layout = self.layout
        found: dict[int, list[str]] = {head: [] for head in self.kv_heads}
        for group in layout.groups:
            if not group.is_sent(split=True):
                continue
            ranges = sent.pages(group.page_group)
            held = [page_tables[group.page_group][index] for pages in ranges for index in pages]
            tokens = sum(layout.plan.filled(pages, sent.kept) for pages in ranges)
            tensors = group_tensors(self.cache.sendable, group, 0, len(layout.layers))
            for index, digests in enumerate(found.values()):
                of_head = [tensor[:, index : index + 1] for tensor in tensors]
                digest = codec.checksum_pages(of_head, held, tokens) if held else 0
                digests.append(f"{digest:016x}")
        return found

    def close(self) -> None:
        self.agent.close()

    def _encode(
        self, encoder: codec.PagedCodec, payloads: Sequence[codec.EncodeSegment]
    ) -> Sequence[codec.Pending[codec.Encoded]]:
        return encoder.encode_batch(payloads, self.slab.buffer)

    def _decode(
        self, decoder: codec.PagedCodec, payloads: Sequence[codec.DecodeSegment]
    ) -> Sequence[codec.PendingDecode]:
        return decoder.decode_batch(payloads, self.slab.buffer, prefix_bytes=HEADER_BYTES)


Endpoints = tuple[LocalEndpoint, *tuple[KVEndpoint, ...]]
"""The endpoints of a worker, by rank. This process runs the first rank."""


def _message(segment: pb.Segment, encoded: codec.Encoded, encode_s: float) -> pb.SegmentReady:
    return pb.SegmentReady(
        sequence=segment.sequence,
        index=segment.index,
        length=HEADER_BYTES + encoded.length,
        checksum=encoded.checksum,
        raw_bytes=encoded.raw_bytes,
        encode_s=encode_s,
        nonce=segment.nonce,
        rank=segment.rank,
    )
