"""Constants shared by the kernels and the code that launches them."""

import triton.language as tl

from codec import format as wire

MAX_NIBBLES, MAX_LISTED = tl.constexpr(wire.MAX_NIBBLES), tl.constexpr(wire.MAX_LISTED)
PLANE_FIELDS = tl.constexpr(8)
"""Number of int64 fields of a plane in `plane_rows`. They are: offset of its first element from the
base address, in elements; lowest exponent of its codebook; index of its first chunk in the segment;
index of its first chunk among the chunks with codes; word offsets of up to three streams; unused.
"""
PLANE_START, LOWEST_EXPONENT = tl.constexpr(0), tl.constexpr(1)
FIRST_CHUNK, FIRST_CODED_CHUNK = tl.constexpr(2), tl.constexpr(3)
CODES_STREAM, LOW_STREAM, HIGH_STREAM = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
"""Indices of the fields of a row of `plane_rows`."""
PACK_CHUNKS = tl.constexpr(256)
"""Number of chunks whose entries one program of `pack_kernel` packs."""
NOT_SPECIALIZED = [
    "plane_start",
    "plane_step",
    "codes_start",
    "low_start",
    "high_start",
    "block_step",
    "run_chunks",
    "full_pages",
    "run_elements",
    "last_run_elements",
    "run_columns",
    "head_columns",
    "chunks",
    "each",
    "starts_offset",
    "entries_offset",
    "total_entry_words",
    "payload_bytes",
    "header_words",
]
"""Parameters that change with the prompt length; kernels are not recompiled for their values."""
