"""READs of announced segments, each followed by verification and a decode into pages."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from headrace.v1 import prefill_pb2 as pb
from services.transfer.announced import AnnouncedSegments
from services.transfer.codec_calls import Timed
from services.transfer.endpoint import KVEndpoint
from services.transfer.errors import ForeignSegment
from services.transfer.extent import Extent
from services.transfer.fetch import Fetch
from services.transfer.frame import HEADER_BYTES, FrameHeader
from services.transfer.nixl_agent import ReadDone
from services.transfer.slab import SlotRef


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

    The READ is started on the thread that receives the message that the segment is ready. The end
    of the READ starts the decode on the thread of the endpoint, without using the event loop.

    Args:
        endpoint: endpoint of the reader's rank.
        sender: endpoint of the rank that sends the segment.
        pages: the reader's pages for the segment's tokens.
        deadline_s: seconds without the end of a READ from the peer after which the READ is overdue.

    Attributes:
        done: settles when neither a READ nor a decode touches the landing slot any more, except
            after `ReadTimeout`. Never settles if `cancel` returned True.

    Raises:
        FrameError: the sender's epoch is malformed.
    """

    def __init__(
        self,
        announced: AnnouncedSegments,
        endpoint: KVEndpoint,
        sender: pb.Endpoint,
        segment: pb.Segment,
        pages: Sequence[int],
        fetch: Fetch,
        welcome: pb.Welcome,
        *,
        deadline_s: float,
    ) -> None:
        self._announced = announced
        self._endpoint = endpoint
        self._sender = sender
        self._segment = segment
        self._pages = pages
        self._fetch = fetch
        self._welcome = welcome
        self._deadline_s = deadline_s
        endpoint.prepare_decode(Extent.of(segment))
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
        """Wait on another thread until the segment is ready, then READ it into a landing slot."""

        def read(ready: pb.SegmentReady) -> None:
            try:
                self._read(ready, slot)
            except Exception as error:  # noqa: BLE001 - raised again where the pull is awaited
                self._pulled.set_exception(error)

        self._announced.add(self._sender.agent_name, self._segment, read)

    def cancel(self) -> bool:
        """Give up a segment that is not ready; return False if its READ was started already."""
        return self._announced.discard(self._sender.agent_name, self._segment)

    def _read(self, ready: pb.SegmentReady, slot: SlotRef) -> None:
        if not HEADER_BYTES < ready.length <= self._endpoint.slot_bytes:
            raise ForeignSegment(f"a segment of {ready.length} bytes does not fit a slot")
        reading = self._endpoint.read(
            self._sender,
            self._segment.slot * self._welcome.slot_bytes,
            slot.slot,
            ready.length,
            deadline_s=self._deadline_s,
        )

        def decode(reading: "Future[ReadDone]") -> None:
            try:
                self._decode(ready, slot, reading.result())
            except Exception as error:  # noqa: BLE001 - raised again where the pull is awaited
                self._pulled.set_exception(error)

        reading.add_done_callback(decode)

    def _decode(self, ready: pb.SegmentReady, slot: SlotRef, read: ReadDone) -> None:
        began = time.perf_counter()

        def settle(decoding: "Future[Timed[None] | None]") -> None:
            if error := decoding.exception():
                self._pulled.set_exception(error)
                return
            decoded = decoding.result()
            codec_s = 0.0 if decoded is None else decoded.seconds
            ended = time.perf_counter()
            self._pulled.set_result(Pulled(ready, read, ended - began, codec_s, ended))

        decoding = self._endpoint.decode(
            self._segment,
            ready,
            self._expected,
            slot.slot,
            self._pages,
            after=self._pages_free,
            is_wanted=self._is_wanted,
        )
        decoding.add_done_callback(settle)

    def _is_wanted(self) -> bool:
        return not self._fetch.closed  # else the pages may soon belong to another sequence
