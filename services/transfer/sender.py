"""The prefill worker's half of a transfer: encode computed KV into the slab, segment by segment.

A segment is announced when its encode is started, so that the reader can prepare meanwhile. It is
encoded only against a credit of its reader, so each slot in use has a landing slot reserved. The
slot becomes free when the reader acknowledges the segment. The slots of a reader that has stopped
become free when its session or its leases end; `SharedSlots` never gives all slots to one reader.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future

import structlog

import codec
from headrace.v1 import error_pb2, request_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.engine import Computed
from runtime.kv.cache import PagedCache
from services.transfer.codec_calls import CodecJob, CodecRunner, Timed
from services.transfer.codecs import SegmentCodecs
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES, FrameHeader
from services.transfer.lease import LeaseTable
from services.transfer.manifest import SegmentPlan, SentTokens, plan_segments, sent_tokens
from services.transfer.metrics import TransferMetrics
from services.transfer.outgoing import Outgoing, SentSegment
from services.transfer.policy import LinkPolicy, SegmentTiming, WireMode
from services.transfer.shares import SharedSlots
from services.transfer.slab import Slab, SlotRef

log = structlog.get_logger()

_NOTIFICATION_S = 2e-3
"""Seconds in which a notified reader may acknowledge a segment, so that it needs no event."""


class Sender:
    """Owns the slab's slots and the leases. Encodes run on the transfer thread.

    Args:
        runner: runs codec calls.
        cache: pages of the engine.
        codecs: codecs of that cache.
        policy: chooses between raw and SplitZip.
        epoch: epoch of this worker, 32 hex digits; part of every frame.
        lease_s: seconds without progress of a reader after which the leases of its sequences with
            unacknowledged segments expire.
        max_sequences: maximum number of leases.
        kv_eviction: fraction of the prompt tokens that the engine evicts.
        rank: rank of this worker in its tensor-parallel group.
        first_kv_head: index of the cache's first KV head, counted over all ranks.
    """

    def __init__(
        self,
        runner: CodecRunner,
        cache: PagedCache,
        slab: Slab,
        codecs: SegmentCodecs,
        policy: LinkPolicy,
        *,
        epoch: str,
        lease_s: float,
        max_sequences: int,
        metrics: TransferMetrics,
        kv_eviction: float = 0.0,
        rank: int = 0,
        first_kv_head: int = 0,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._slab = slab
        self._slots = SharedSlots(slab.slots)
        self._codecs = codecs
        self.policy = policy
        self._epoch = epoch
        self._kv_eviction = kv_eviction
        self._rank = rank
        self._first_kv_head = first_kv_head
        self._leases = LeaseTable(lease_s, max_sequences)
        self._outgoing: dict[str, Outgoing] = {}
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def active(self) -> int:
        """Number of sequences that are not closed and may hold a lease."""
        return len(self._outgoing)

    @property
    def slots_in_use(self) -> int:
        """Number of slots with a segment that is being encoded or not acknowledged."""
        return self._slots.in_use

    def sent_tokens(self, request: request_pb2.Request) -> SentTokens:
        """Return which tokens of a request are sent; see `manifest.sent_tokens`."""
        return sent_tokens(request, self._codecs.layout, self._kv_eviction)

    def open(self, outgoing: Outgoing) -> None:
        """Register a sequence, before its chunks are added."""
        self._outgoing[outgoing.key] = outgoing

    def add_computed(self, chunk: Computed) -> None:
        """Plan the segments of a chunk and start to encode them."""
        outgoing = self._outgoing.get(chunk.id)
        if outgoing is None or outgoing.closed:
            return
        outgoing.evicted = chunk.evicted
        self._leases.grant(outgoing.key, outgoing.reader)
        self._metrics.leases.set(self._leases.active)
        outgoing.planned.extend(
            (plan, chunk.ready)
            for plan in plan_segments(
                self._codecs.layout,
                first_token=chunk.first_token,
                num_tokens=chunk.num_tokens,
                page_tables=chunk.page_tables,
                sequence_tokens=outgoing.tokens,
                capacity=min(outgoing.slot_bytes, self._slab.slot_bytes),
                bound=self._codecs.max_frame_bytes,
                rank=self._rank,
                first_kv_head=self._first_kv_head,
            )
        )
        self._pump()

    def finish_computing(self, key: str) -> None:
        """Record that all chunks were added; the number of segments is then announced."""
        if outgoing := self._outgoing.get(key):
            outgoing.computed = True
            outgoing.announce_if_complete()
            self._count_if_complete(outgoing)

    def credit(self, key: str, segments: int) -> None:
        """Add credits that the reader granted."""
        if outgoing := self._outgoing.get(key):
            outgoing.credits += segments
            self._leases.progressed(outgoing.reader, time.monotonic())
            self._pump()

    def acknowledge(self, key: str, index: int, timing: SegmentTiming | None = None) -> None:
        """Free the slot of a segment that the reader has decoded."""
        outgoing = self._outgoing.get(key)
        sent = outgoing.unacknowledged.get(index) if outgoing else None
        if outgoing is None or sent is None or sent.ready is None:
            log.warning("acknowledgement of an unknown segment", key=key, index=index)
            return
        del outgoing.unacknowledged[index]
        if timing is not None:
            sizes = sent.ready.raw_bytes, sent.ready.length
            self.policy.arrived(outgoing.peer, sent.mode, *sizes, timing)
        self._slots.release(sent.ref)
        self._leases.progressed(outgoing.reader, time.monotonic())
        if not outgoing.readable:
            self._leases.pause(key)
        self._count_if_complete(outgoing)
        self._pump()

    def close(self, key: str) -> None:
        """End a sequence in any state and free what it holds. Idempotent."""
        outgoing = self._outgoing.pop(key, None)
        if outgoing is None:
            return
        outgoing.closed = True
        outgoing.planned.clear()
        for sent in outgoing.unacknowledged.values():
            if not sent.encoding:  # else `_settle` releases the slot
                self._slots.release(sent.ref)
        outgoing.unacknowledged = {
            index: sent for index, sent in outgoing.unacknowledged.items() if sent.encoding
        }
        self._leases.release(key)
        self._metrics.leases.set(self._leases.active)
        self._pump()

    def expire(self) -> None:
        """Fail the sequences whose leases have expired; called periodically."""
        for key in self._leases.expired(time.monotonic()):
            self._metrics.leases_expired.inc()
            if outgoing := self._outgoing.get(key):
                log.warning("lease expired", **outgoing.log_fields)
                outgoing.fail(
                    error_pb2.ERROR_CODE_LEASE_EXPIRED, "the lease expired before the KV was read"
                )

    def forget_peer(self, peer: str) -> None:
        """Drop the measurements of the link to a decode worker that has left."""
        self.policy.forget(peer)
        self._metrics.links.forget(peer)

    def observe(self) -> None:
        """Set the gauges of the slab and of every link."""
        self._metrics.slab_slots.set(self.slots_in_use)
        for peer, link in self.policy.links().items():
            self._metrics.links.observe(peer, link)

    def _count_if_complete(self, outgoing: Outgoing) -> None:
        """Count the tokens of a sequence once all of its segments are acknowledged."""
        if outgoing.computed and outgoing.issued and not outgoing.outstanding:
            self._metrics.sent(outgoing.tokens + outgoing.evicted)

    def _pump(self) -> None:
        """Start every encode that has a credit and a slot, oldest sequence first."""
        for outgoing in self._outgoing.values():
            while outgoing.planned and outgoing.credits:
                ref = self._slots.acquire(outgoing.reader)
                if ref is None:  # this reader's share is used up; others may get a slot
                    break
                outgoing.credits -= 1
                plan, ready = outgoing.planned.popleft()
                self._start(outgoing, plan, ref, ready)

    def _start(
        self, outgoing: Outgoing, plan: SegmentPlan, ref: SlotRef, ready: int | None
    ) -> None:
        """Announce one segment and start its encode.

        Encodes end in the order in which they are started, which is the order of their indices.
        """
        start = time.perf_counter()
        mode = self._mode_of(outgoing, plan)
        segment = _manifest_entry(plan.extent, outgoing, ref, mode)
        sent = outgoing.unacknowledged[segment.index] = SentSegment(ref, mode)
        outgoing.issued += 1
        header = FrameHeader.of(
            segment, epoch=self._epoch, request_id=outgoing.request_id, attempt=outgoing.attempt
        )

        def prepare() -> bool:
            if outgoing.closed:
                return False
            self._cache.events.wait(ready)
            header.pack_into(self._slab.view(ref.slot, HEADER_BYTES))
            return True

        payload = codec.EncodeSegment(
            plan.pages,
            plan.extent.num_tokens,
            self._slab.offset(ref.slot) + HEADER_BYTES,
            self._slab.slot_bytes - HEADER_BYTES,
        )

        def finish(pending: codec.Pending[codec.Encoded]) -> codec.Encoded:
            encoded = pending.result()
            end = time.perf_counter()
            outgoing.encodes.add(start, end)
            sent.ready = pb.SegmentReady(
                sequence=segment.sequence,
                index=segment.index,
                length=HEADER_BYTES + encoded.length,
                checksum=encoded.checksum,
                raw_bytes=encoded.raw_bytes,
                encode_s=end - start,
                nonce=segment.nonce,
            )
            self._runner.notify(outgoing.agent, sent.ready.SerializeToString())
            return encoded

        encoder = self._codecs.of(self._cache.tensors, plan.extent, mode)
        encoding = self._runner.run_codec(CodecJob(encoder, self._encode, payload, prepare, finish))
        outgoing.emit(pb.PrefillEvent(segment=segment))
        outgoing.announce_if_complete()
        task = asyncio.create_task(
            self._settle(outgoing, segment.index, sent, plan.extent, encoding)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _encode(
        self, encoder: codec.PagedCodec, payloads: Sequence[codec.EncodeSegment]
    ) -> Sequence[codec.Pending[codec.Encoded]]:
        return encoder.encode_batch(payloads, self._slab.buffer)

    def _mode_of(self, outgoing: Outgoing, plan: SegmentPlan) -> WireMode:
        if not self._codecs.is_coded(plan.extent.plane_group):
            return WireMode.RAW
        raw_bytes = self._codecs.raw_bytes(plan.extent)
        return self.policy.choose(outgoing.peer, raw_bytes, outgoing.outstanding + 1)

    async def _settle(
        self,
        outgoing: Outgoing,
        index: int,
        sent: SentSegment,
        extent: Extent,
        encoding: "Future[Timed[codec.Encoded] | None]",
    ) -> None:
        """Wait for an encode, then emit its event, unless the reader acknowledges it before."""
        encoded = error = None
        try:
            encoded = await asyncio.wrap_future(encoding)
        except Exception as raised:
            log.exception("encoding a segment failed", **outgoing.log_fields)
            error = raised
        sent.encoding = False
        if encoded is not None and sent.ready is not None:
            ready = sent.ready
            self.policy.encoded(sent.mode, ready.raw_bytes, ready.length, encoded.seconds)
            self._metrics.encoded(
                sent.mode,
                ready.raw_bytes,
                ready.length,
                self._codecs.escapes(extent, encoded.value.escapes),
                ready.encode_s,
                raw_is_faster=self.policy.found_raw_faster(outgoing.peer)
                and self._codecs.is_coded(extent.plane_group),
            )
            await asyncio.sleep(_NOTIFICATION_S)
            if not outgoing.closed:
                if index in outgoing.unacknowledged:
                    outgoing.emit(pb.PrefillEvent(ready=ready))
                    self._leases.run(outgoing.key, time.monotonic())
                return
        if outgoing.unacknowledged.pop(index, None) is not None:
            self._slots.release(sent.ref)
            self._pump()
        if error is not None and not outgoing.closed:
            outgoing.fail(error_pb2.ERROR_CODE_INTERNAL, f"KV could not be encoded: {error}")


def _manifest_entry(extent: Extent, outgoing: Outgoing, ref: SlotRef, mode: WireMode) -> pb.Segment:
    """Return the manifest entry of a sequence's next segment."""
    return pb.Segment(
        sequence=outgoing.sequence,
        index=outgoing.issued,
        first_token=extent.first_token,
        num_tokens=extent.num_tokens,
        first_layer=extent.first_layer,
        num_layers=extent.num_layers,
        first_kv_head=extent.first_kv_head,
        num_kv_heads=extent.num_kv_heads,
        plane_group=extent.plane_group,
        rank=extent.rank,
        slot=ref.slot,
        generation=ref.generation,
        raw=mode is WireMode.RAW,
        nonce=secrets.randbits(64),
    )
