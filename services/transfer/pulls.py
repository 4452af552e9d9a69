"""READs of announced segments, each followed by verification and a decode into pages."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import codec
from headrace.v1 import prefill_pb2 as pb
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.announced import AnnouncedSegments
from services.transfer.codec_calls import CodecJob, Timed
from services.transfer.errors import ForeignSegment
from services.transfer.fetch import Fetch
from services.transfer.frame import HEADER_BYTES, FrameHeader
from services.transfer.segment_decoder import SegmentDecoder, verified
from services.transfer.slab import Slab, SlotRef

_LEASE_SHARE = 0.75
"""Share of a lease after which its READs are overdue. The rest is for the time by which a lease
starts earlier than the READ."""


@dataclass(frozen=True)
class Pulled:
    """A segment that was read, verified and decoded.

    Attributes:
        decode_s: seconds from the end of the READ to the end of the decode.
        codec_s: seconds of the codec alone.
        ended: end of the decode, in seconds of `time.perf_counter`.
    """

    ready: pb.SegmentReady
    read: ReadDone
    decode_s: float
    codec_s: float
    ended: float


class Pull:
    """One announced segment on its way from the sender's slab to the pages.

    The READ is started on the thread that learns that the segment is ready. Its end starts the
    decode on the transfer thread, without a detour over the event loop.

    Args:
        pages: the reader's pages for the segment's tokens.

    Attributes:
        done: settles when neither a READ nor a decode touches the landing slot any more, except
            after `ReadTimeout`. Never settles if `cancel` returned True.

    Raises:
        FrameError: the sender's epoch is malformed.
    """

    def __init__(
        self,
        pulls: "PullContext",
        segment: pb.Segment,
        pages: Sequence[int],
        fetch: Fetch,
        welcome: pb.Welcome,
    ) -> None:
        self._pulls = pulls
        self._segment = segment
        self._pages = pages
        self._fetch = fetch
        self._welcome = welcome
        self._codec = pulls.decoder.codec_of(segment)
        self._pages_free = fetch.reserved.result().ready
        self._expected = FrameHeader.of(
            segment,
            epoch=welcome.epoch,
            request_id=fetch.request.request_id,
            attempt=fetch.request.attempt,
        )
        self._pulled: Future[Pulled] = Future()
        self.done = asyncio.wrap_future(self._pulled)

    def start(self, slot: SlotRef) -> None:
        """READ the segment into a landing slot once it is ready."""

        def read(ready: pb.SegmentReady) -> None:
            try:
                self._read(ready, slot)
            except Exception as error:  # noqa: BLE001 - raised again where the pull is awaited
                self._pulled.set_exception(error)

        self._pulls.announced.add(self._welcome.agent_name, self._segment, read)

    def cancel(self) -> bool:
        """Give up a segment that is not ready; return False if its READ was started already."""
        return self._pulls.announced.discard(self._welcome.agent_name, self._segment)

    def _read(self, ready: pb.SegmentReady, slot: SlotRef) -> None:
        pulls, welcome = self._pulls, self._welcome
        if not HEADER_BYTES < ready.length <= pulls.landing.slot_bytes:
            raise ForeignSegment(f"a segment of {ready.length} bytes does not fit a slot")
        reading = pulls.agent.read(
            welcome.agent_name,
            welcome.slab_address + self._segment.slot * welcome.slot_bytes,
            ready.length,
            pulls.landing.view(slot.slot, ready.length),
            kind=welcome.memory_kind,
            device=welcome.device,
            deadline_s=pulls.deadline_s(welcome),
        )

        def decode(reading: "Future[ReadDone]") -> None:
            try:
                self._decode(ready, slot, reading.result())
            except Exception as error:  # noqa: BLE001 - raised again where the pull is awaited
                self._pulled.set_exception(error)

        reading.add_done_callback(decode)

    def _decode(self, ready: pb.SegmentReady, slot: SlotRef, read: ReadDone) -> None:
        began = time.perf_counter()

        def settle(decoding: "Future[Timed[codec.Decoded] | None]") -> None:
            if error := decoding.exception():
                self._pulled.set_exception(error)
                return
            decoded = decoding.result()
            codec_s = 0.0 if decoded is None else decoded.seconds
            ended = time.perf_counter()
            self._pulled.set_result(Pulled(ready, read, ended - began, codec_s, ended))

        decoder, expected = self._pulls.decoder, self._expected
        payload = decoder.payload_of(self._segment, ready, slot, self._pages)
        job = CodecJob(
            self._codec,
            decoder.decode,
            payload,
            self._prepare,
            lambda decoding: verified(decoding, expected),
        )
        self._pulls.agent.run_codec(job).add_done_callback(settle)

    def _prepare(self) -> bool:
        if self._fetch.closed:  # the pages may soon belong to another sequence
            return False
        self._pulls.decoder.wait(self._pages_free)
        return True


@dataclass(frozen=True)
class PullContext:
    """Settings and resources of all pulls of a receiver.

    Attributes:
        landing: slab that segments are read into.
        read_timeout_s: upper limit on `deadline_s`.
    """

    agent: TransferAgent
    decoder: SegmentDecoder
    landing: Slab
    read_timeout_s: float
    announced: AnnouncedSegments

    def deadline_s(self, welcome: pb.Welcome) -> float:
        """Return the seconds without the end of any READ after which those of a peer are overdue.

        They are overdue before the sender's lease expires. Otherwise its slot could be used again
        during a READ, and a slow link would look like damaged data.
        """
        return min(self.read_timeout_s, _LEASE_SHARE * welcome.lease_s)
