"""The decode worker's half of a transfer: ask for a prefill, READ its segments, verify, decode.

The reader drives everything. It grants credits for landing slots it has, reads each segment that is
announced, and acknowledges it; nothing joins a page table before all of it has verified.
"""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

import codec
from headrace.v1 import decode_pb2, error_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.kv.cache import PagedCache
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.codecs import CodecPlan, outcome_of
from services.transfer.errors import ForeignSegment, FrameError, PeerLost, TransferError
from services.transfer.frame import HEADER_BYTES, FrameHeader, verify
from services.transfer.jobs import CodecJobs
from services.transfer.landing import Landing
from services.transfer.manifest import Coverage, frame_of
from services.transfer.metrics import TransferMetrics
from services.transfer.prefill_client import FetchFailed, PrefillLink, PrefillLinks, Subscription
from services.transfer.slab import Slab, SlotRef

log = structlog.get_logger()


@dataclass
class Fetch:
    """One sequence whose prompt another worker computes, and the pages that wait for its KV."""

    key: str  # the engine's id
    prefill: decode_pb2.WorkerAddress
    start: pb.StartPrefill
    pages: tuple[int, ...]
    on_first: Callable[[pb.FirstTokens], bool]  # True: the sequence ended, no KV is wanted
    deadline_s: float
    closed: bool = False


@dataclass
class FetchTimes:
    """Seconds of the stages of one fetch; those of segments are sums."""

    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode_kv: float = 0.0
    segments: int = 0
    wire_bytes: int = 0
    raw_bytes: int = 0


@dataclass
class _Progress:
    coverage: Coverage
    times: FetchTimes = field(default_factory=FetchTimes)
    expected: int | None = None
    announced: int = 0
    started: bool = False  # the first tokens have come
    ended: bool = False

    @property
    def complete(self) -> bool:
        return self.ended or (self.started and self.expected == self.announced)


