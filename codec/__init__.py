"""SplitZip KV codec (arXiv 2605.01708) with a wire format, paged input and output, and checksums.

`encode_pages` losslessly compresses KV pages into one self-describing segment, and `decode_pages`
decodes and verifies it. `encode` and `decode` do the same for a single tensor. See `README.md`.
"""

from codec.backend import (
    DecodeSegment,
    Encoded,
    EncodeSegment,
    PagedCodec,
    Pending,
    PendingDecode,
)
from codec.calibrate import calibrate
from codec.codebook import Codebook, Codebooks
from codec.elements import element_of
from codec.errors import (
    ArgumentError,
    BufferTooSmall,
    ChecksumMismatch,
    CodebookError,
    CodebookMismatch,
    CodebookMissing,
    CodecError,
    FormatError,
    InvalidBuffer,
    InvalidCodebook,
    InvalidPages,
    InvalidPlanes,
    PayloadError,
    ShapeMismatch,
    TruncatedPayload,
    UnsupportedDtype,
)
from codec.format import WIRE_VERSION, Mode
from codec.ops import (
    checksum_pages,
    decode,
    decode_pages,
    encode,
    encode_pages,
    max_payload_bytes,
    max_segment_bytes,
    read_header,
    warm_up,
)
from codec.paged import paged

__all__ = [
    "WIRE_VERSION",
    "ArgumentError",
    "BufferTooSmall",
    "ChecksumMismatch",
    "Codebook",
    "CodebookError",
    "CodebookMismatch",
    "CodebookMissing",
    "Codebooks",
    "CodecError",
    "DecodeSegment",
    "EncodeSegment",
    "Encoded",
    "FormatError",
    "InvalidBuffer",
    "InvalidCodebook",
    "InvalidPages",
    "InvalidPlanes",
    "Mode",
    "PagedCodec",
    "PayloadError",
    "Pending",
    "PendingDecode",
    "ShapeMismatch",
    "TruncatedPayload",
    "UnsupportedDtype",
    "calibrate",
    "checksum_pages",
    "decode",
    "decode_pages",
    "element_of",
    "encode",
    "encode_pages",
    "max_payload_bytes",
    "max_segment_bytes",
    "paged",
    "read_header",
    "warm_up",
]
