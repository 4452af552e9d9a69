"""Headrace's codec: SplitZip (arXiv 2605.01708) with a wire format, pages and checksums.

`encode_pages` turns KV pages into one self-describing, lossless segment, `decode_pages` turns it
back into other pages, verified; `encode` and `decode` do the same for a tensor. See `README.md`.
"""

from codec.calibrate import calibrate, calibrate_model
from codec.codebook import Codebook, Codebooks
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
    TruncatedPayload,
    UnsupportedDtype,
)
from codec.format import WIRE_VERSION, Mode, max_payload_bytes, max_segment_bytes
from codec.ops import (
    Decoded,
    Encoded,
    checksum_pages,
    decode,
    decode_pages,
    encode,
    encode_pages,
    read_header,
    warm_up,
)
from codec.paged import PagedCodec, Pending, paged

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
    "Decoded",
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
    "TruncatedPayload",
    "UnsupportedDtype",
    "calibrate",
    "calibrate_model",
    "checksum_pages",
    "decode",
    "decode_pages",
    "encode",
    "encode_pages",
    "max_payload_bytes",
    "max_segment_bytes",
    "paged",
    "read_header",
    "warm_up",
]