class Receiver:
    """Owns the landing slab and its credits. On the event loop; decodes on the engine's thread.

    Args:
        read_timeout_s: for one segment's READ.
    """

    def __init__(
        self,
        jobs: CodecJobs,
        agent: TransferAgent,
        landing: Slab,
        links: PrefillLinks,
        codec_plan: CodecPlan,
        *,
        num_layers: int,
        page_size: int,
        credits_per_sequence: int,
        read_timeout_s: float,
        metrics: TransferMetrics,
    ) -> None:
        self._jobs = jobs
        self._agent = agent
        self.landing = Landing(landing, credits_per_sequence, self._grant)
        self._links = links
        self._codec = codec_plan
        self._num_layers, self._page_size = num_layers, page_size
        self._read_timeout_s = read_timeout_s
        self._metrics = metrics
        self._subscriptions: dict[str, Subscription] = {}

    async def fetch(self, fetch: Fetch) -> FetchTimes:
        """Brings a prompt's KV into ``fetch.pages``; returns when all of it has verified.

        Raises:
            FetchFailed: with the code that the gateway decides by. The pages may hold anything.
        """
        try:
            async with asyncio.timeout(fetch.deadline_s):
                link = await self._links.connect(fetch.prefill)
                return await self._run(fetch, link)
        except TimeoutError:
            raise FetchFailed(error_pb2.ERROR_CODE_DEADLINE, "the deadline passed") from None
        except ExceptionGroup as group:
            raise _first_failure(group, fetch.prefill.worker_id) from group
        finally:
            fetch.closed = True

    async def _run(self, fetch: Fetch, link: PrefillLink) -> FetchTimes:
        tokens = len(fetch.start.tokens)
        progress = _Progress(Coverage(tokens, self._num_layers, self._page_size))
        with link.subscribe(fetch.start) as subscription:
            self._subscriptions[fetch.key] = subscription
            try:
                subscription.send_start()
                async with asyncio.TaskGroup() as pulls:
                    while not progress.complete:
                        event = await subscription.next_event()
                        self._apply(event, fetch, subscription, progress, pulls)
            finally:
                fetch.closed = True
                self.landing.leave(fetch.key)
                del self._subscriptions[fetch.key]
                subscription.release()
        if not progress.ended and not progress.coverage.complete:
            raise FetchFailed(
                error_pb2.ERROR_CODE_INTEGRITY,
                "segments are missing from the manifest",
                fetch.prefill.worker_id,
            )
        return progress.times

    def _apply(
        self,
        event: pb.PrefillEvent,
        fetch: Fetch,
        subscription: Subscription,
        progress: _Progress,
        pulls: asyncio.TaskGroup,
    ) -> None:
        match event.WhichOneof("event"):
            case "computing":  # not before: what waits in a queue must not hold landing space
                self.landing.join(fetch.key)
            case "first_tokens":
                progress.times.queue = event.first_tokens.queue_s
                progress.times.prefill = event.first_tokens.prefill_s
                choices = sorted(token.choice for token in event.first_tokens.tokens)
                if progress.started or choices != list(range(fetch.start.choices)):
                    raise ForeignSegment(f"first tokens of choices {choices}")
                progress.started = True
                progress.ended = fetch.on_first(event.first_tokens)
            case "segment":
                if event.segment.index != progress.announced:
                    raise FetchFailed(
                        error_pb2.ERROR_CODE_INTEGRITY,
                        f"segment {event.segment.index} came in place {progress.announced}",
                        fetch.prefill.worker_id,
                    )
                progress.announced += 1
                pulls.create_task(self._pull(event.segment, fetch, subscription, progress))
            case "done":
                progress.expected = event.done.segments
            case "failed":
                error = event.failed.error
                blamed = error.worker_id or fetch.prefill.worker_id
                raise FetchFailed(error.code, error.message, blamed)

    async def _pull(
        self, segment: pb.Segment, fetch: Fetch, subscription: Subscription, progress: _Progress
    ) -> None:
        """One segment: READ it into a landing slot, verify, decode into pages, acknowledge."""
        welcome = subscription.welcome
        if not HEADER_BYTES < segment.length <= self.landing.slab.slot_bytes:
            raise ForeignSegment(f"a segment of {segment.length} bytes")
        if segment.slot >= welcome.slots:
            raise ForeignSegment(f"slot {segment.slot} does not exist")
        pages = progress.coverage.add(
            segment.first_token, segment.num_tokens, segment.first_layer, segment.num_layers
        )
        slot = self.landing.land(fetch.key)
        user: asyncio.Future[Any] | None = None  # who may still touch the slot
        busy_s = codec_s = 0.0
        start = time.perf_counter()
        try:
            user = asyncio.wrap_future(self._read(segment, slot, welcome))
            busy_s = (await asyncio.shield(user)).busy_s
            read_s = time.perf_counter() - start
            user = asyncio.ensure_future(self._decode(segment, slot, pages, fetch, welcome))
            codec_s = await asyncio.shield(user)
        except PeerLost:
            subscription.hang_up()
            raise
        except (codec.CodecError, FrameError):
            self._metrics.integrity_failures.inc()
            raise
        finally:
            self.landing.free_after(slot, fetch.key, user)
        subscription.acknowledge(segment.index, busy_s, codec_s)
        self._count(progress.times, segment, read_s, time.perf_counter() - start - read_s)

    def _read(
        self, segment: pb.Segment, slot: SlotRef, welcome: pb.Welcome
    ) -> "concurrent.futures.Future[ReadDone]":
        return self._agent.read(
            welcome.agent_name,
            welcome.slab_address + segment.slot * welcome.slot_bytes,
            segment.length,
            self.landing.slab.view(slot.slot, segment.length),
            kind=welcome.memory_kind,
            device=welcome.device,
            deadline_s=self._read_timeout_s,
        )

    async def _decode(
        self,
        segment: pb.Segment,
        slot: SlotRef,
        pages: range,
        fetch: Fetch,
        welcome: pb.Welcome,
    ) -> float:
        """Verifies what was read and decodes it; returns the seconds that the codec took."""
        decoding = await self._jobs.run_on_cache(
            lambda cache: self._start_decode(cache, segment, slot, pages, fetch, welcome)
        )
        if decoding is None:
            return 0.0
        await outcome_of(decoding)
        return decoding.seconds

    def _start_decode(
        self,
        cache: PagedCache,
        segment: pb.Segment,
        slot: SlotRef,
        pages: range,
        fetch: Fetch,
        welcome: pb.Welcome,
    ) -> codec.Pending[codec.Decoded] | None:
        """On the engine's thread; None for a closed sequence. Of pages see `Sender._start`."""
        if fetch.closed:
            return None
        frame = self.landing.slab.view(slot.slot, segment.length)
        payload = frame[HEADER_BYTES:]
        start = fetch.start
        expected = frame_of(
            segment, epoch=welcome.epoch, request_id=start.request_id, attempt=start.attempt
        )
        with self.landing.slab.aside():
            verify(expected, FrameHeader.unpack(frame))
            header = codec.read_header(payload)
        if header.checksum != segment.checksum:
            raise ForeignSegment("the segment's checksum is not the manifest's")
        layers = self._codec.of(cache.planes, segment.first_layer, segment.num_layers)
        page_ids = fetch.pages[pages.start : pages.stop]
        return layers.decode(payload, header, page_ids, segment.num_tokens)

    def observe(self) -> None:
        """Set the gauges of the landing slots."""
        self._metrics.landing_slots.labels("held").set(self.landing.held)
        self._metrics.landing_slots.labels("quarantined").set(self.landing.quarantined)

    def _grant(self, key: str, segments: int) -> None:
        self._subscriptions[key].credit(segments)

    def _count(
        self, times: FetchTimes, segment: pb.Segment, read_s: float, decode_s: float
    ) -> None:
        times.segments += 1
        times.transfer += read_s
        times.decode_kv += decode_s
        times.wire_bytes += segment.length
        times.raw_bytes += segment.raw_bytes
        self._metrics.received(segment.raw_bytes, segment.length, read_s, decode_s)


def _first_failure(group: "ExceptionGroup[Exception]", worker_id: str) -> Exception:
    """What ended the fetch, as the gateway should hear it; a bug of ours stays what it is."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FetchFailed):
        return error
    if isinstance(error, codec.CodecError | FrameError):
        return FetchFailed(error_pb2.ERROR_CODE_INTEGRITY, f"KV did not verify: {error}", worker_id)
    if isinstance(error, PeerLost):
        return FetchFailed(error_pb2.ERROR_CODE_PREFILL_LOST, str(error), worker_id)
    if isinstance(error, TransferError):
        return FetchFailed(error_pb2.ERROR_CODE_TRANSFER_FAILED, str(error), worker_id)
    return error
