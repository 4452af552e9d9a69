"""The prefill worker's half of a transfer: encode computed KV into slabs, segment by segment.

A segment is announced when its encode is started, so that the reader can prepare meanwhile. Each
encode uses one credit of the reader, so each slot in use has a reserved landing slot. The
slot becomes free when the reader acknowledges the segment. The slots of a reader that has stopped
become free when its session or its leases end; `SharedSlots` never gives all slots to one reader.

A worker of several ranks has a slab for each. Segments are cut at the boundaries of the KV heads of
the ranks of both workers (`services.transfer.routes`). A rank of the reader grants credits of its
own, and no segment waits for a credit or a slot of other ranks.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import structlog

from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.engine import Computed
from services.transfer.codec_calls import Timed
from services.transfer.endpoint import EncodedSegment, KVEndpoint
from services.transfer.extent import Extent
from services.transfer.frame import FrameHeader
from services.transfer.lease import LeaseTable
from services.transfer.manifest import SegmentPlan, plan_segments
from services.transfer.metrics import TransferMetrics
from services.transfer.outgoing import Outgoing, SentSegment
from services.transfer.policy import LinkPolicy, WireMode
from services.transfer.routes import Route
from services.transfer.shares import SharedSlots
from services.transfer.slab import SlotRef

log = structlog.get_logger()

_NOTIFICATION_S = 2e-3
"""Seconds in which a notified reader may acknowledge a segment, so that it needs no event."""


class Sender:
    """Owns the slots of the slabs, and the leases. Endpoints encode.

    Args:
        endpoints: endpoint of each rank.
        slots: slots of each slab for segments that are sent; default: all.
        policy: chooses between raw and SplitZip.
        epoch: epoch of this worker, 32 hex digits; part of every frame.
        lease_s: seconds without progress of a reader after which the leases of its sequences with
            unacknowledged segments expire.
    """

    def __init__(
        self,
        endpoints: Sequence[KVEndpoint],
        policy: LinkPolicy,
        *,
        epoch: str,
        lease_s: float,
        metrics: TransferMetrics,
        slots: range | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._slots = [
            SharedSlots(slots or range(endpoint.readable.slots)) for endpoint in endpoints
        ]
        self.policy = policy
        self._epoch = epoch
        self._leases = LeaseTable(lease_s)
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
        return sum(slots.in_use for slots in self._slots)

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
        for route, planned in zip(outgoing.routes, outgoing.planned, strict=True):
            planned.extend((plan, chunk.ready) for plan in self._plans(outgoing, route, chunk))
        self._pump()

    def finish_computing(self, key: str) -> None:
        """Record that all chunks were added; the number of segments is then announced."""
        if outgoing := self._outgoing.get(key):
            outgoing.computed = True
            outgoing.announce_if_complete()
            self._count_if_complete(outgoing)

    def credit(self, key: str, rank: int, segments: int) -> None:
        """Add credits that a rank of the reader granted."""
        if outgoing := self._outgoing.get(key):
            if rank not in outgoing.credits:
                log.warning("credit of an unknown rank", key=key, rank=rank)
                return
            outgoing.credits[rank] += segments
            self._leases.progressed(outgoing.reader, time.monotonic())
            self._pump()

    def acknowledge(self, key: str, index: int, timing: pb.SegmentTiming) -> None:
        """Free the slot of a segment that the reader has decoded.

        An acknowledgement may arrive before the end of the encode was processed here.
        """
        outgoing = self._outgoing.get(key)
        sent = outgoing.unacknowledged.get(index) if outgoing else None
        if outgoing is None or sent is None or sent.timing is not None:
            log.warning("acknowledgement of an unknown segment", key=key, index=index)
            return
        sent.timing = timing
        if sent.ready is not None:
            self._take_back(outgoing, index, sent, sent.ready, timing)

    def close(self, key: str) -> None:
        """End a sequence in any state and free what it holds. Idempotent."""
        outgoing = self._outgoing.pop(key, None)
        if outgoing is None:
            return
        outgoing.closed = True
        for sent in outgoing.unacknowledged.values():
            if sent.ready is not None:  # else `_settle` releases the slot
                self._slots[sent.route.sender].release(sent.ref, outgoing.reader)
        outgoing.unacknowledged = {
            index: sent for index, sent in outgoing.unacknowledged.items() if sent.ready is None
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

    def set_gauges(self) -> None:
        """Set the gauges of the slab and of every link."""
        self._metrics.slab_slots.set(self.slots_in_use)
        for peer, link in self.policy.links().items():
            self._metrics.links.observe(peer, link)

    def _plans(self, outgoing: Outgoing, route: Route, chunk: Computed) -> Sequence[SegmentPlan]:
        """Cut the KV heads of a route and the tokens of a chunk into segments."""
        endpoint = self._endpoints[route.sender]
        return list(
            plan_segments(
                endpoint.layout,
                first_token=chunk.first_token,
                num_tokens=chunk.num_tokens,
                page_tables=chunk.page_tables,
                sent=outgoing.sent,
                capacity=min(outgoing.slot_bytes, endpoint.slot_bytes),
                bound=partial(endpoint.codecs.max_frame_bytes, kv_heads=len(route.kv_heads)),
                rank=route.sender,
                kv_heads=route.kv_heads,
                split=route.split,
            )
        )

    def _take_back(
        self,
        outgoing: Outgoing,
        index: int,
        sent: SentSegment,
        ready: pb.SegmentReady,
        timing: pb.SegmentTiming,
    ) -> None:
        """Free the slot of an acknowledged segment."""
        del outgoing.unacknowledged[index]
        self.policy.arrived(outgoing.peer, sent.mode, ready.raw_bytes, ready.length, timing)
        self._slots[sent.route.sender].release(sent.ref, outgoing.reader)
        self._leases.progressed(outgoing.reader, time.monotonic())
        if not outgoing.readable:
            self._leases.pause(outgoing.key)
        self._count_if_complete(outgoing)
        self._pump()

    def _count_if_complete(self, outgoing: Outgoing) -> None:
        """If all segments of a sequence are acknowledged, count its tokens in the metrics."""
        if outgoing.computed and outgoing.issued and not outgoing.outstanding:
            self._metrics.sent_tokens.inc(outgoing.sent.computed - outgoing.sent.first)

    def _pump(self) -> None:
        """Start every encode that has a credit and a slot, oldest sequence first."""
        for outgoing in self._outgoing.values():
            while self._start_next(outgoing):
                pass

    def _start_next(self, outgoing: Outgoing) -> bool:
        """Start an encode of a sequence; return False if none has a credit and a slot.

        Routes take turns, so that all ranks that send to one rank use its credits.
        """
        for route, planned in outgoing.by_load:
            if not planned or not outgoing.credits[route.reader]:
                continue
            ref = self._slots[route.sender].acquire(outgoing.reader)
            if ref is None:  # this reader's share is used up; others may get a slot
                continue
            outgoing.credits[route.reader] -= 1
            plan, ready = planned.popleft()
            self._start(outgoing, route, plan, ref, ready)
            return True
        return False

    def _start(
        self, outgoing: Outgoing, route: Route, plan: SegmentPlan, ref: SlotRef, ready: int | None
    ) -> None:
        """Announce one segment and start its encode.

        On each rank, encodes end in the order in which they are started.
        """
        endpoint = self._endpoints[route.sender]
        mode = self._mode_of(outgoing, endpoint, plan.extent)
        segment = _manifest_entry(plan.extent, outgoing, route.reader, ref, mode)
        sent = outgoing.unacknowledged[segment.index] = SentSegment(route, ref, mode)
        outgoing.issued += 1
        header = FrameHeader.of(
            segment, epoch=self._epoch, request_id=outgoing.request_id, attempt=outgoing.attempt
        )
        encoding = endpoint.encode(
            segment,
            header,
            plan.pages,
            after=ready,
            notify=outgoing.agent,
            is_wanted=lambda: not outgoing.closed,
        )
        outgoing.emit(pb.PrefillEvent(segment=segment))
        outgoing.announce_if_complete()
        task = asyncio.create_task(
            self._settle(outgoing, segment.index, sent, plan.extent, encoding)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _mode_of(self, outgoing: Outgoing, endpoint: KVEndpoint, extent: Extent) -> WireMode:
        if not endpoint.codecs.is_coded(extent.plane_group):
            return WireMode.RAW
        raw_bytes = endpoint.codecs.raw_bytes(extent)
        return self.policy.choose(outgoing.peer, raw_bytes, outgoing.outstanding + 1)

    async def _settle(
        self,
        outgoing: Outgoing,
        index: int,
        sent: SentSegment,
        extent: Extent,
        encoding: "Future[Timed[EncodedSegment] | None]",
    ) -> None:
        """Wait for an encode. Emit its event unless the reader acknowledges the segment earlier."""
        encoded = error = None
        try:
            encoded = await asyncio.wrap_future(encoding)
        except Exception as raised:
            log.exception("encoding a segment failed", **outgoing.log_fields)
            error = raised
        if encoded is not None:
            self._record(outgoing, sent, extent, encoded)
        if encoded is None or outgoing.closed:
            del outgoing.unacknowledged[index]
            self._slots[sent.route.sender].release(sent.ref, outgoing.reader)
            self._pump()
            if error is not None and not outgoing.closed:
                outgoing.fail(error_pb2.ERROR_CODE_INTERNAL, f"KV could not be encoded: {error}")
            return
        sent.ready = encoded.value.ready
        if sent.timing is not None:
            self._take_back(outgoing, index, sent, sent.ready, sent.timing)
            return
        await asyncio.sleep(_NOTIFICATION_S)
        if index in outgoing.unacknowledged and not outgoing.closed:
            outgoing.emit(pb.PrefillEvent(ready=sent.ready))
            self._leases.run(outgoing.key, time.monotonic())

    def _record(
        self, outgoing: Outgoing, sent: SentSegment, extent: Extent, encoded: Timed[EncodedSegment]
    ) -> None:
        """Record the times and sizes of an encode."""
        ready = encoded.value.ready
        codecs = self._endpoints[sent.route.sender].codecs
        outgoing.encodes.add(encoded.value.start, encoded.value.end)
        self.policy.encoded(sent.mode, ready.raw_bytes, ready.length, encoded.seconds)
        self._metrics.encoded(
            sent.mode,
            ready.raw_bytes,
            ready.length,
            codecs.escapes(extent, encoded.value.escapes),
            ready.encode_s,
            raw_is_faster=self.policy.found_raw_faster(outgoing.peer)
            and codecs.is_coded(extent.plane_group),
        )


def _manifest_entry(
    extent: Extent, outgoing: Outgoing, reader_rank: int, ref: SlotRef, mode: WireMode
) -> pb.Segment:
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
        reader_rank=reader_rank,
        slot=ref.slot,
        generation=ref.generation,
        raw=mode is WireMode.RAW,
        nonce=secrets.randbits(64),
    )
