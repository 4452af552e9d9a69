"""Verification of a segment that was read, and its decode into pages."""

from collections.abc import Sequence

import codec
from headrace.v1 import prefill_pb2 as pb
from runtime.kv.cache import PagedCache
from services.transfer.codecs import SegmentCodecs
from services.transfer.errors import ForeignSegment
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES, FrameHeader, verify
from services.transfer.slab import Slab, SlotRef


def start_decode(
    cache: PagedCache,
    codecs: SegmentCodecs,
    slab: Slab,
    slot: SlotRef,
    segment: pb.Segment,
    expected: FrameHeader,
    pages: Sequence[int],
) -> codec.Pending[codec.Decoded]:
    """Verify the frame in a landing slot and launch its decode, on the transfer thread.

    Args:
        segment: the manifest entry, whose extent `Coverage` has accepted.
        expected: the header that the manifest entry announces.
        pages: the reader's pages for the segment's tokens.

    Raises:
        FrameError: the slot does not hold the announced segment.
        CodecError: the payload is malformed. A checksum mismatch is
            raised later, when the caller takes the result.
    """
    frame = slab.view(slot.slot, segment.length)
    payload = frame[HEADER_BYTES:]
    with slab.aside():
        verify(expected, FrameHeader.unpack(frame))
        header = codec.read_header(payload)
    if header.checksum != segment.checksum:
        raise ForeignSegment("the checksum of the segment differs from that of the manifest")
    decoder = codecs.of(cache.planes, Extent.of(segment))
    return decoder.decode(payload, header, pages, segment.num_tokens)
