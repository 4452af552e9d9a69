"""The decode worker's half of a transfer: request a prefill, READ its segments, verify, decode.

The reader drives the transfer. It grants credits for free landing slots, reads each announced
segment and acknowledges it. The pages join a page table only after all segments have verified.
"""

import asyncio
import concurrent.futures
import time
from contextlib import suppress
from dataclasses import dataclass

import codec
from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.kv.cache import PagedCache
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.codec_calls import CodecJob, Timed
from services.transfer.codecs import SegmentCodecs
from services.transfer.errors import (
    ForeignSegment,
    FrameError,
    PeerLost,
    TransferClosed,
    TransferError,
)
from services.transfer.extent import Extent
from services.transfer.fetch import Fetch, FetchFailed, FetchProgress, FetchTimes
from services.transfer.frame import HEADER_BYTES, FrameHeader
from services.transfer.landed import SegmentDecoder, verified
from services.transfer.landing import LandingSlots
from services.transfer.manifest import Coverage
from services.transfer.metrics import TransferMetrics
from services.transfer.prefill_client import PrefillClient, PrefillClients, Subscription
from services.transfer.slab import Slab, SlotRef


@dataclass(frozen=True)
class Pulled:
    """A segment that was read, verified and decoded.

    Attributes:
        decode_s: seconds from the end of the READ to the end of the decode.
        codec_s: seconds of the codec alone.
    """

    read: ReadDone
    decode_s: float
    codec_s: float


