"""The prefill worker's half of a transfer: encode computed KV into the slab, segment by segment.

A segment is encoded only when its reader has granted a credit for it, so whatever lies in the slab
has landing space waiting and drains on its own, unless its reader has stopped: what that one holds
comes back when its session or its leases end, and is never all there is (`SharedSlots`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

import codec
from headrace.v1 import error_pb2 as pb_error
from headrace.v1 import prefill_pb2 as pb
from runtime.kv.cache import PagedCache
from services.transfer.codecs import CodecPlan, outcome_of
from services.transfer.drift import Escapes
from services.transfer.frame import HEADER_BYTES
from services.transfer.jobs import CodecJobs
from services.transfer.lease import LeaseTable
from services.transfer.manifest import SegmentPlan, frame_of, plan_segments
from services.transfer.metrics import TransferMetrics
from services.transfer.policy import LinkPolicy, SegmentTiming, WireMode
from services.transfer.shares import SharedSlots
from services.transfer.slab import Slab, SlotRef

log = structlog.get_logger()


@dataclass
class Outgoing:
    """One sequence whose KV a reader wants."""

    key: str  # the engine's id
    reader: str  # whose sequence it is: the session
    peer: str  # the decode worker's id: one end of the link that the policy measures
    sequence: int  # the session's
    request_id: str
    attempt: int
    slot_bytes: int  # of the reader's landing slab
    emit: Callable[[pb.PrefillEvent], None]
    fail: Callable[["pb_error.ErrorCode.ValueType", str], None]
    credits: int = 0
    planned: deque[SegmentPlan] = field(default_factory=deque)
    unacknowledged: dict[int, "_Sent"] = field(default_factory=dict)
    issued: int = 0
    encoding: int = 0
    computed: bool = False
    closed: bool = False

    @property
    def outstanding(self) -> int:
        """Segments that are known of and not acknowledged."""
        return len(self.planned) + self.encoding + len(self.unacknowledged)


@dataclass(frozen=True)
class _Sent:
    """A segment in a slot, as its acknowledgement will be booked."""

    ref: SlotRef
    mode: WireMode
    raw_bytes: int
    wire_bytes: int


class Sender:
    """Owns the slab's slots and the leases. Runs on the event loop; encodes on the engine's thread.

    Args:
        epoch: this worker's, 32 hex digits; it goes into every frame.
        kv_heads, dim, page_size, num_layers: the shape of a plane, `[page, kv_head, slot, dim]`.
    """

    def __init__(
        self,
        jobs: CodecJobs,
        slab: Slab,
        codec_plan: CodecPlan,
        policy: LinkPolicy,
        *,
        epoch: str,
        kv_heads: int,
        dim: int,
        page_size: int,
        num_layers: int,
        lease_s: float,
        max_sequences: int,
        metrics: TransferMetrics,
    ) -> None:
        self._jobs = jobs
        self._slab = slab
        self._slots = SharedSlots(slab.slots)
        self._codec = codec_plan
        self.policy = policy
        self._epoch = epoch
        self._kv_heads, self._dim = kv_heads, dim
        self._page_size, self._num_layers = page_size, num_layers
        self._leases = LeaseTable(lease_s, max_sequences)
        self._outgoing: dict[str, Outgoing] = {}
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def active(self) -> int:
        """Sequences that are not closed, and so leases that may yet be held."""
        return len(self._outgoing)

    @property
    def slots_in_use(self) -> int:
        return self._slots.in_use

    @property
    def least_slot_bytes(self) -> int:
        """A slot that is smaller does not hold the smallest segment: one page of one layer."""
        return self._bound(1, self._page_size)

    def open(self, outgoing: Outgoing) -> None:
        self._outgoing[outgoing.key] = outgoing

    def add_computed(
        self, key: str, first_token: int, num_tokens: int, pages: tuple[int, ...]
    ) -> None:
        """A chunk's KV is in the pages: plan its segments."""
        outgoing = self._outgoing.get(key)
        if outgoing is None or outgoing.closed:
            return
        self._leases.grant(outgoing.key, time.monotonic())
        self._metrics.leases.set(self._leases.active)
        capacity = min(outgoing.slot_bytes, self._slab.slot_bytes)
        outgoing.planned.extend(
            plan_segments(
                first_token=first_token,
                num_tokens=num_tokens,
                pages=pages,
                page_size=self._page_size,
                num_layers=self._num_layers,
                capacity=capacity,
                bound=self._bound,
            )
        )
        self._pump()

    def finish_computing(self, key: str) -> None:
        """All chunks were added: the reader is told how many segments there are."""
        if outgoing := self._outgoing.get(key):
            outgoing.computed = True
            self._settle(outgoing)

    def credit(self, key: str, segments: int) -> None:
        if outgoing := self._outgoing.get(key):
            outgoing.credits += segments
            self._leases.renew(key, time.monotonic())
            self._pump()

    def acknowledge(self, key: str, index: int, timing: SegmentTiming | None = None) -> None:
        """The reader has the segment: its slot serves the next one."""
        outgoing = self._outgoing.get(key)
        sent = outgoing.unacknowledged.pop(index, None) if outgoing else None
        if outgoing is None or sent is None:
            log.warning("acknowledgement of an unknown segment", key=key, index=index)
            return
        if timing is not None:
            self.policy.arrived(outgoing.peer, sent.mode, sent.raw_bytes, sent.wire_bytes, timing)
        self._slots.release(sent.ref)
        self._leases.renew(key, time.monotonic())
        self._pump()

    def close(self, key: str) -> None:
        """Ends a sequence's claim, wherever it stands. Idempotent."""
        outgoing = self._outgoing.pop(key, None)
        if outgoing is None:
            return
        outgoing.closed = True
        outgoing.planned.clear()
        for sent in outgoing.unacknowledged.values():
            self._slots.release(sent.ref)
        outgoing.unacknowledged.clear()
        self._leases.release(key)
        self._metrics.leases.set(self._leases.active)
        self._pump()

    def expire(self) -> None:
        """Ends the leases whose readers went silent; called once in a while."""
        for key in self._leases.expired(time.monotonic()):
            self._metrics.leases_expired.inc()
            if outgoing := self._outgoing.get(key):
                log.warning("lease expired", request_id=outgoing.request_id)
                outgoing.fail(pb_error.ERROR_CODE_LEASE_EXPIRED, "the KV was not read in time")

    def forget_peer(self, peer: str) -> None:
        """Drop what was measured of the link to a decode worker that has left."""
        self.policy.forget(peer)
        self._metrics.forget_link(peer)

    def observe(self) -> None:
        """Set the gauges of the slab and of every link, and end expired leases."""
        self.expire()
        self._metrics.slab_slots.set(self.slots_in_use)
        for peer, link in self.policy.links().items():
            self._metrics.observe_link(peer, link)

    def _bound(self, layers: int, tokens: int) -> int:
        shape = (2 * layers, self._kv_heads, self._dim, tokens, self._page_size)
        return HEADER_BYTES + codec.max_segment_bytes(*shape)

    def _raw_bytes(self, plan: SegmentPlan) -> int:
        """Of KV, bf16."""
        return 2 * 2 * plan.num_layers * self._kv_heads * self._dim * plan.num_tokens

    def _pump(self) -> None:
        """Starts every encode that has a credit and a slot, oldest sequence first."""
        for outgoing in self._outgoing.values():
            while outgoing.planned and outgoing.credits:
                ref = self._slots.acquire(outgoing.reader)
                if ref is None:  # for this reader: another one may still have its share
                    break
                outgoing.credits -= 1
                outgoing.encoding += 1
                plan = outgoing.planned.popleft()
                mode = self.policy.choose(
                    outgoing.peer, self._raw_bytes(plan), outgoing.outstanding
                )
                task = asyncio.create_task(self._encode(outgoing, plan, ref, mode))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _encode(
        self, outgoing: Outgoing, plan: SegmentPlan, ref: SlotRef, mode: WireMode
    ) -> None:
        start = time.perf_counter()
        try:
            encoding = await self._jobs.run_on_cache(
                lambda cache: self._start(cache, outgoing, plan, ref, mode)
            )
            encoded = await outcome_of(encoding) if encoding else None
            if outgoing.closed or encoding is None or encoded is None:
                self._slots.release(ref)
                self._pump()
                return
            segment = self._framed(outgoing, plan, ref, encoded)
            codec_s = encoding.seconds
        except Exception as error:
            log.exception("segment not encoded", request_id=outgoing.request_id)
            self._slots.release(ref)
            self._pump()
            if not outgoing.closed:
                outgoing.fail(pb_error.ERROR_CODE_INTERNAL, f"KV could not be encoded: {error}")
            return
        finally:
            outgoing.encoding -= 1
        segment.encode_s = time.perf_counter() - start
        raw_bytes, wire_bytes = segment.raw_bytes, segment.length
        outgoing.unacknowledged[segment.index] = _Sent(ref, mode, raw_bytes, wire_bytes)
        self.policy.encoded(mode, raw_bytes, wire_bytes, codec_s)
        found = Escapes(
            raw_bytes // 2,
            encoded.escapes,
            self._codec.escape_rate(plan.first_layer, plan.num_layers),
        )
        self._metrics.encoded(mode, raw_bytes, wire_bytes, found, segment.encode_s)
        outgoing.emit(pb.PrefillEvent(segment=segment))
        self._settle(outgoing)

    def _start(
        self, cache: PagedCache, outgoing: Outgoing, plan: SegmentPlan, ref: SlotRef, mode: WireMode
    ) -> codec.Pending[codec.Encoded] | None:
        """On the engine's thread. None for a closed sequence.

        The pages are the sequence's as long as it is not closed, and on a GPU, where the engine's
        stream has this work before anything that could write to them, for long enough after that.
        """
        if outgoing.closed:
            return None
        frame = self._slab.view(ref.slot, self._slab.slot_bytes)
        layers = self._codec.of(cache.planes, plan.first_layer, plan.num_layers, mode)
        return layers.encode(plan.pages, plan.num_tokens, frame[HEADER_BYTES:])

    def _framed(
        self, outgoing: Outgoing, plan: SegmentPlan, ref: SlotRef, encoded: codec.Encoded
    ) -> pb.Segment:
        """Writes the frame in front of a payload; returns the manifest entry. Segments are counted
        as they come out of the codec: on a GPU several are in it."""
        index, outgoing.issued = outgoing.issued, outgoing.issued + 1
        segment = pb.Segment(
            sequence=outgoing.sequence,
            index=index,
            first_token=plan.first_token,
            num_tokens=plan.num_tokens,
            first_layer=plan.first_layer,
            num_layers=plan.num_layers,
            slot=ref.slot,
            generation=ref.generation,
            length=HEADER_BYTES + encoded.length,
            checksum=encoded.checksum,
            raw_bytes=encoded.raw_bytes,
        )
        frame = frame_of(
            segment,
            epoch=self._epoch,
            request_id=outgoing.request_id,
            attempt=outgoing.attempt,
        )
        with self._slab.aside():
            frame.pack_into(self._slab.view(ref.slot, HEADER_BYTES))
        return segment

    def _settle(self, outgoing: Outgoing) -> None:
        """Says how many segments there are, once the last of them has been announced."""
        if outgoing.computed and not outgoing.planned and not outgoing.encoding:
            done = pb.PrefillDone(sequence=outgoing.sequence, segments=outgoing.issued)
            outgoing.emit(pb.PrefillEvent(done=done))
