"""What kernels and their launcher agree on."""

import triton.language as tl

from codec import format as wire

MAX_NIBBLES, MAX_SECOND = tl.constexpr(wire.MAX_NIBBLES), tl.constexpr(wire.MAX_SECOND)
ROW = tl.constexpr(8)
"""Of a plane, int64: where it starts, in elements; its lowest exponent; its first chunk's number in
the segment, and among those with codes; where its streams start, in words; unused."""
PACK = tl.constexpr(256)
"""Chunks of a program that packs entries."""
LENGTHS = [
    "first_start",
    "start_step",
    "codes_at",
    "rests_at",
    "others_at",
    "block_step",
    "run_chunks",
    "full_pages",
    "run",
    "rest",
    "run_columns",
    "head_columns",
    "chunks",
    "each",
    "starts_at",
    "entries_at",
    "entry_words",
    "payload_bytes",
    "header_words",
]
"""What changes from prompt to prompt: kernels are not compiled anew for it."""
