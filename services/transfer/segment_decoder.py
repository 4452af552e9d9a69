"""Verification of a segment that was read, and its decode into pages."""

from collections.abc import Sequence

import codec
from headrace.v1 import prefill_pb2 as pb
from runtime.kv.cache import PagedCache
from services.transfer.codecs import SegmentCodecs
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES, FrameHeader, verify
from services.transfer.slab import Slab, SlotRef


class SegmentDecoder:
    """Decodes segments from the slots of a landing slab into the pages of a cache.

    Args:
        codecs: codecs of the cache.
    """

    def __init__(self, cache: PagedCache, codecs: SegmentCodecs, slab: Slab) -> None:
        self._cache = cache
        self._codecs = codecs
        self._slab = slab

    def codec_of(self, segment: pb.Segment) -> codec.PagedCodec:
        """Return the codec of a segment's planes."""
        return self._codecs.of(self._cache.tensors, Extent.of(segment))

    def payload_of(
        self, segment: pb.Segment, ready: pb.SegmentReady, slot: SlotRef, pages: Sequence[int]
    ) -> codec.DecodeSegment:
        """Return the decode of a segment from a slot.

        Args:
            segment: the manifest entry, whose extent `Coverage` has accepted.
            pages: the reader's pages for the segment's tokens.
        """
        return codec.DecodeSegment(
            tuple(pages),
            segment.num_tokens,
            self._slab.offset(slot.slot) + HEADER_BYTES,
            ready.length - HEADER_BYTES,
            ready.checksum,
            segment.raw,
        )

    def wait(self, event: int | None) -> None:
        """Let the codec's stream wait for an event of the cache."""
        self._cache.events.wait(event)

    def decode(
        self, decoder: codec.PagedCodec, payloads: Sequence[codec.DecodeSegment]
    ) -> Sequence[codec.PendingDecode]:
        """Start to decode segments, and to read the frame header before each payload."""
        return decoder.decode_batch(payloads, self._slab.buffer, prefix_bytes=HEADER_BYTES)


def verified(decoding: codec.PendingDecode, expected: FrameHeader) -> codec.Decoded:
    """Return the result of a decode that has ended, if it decoded the announced segment.

    The pages hold other content if this raises, and must not be attended to.

    Raises:
        FrameError: the slot did not hold the announced segment.
        CodecError: the payload is malformed, or its checksum differs from that in the manifest.
    """
    verify(expected, FrameHeader.unpack(decoding.prefix))
    return decoding.result()
