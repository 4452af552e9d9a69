"""Constants shared by the kernels and the code that launches them."""

import triton.language as tl

from codec import format as wire

MAX_NIBBLES, MAX_LISTED = tl.constexpr(wire.MAX_NIBBLES), tl.constexpr(wire.MAX_LISTED)
PACK_CHUNKS = tl.constexpr(256)
"""Number of chunks whose entries one program of `pack_kernel` packs."""

SEGMENT, NUMBER, FIRST_PAGE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FIRST_SCRATCH, ENTRY_WORDS = tl.constexpr(3), tl.constexpr(4)
"""First fields of a plane row and of a segment row: word offset of the segment from the base
address; index of the segment in the call; index of its first page id; index of its first chunk with
codes among those of the call; number of words from the start of its entries to its end (decode).
"""
OWN_PLANE_FIELDS, OWN_SEGMENT_FIELDS = tl.constexpr(5), tl.constexpr(7)
"""Number of leading fields that differ between calls, in plane rows and in segment rows."""

PLANE_FIELDS = tl.constexpr(16)
"""Number of int64 fields of a plane row. The first ones are those above."""
ENTRIES, PLANE_START, LOWEST_EXPONENT = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
FIRST_CHUNK, FIRST_CODED_CHUNK = tl.constexpr(8), tl.constexpr(9)
CODES_STREAM, LOW_STREAM, HIGH_STREAM = tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)
TABLES, FULL_PAGES, LAST_RUN = tl.constexpr(13), tl.constexpr(14), tl.constexpr(15)
"""Further fields of a plane row: word offset of the entries in the segment; offset of the plane
from the base address, in elements; lowest exponent of its codebook; index of its first chunk in the
segment, and among the segment's chunks with codes; word offsets of its streams in the segment;
offset of its codebook's tables from the base address, in bytes; number of pages whose slots are all
used; number of elements of a head in the last, partly used page.
"""

LENGTH, PREFIX = tl.constexpr(5), tl.constexpr(6)
SEGMENT_ENTRIES, CODED_CHUNKS = tl.constexpr(7), tl.constexpr(8)
SEGMENT_FIELDS = tl.constexpr(10)
"""Further fields of a segment row: length of the segment in bytes (decode; else 0); number of
64-bit words before the segment to copy to the results (decode); word offset of the entries in the
segment; number of chunks with codes; unused. The fields are followed by the static header, see
`codec.format.pack_static`.
"""

CODE_TABLE, SECOND_TABLE = tl.constexpr(0), tl.constexpr(256)
EXPONENTS, SECOND_EXPONENTS = tl.constexpr(512), tl.constexpr(528)
TABLE_BYTES = tl.constexpr(544)
"""Byte offsets in the tables of a codebook: first- and second-level code of each exponent, `[256]`,
and exponent of each first- and second-level code, `[16]`.
"""

RESULT_LENGTH, RESULT_CHECKSUM, RESULT_THIRD, RESULT_FOURTH = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3),
)  # fmt: skip
RESULT_NANOSECONDS = tl.constexpr(4)
MAX_PREFIX = tl.constexpr(16)
RESULT_PREFIX, RESULT_HEADER = tl.constexpr(5), tl.constexpr(21)
"""Fields of the int64 results of a segment: four numbers (see `pack_kernel` and `verify_kernel`),
time from the start of the call to the end of the segment, up to `MAX_PREFIX` words before the
segment, and its header if that is not the expected one.
"""

NOT_SPECIALIZED = [
    "run_chunks",
    "run_elements",
    "run_columns",
    "header_words",
    "row_words",
    "result_words",
    "sums_of_segment",
    "words",
]
"""Parameters for whose values kernels are not recompiled."""
