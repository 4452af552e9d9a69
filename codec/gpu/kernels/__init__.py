"""Triton kernels of wire version 3; `codec.gpu.plan` prepares their arguments and launches them.

A program of an encode or decode kernel is one warp. It processes one chunk of one plane in one
pass. Programs do not synchronize with one another or with the host.

Pages and planes:
    source, source_words: base address for reading, typed as elements and as int32.
    target_elements, target_words: base address for writing, typed as elements and as int32.
    plane_rows: int64 `[planes, PLANE_FIELDS]`, see `parameters.py`; planes of the same mode.
    page_ids: int64 `[pages]`, in token order.
    page_stride, head_stride: strides in elements.
    run_chunks: number of chunks of a full run (one head in one page).
    full_pages: number of pages of the sequence whose slots are all used.
    run_elements, last_run_elements: number of elements of a full run, and of the last page's run.
    run_columns, head_columns: number of columns of a full run, and of one head in all pages.
    plane_start, plane_step: offsets of evenly spaced planes, in elements.

Segment:
    out32, out64 (in8, in32, in64): the segment as int32, int64 (uint8, int32, int64).
    codes_start, low_start, high_start, block_step: word offsets of the first plane's streams, and
        the distance between the blocks of evenly spaced planes.
    starts_offset, entries_offset: offsets of the table of entry starts and of the entries, in
        words.
    total_entry_words: words from the start of the entries to the end of the segment.

Codebooks, uint8 for each plane:
    code_tables, second_tables: first- and second-level code of each exponent, `[256]`.
    exponent_tables, second_exponents: exponent of each first- and second-level code, `[16]`.

Working memory:
    chunk_sizes: int32 `[chunks]`, for each chunk with codes: its number of entry words in bits 0
        to 7, and its number of second-level codes in the higher bits.
    scratch8, scratch32: entries before they are packed, int32 `[chunks, SCRATCH_STRIDE]`, as uint8
        and as int32.
    accumulators: int64 `[ACCUMULATORS]`: partial checksums and escape counts, error flags. Zero
        between calls.

Compile-time configuration:
    ELEMENT_BYTES, MANTISSA_BITS, EXPONENT_MASK, REMAINDER_WIDTHS: the element type.
    CODE_BITS, HAS_ESCAPE_CODE: the mode.
    IS_WINDOW: the codebook's exponents are consecutive.
    ALIGNED: full chunks start at multiples of eight elements, so vector accesses are allowed.
    EVENLY_SPACED: the offsets of planes and blocks are arithmetic sequences.
    PAGED: planes have several pages.
    OVERFLOW_WORDS: words of each column of an uncoded chunk that are stored as entries.
    SCRATCH_STRIDE: scratch words per chunk.
    KEYS: keys of the checksum.
"""

from codec.gpu.kernels.decode import decode_kernel, raw_decode_kernel
from codec.gpu.kernels.encode import encode_kernel, raw_kernel
from codec.gpu.kernels.pack import pack_kernel, sum_kernel
from codec.gpu.kernels.parameters import MAX_LISTED, MAX_NIBBLES, PACK_CHUNKS, PLANE_FIELDS
from codec.gpu.kernels.verify import verify_kernel
from codec.gpu.kernels.words import ACCUMULATORS

__all__ = [
    "ACCUMULATORS",
    "MAX_LISTED",
    "MAX_NIBBLES",
    "PACK_CHUNKS",
    "PLANE_FIELDS",
    "decode_kernel",
    "encode_kernel",
    "pack_kernel",
    "raw_decode_kernel",
    "raw_kernel",
    "sum_kernel",
    "verify_kernel",
]
