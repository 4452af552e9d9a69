"""Interface of KV endpoints: one rank's end of the KV path between two workers.

A worker has one endpoint for each rank of its tensor-parallel group. The services drive all of them
from the process of the first rank, but memory must be registered by the process that allocated it.
An endpoint therefore takes numbers and messages only, never tensors or CUDA events.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from headrace.v1 import prefill_pb2 as pb
from runtime.kv.cache import CacheLayout
from runtime.pages.sent import SentTokens
from services.transfer.codec_calls import Timed
from services.transfer.codecs import SegmentCodecs
from services.transfer.extent import Extent
from services.transfer.frame import FrameHeader
from services.transfer.nixl_agent import ReadDone


@dataclass(frozen=True)
class EncodedSegment:
    """Result of an encode.

    Attributes:
        ready: message to the reader.
        escapes: number of escapes that the encoder counted.
        start, end: from the request for the encode to its end, in seconds of `time.perf_counter`.
    """

    ready: pb.SegmentReady
    escapes: int
    start: float
    end: float


class KVEndpoint(ABC):
    """A KV cache with its layout and KV heads, its codecs, a registered slab and a NIXL agent.

    A prefill worker encodes pages into the slab, from which a peer reads. A decode worker reads
    segments of a peer into the slab, and decodes them into pages. Methods may be called on any
    thread. Futures are settled on a thread of the endpoint.

    Attributes:
        codecs: codecs of the cache, with its layout. Only their sizes are used outside of an
            endpoint.
        slot_bytes: bytes of a slot.
        readable: description for peers that may read the slab.
        connection: description for peers that may only send notifications.
        fault: future that fails with the exception if the transfer can no longer work. Otherwise it
            never completes.
    """

    codecs: SegmentCodecs
    slot_bytes: int
    readable: pb.Endpoint
    connection: pb.Endpoint
    fault: "Future[None]"

    @property
    def layout(self) -> CacheLayout:
        """Layout of the cache, with the KV heads of this rank."""
        return self.codecs.layout

    @property
    def kv_heads(self) -> range:
        """KV heads of the cache, counted over all ranks."""
        return self.codecs.kv_heads

    @property
    @abstractmethod
    def stalled_s(self) -> float:
        """Seconds since the transfer thread made progress; 0 while it waits."""

    @abstractmethod
    def add_peer(self, name: str, metadata: bytes) -> "Future[None]":
        """Connect to the agent of a peer; see `TransferAgent.add_peer`."""

    @abstractmethod
    def remove_peer(self, name: str) -> "Future[None]":
        """Disconnect from a peer; see `TransferAgent.remove_peer`."""

    @abstractmethod
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
        """Encode pages into the segment's slot, then notify the reader.

        Calls are executed in order. The notification may arrive before the future is settled.

        Args:
            header: written before the payload.
            pages: pages that hold the segment's tokens, in token order.
            after: number of the event after which the KV is in the pages; see
                `PagedCache.events`.
            notify: name of the agent that is notified.
            is_wanted: called once before the encode is started. If it returns False, nothing is
                encoded, and the result is None.

        Raises (through the future):
            EventTimeout: the event was not recorded in time.
            CodecError: the pages cannot be encoded.
        """

    @abstractmethod
    def read(
        self, sender: pb.Endpoint, offset: int, slot: int, length: int, *, deadline_s: float
    ) -> "Future[ReadDone]":
        """Copy ``length`` bytes of a peer's slab into a slot; see `TransferAgent.read`.

        Args:
            sender: endpoint of the peer.
            offset: offset in its slab, in bytes.
        """

    @abstractmethod
    def prepare_decode(self, extent: Extent) -> None:
        """Create the codec of a segment's extent, so that its decode starts without delay."""

    @abstractmethod
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
        """Decode a segment that was read into a slot, and verify that it is the announced one.

        Args:
            segment: the manifest entry, whose extent `Coverage` has accepted.
            expected: header of its frame.
            pages: pages for the segment's tokens, in token order.
            after: number of the event after which the pages may be written to.
            is_wanted: called once before the decode is started. If it returns False, nothing is
                decoded, and the result is None. After it has returned False, wait for the future of
                `codec_idle`: no decode then touches the pages.

        Raises (through the future):
            EventTimeout: the event was not recorded in time.
            FrameError: the slot did not hold the announced segment; the pages hold other content.
            CodecError: the payload is malformed, or its checksum differs; the pages hold other
                content.
        """

    @abstractmethod
    def codec_idle(self) -> "Future[None]":
        """Return a future that is settled when all earlier encodes and decodes have ended."""

    @abstractmethod
    def digest(
        self,
        page_tables: Sequence[Sequence[int]],
        sent: SentTokens,
        *,
        after: int | None = None,
    ) -> dict[int, list[str]]:
        """Return digests of a sequence's KV for each KV head of this rank, one per plane group.

        The keys are the KV heads, counted over all ranks. Call it on the engine thread.

        Args:
            page_tables: for each page group, page ids by the index of the page in the sequence.
                Entries of pages that are not sent are ignored.
            after: number of the event after which the KV is in the pages.

        Raises:
            EventTimeout: the event was not recorded in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Shut the agent down. Blocks. Idempotent."""