class Receiver:
    """Owns the landing slab and its credits. READs and decodes run on the transfer thread.

    Args:
        cache: pages of the engine.
        codecs: codecs of that cache.
        credits_per_sequence: maximum number of segments of one sequence in flight.
        read_timeout_s: deadline of one segment's READ, in seconds.
    """

    def __init__(
        self,
        agent: TransferAgent,
        cache: PagedCache,
        landing: Slab,
        clients: PrefillClients,
        codecs: SegmentCodecs,
        *,
        credits_per_sequence: int,
        read_timeout_s: float,
        metrics: TransferMetrics,
    ) -> None:
        self._agent = agent
        self._decoder = SegmentDecoder(cache, codecs, landing)
        self.landing = LandingSlots(landing, credits_per_sequence, self._grant)
        self._clients = clients
        self._codecs = codecs
        self._read_timeout_s = read_timeout_s
        self._metrics = metrics
        self._subscriptions: dict[str, Subscription] = {}

    async def fetch(self, fetch: Fetch) -> FetchTimes:
        """Fetch a prompt's KV into reserved pages; return when all of it is verified.

        Nothing writes to the pages once this has returned or raised.

        Raises:
            FetchFailed: the KV did not arrive; the content of the pages is undefined.
        """
        try:
            async with asyncio.timeout(fetch.deadline_s):
                client = await self._clients.connect(fetch.prefill)
                return await self._run(fetch, client)
        except TimeoutError:
            raise FetchFailed(
                error_pb2.ERROR_CODE_DEADLINE, "the request's deadline passed"
            ) from None
        except ExceptionGroup as group:
            raise _first_failure(group, fetch.prefill.worker_id) from group

    def observe(self) -> None:
        """Set the gauges of the landing slots."""
        self._metrics.landing_slots.labels("held").set(self.landing.held)
        self._metrics.landing_slots.labels("quarantined").set(self.landing.quarantined)

    async def _run(self, fetch: Fetch, client: PrefillClient) -> FetchTimes:
        progress = FetchProgress(Coverage(len(fetch.request.tokens), self._codecs.layout))
        with client.subscribe(fetch.request) as subscription:
            self._subscriptions[fetch.key] = subscription
            try:
                subscription.send_start()
                async with asyncio.TaskGroup() as pulls:
                    while not progress.complete:
                        event = await subscription.next_event()
                        self._apply(event, fetch, subscription, progress, pulls)
            except BaseException:
                await self._stop_decodes(fetch)
                raise
            finally:
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
        progress: FetchProgress,
        pulls: asyncio.TaskGroup,
    ) -> None:
        match event.WhichOneof("event"):
            case "computing":  # a prompt that is only queued must not hold landing slots
                if progress.computing:
                    raise ForeignSegment("the start of the computation was announced twice")
                progress.computing = True
                fetch.reserved.add_done_callback(lambda _: self._join(fetch))
            case "first_tokens":
                progress.times.queue = event.first_tokens.queue_s
                progress.times.prefill = event.first_tokens.prefill_s
                choices = sorted(token.choice for token in event.first_tokens.tokens)
                if progress.started or choices != list(range(fetch.request.choices)):
                    raise ForeignSegment(f"unexpected first tokens, of choices {choices}")
                progress.started = True
                progress.ended = fetch.on_first(event.first_tokens)
            case "segment":
                if event.segment.index != progress.announced:
                    raise FetchFailed(
                        error_pb2.ERROR_CODE_INTEGRITY,
                        f"segment {event.segment.index} announced, expected {progress.announced}",
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

    def _join(self, fetch: Fetch) -> None:
        """Ask for landing slots, now that there are pages for a sequence that is computed."""
        if fetch.key in self._subscriptions and not fetch.reserved.cancelled():
            self.landing.join(fetch.key)

    async def _stop_decodes(self, fetch: Fetch) -> None:
        """Close a fetch and wait for its decodes in progress, even if cancelled again.

        READs may continue, since they do not touch the pages.
        """
        fetch.closed = True  # from now on no decode is started
        idle = asyncio.wrap_future(self._agent.codec_idle())
        while not idle.done():
            with suppress(asyncio.CancelledError, TransferClosed):
                await asyncio.shield(idle)

    async def _pull(
        self,
        segment: pb.Segment,
        fetch: Fetch,
        subscription: Subscription,
        progress: FetchProgress,
    ) -> None:
        """READ one segment into a landing slot, verify it, decode it into pages, acknowledge it."""
        welcome = subscription.welcome
        if not HEADER_BYTES < segment.length <= self.landing.slab.slot_bytes:
            raise ForeignSegment(f"a segment of {segment.length} bytes does not fit a slot")
        if segment.slot >= welcome.slots:
            raise ForeignSegment(f"slot {segment.slot} does not exist; there are {welcome.slots}")
        pages = progress.coverage.add(Extent.of(segment))
        slot = self.landing.land(fetch.key)
        user: asyncio.Future[Pulled] | None = None  # READ or decode that may touch the slot
        try:
            decode = self._decode_of(segment, slot, pages, fetch, welcome)
            user = asyncio.wrap_future(self._read_and_decode(segment, slot, welcome, decode))
            pulled = await asyncio.shield(user)
        except PeerLost:
            subscription.disconnect()
            raise
        except (codec.CodecError, FrameError):
            self._metrics.integrity_failures.inc()
            raise
        finally:
            self.landing.free_after(slot, fetch.key, user)
        subscription.acknowledge(segment.index, pulled.read.busy_s, pulled.codec_s)
        progress.times.add(segment, pulled.read.seconds, pulled.decode_s)
        self._metrics.received(
            segment.raw_bytes, segment.length, pulled.read.seconds, pulled.decode_s
        )

    def _read_and_decode(
        self,
        segment: pb.Segment,
        slot: SlotRef,
        welcome: pb.Welcome,
        decode: CodecJob[codec.Decoded],
    ) -> "concurrent.futures.Future[Pulled]":
        """Start a READ whose end starts the decode, without a detour over the event loop.

        Returns:
            Future that settles when neither of them touches the landing slot, except after
            `ReadTimeout`.
        """
        pulled: concurrent.futures.Future[Pulled] = concurrent.futures.Future()

        def start(reading: "concurrent.futures.Future[ReadDone]") -> None:
            if error := reading.exception():
                pulled.set_exception(error)
                return
            read, began = reading.result(), time.perf_counter()

            def settle(decoding: "concurrent.futures.Future[Timed[codec.Decoded] | None]") -> None:
                if error := decoding.exception():
                    pulled.set_exception(error)
                    return
                decoded = decoding.result()
                codec_s = 0.0 if decoded is None else decoded.seconds
                pulled.set_result(Pulled(read, time.perf_counter() - began, codec_s))

            self._agent.run_codec(decode).add_done_callback(settle)

        self._read(segment, slot, welcome).add_done_callback(start)
        return pulled

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

    def _decode_of(
        self,
        segment: pb.Segment,
        slot: SlotRef,
        pages: range,
        fetch: Fetch,
        welcome: pb.Welcome,
    ) -> CodecJob[codec.Decoded]:
        """Return the decode of a segment, which is verified when it has ended."""
        request, reserved = fetch.request, fetch.reserved.result()
        expected = FrameHeader.of(
            segment, epoch=welcome.epoch, request_id=request.request_id, attempt=request.attempt
        )

        def prepare() -> bool:
            if fetch.closed:  # the pages may soon belong to another sequence
                return False
            if reserved.ready is not None:
                reserved.ready.wait()
            return True

        return CodecJob(
            self._decoder.codec_of(segment),
            self._decoder.decode,
            self._decoder.payload_of(segment, slot, reserved.pages[pages.start : pages.stop]),
            prepare,
            lambda decoding: verified(decoding, expected),
        )

    def _grant(self, key: str, segments: int) -> None:
        self._subscriptions[key].credit(segments)


def _first_failure(group: "ExceptionGroup[Exception]", worker_id: str) -> Exception:
    """Return the first error of a group. Expected errors are converted to `FetchFailed`.

    Any other error is a bug and is returned unchanged.
    """
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FetchFailed):
        return error
    if isinstance(error, codec.CodecError | FrameError):
        return FetchFailed(
            error_pb2.ERROR_CODE_INTEGRITY, f"KV failed verification: {error}", worker_id
        )
    if isinstance(error, PeerLost):
        return FetchFailed(error_pb2.ERROR_CODE_PREFILL_LOST, str(error), worker_id)
    if isinstance(error, TransferError):
        return FetchFailed(error_pb2.ERROR_CODE_TRANSFER_FAILED, str(error), worker_id)
    return error
