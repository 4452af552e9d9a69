"""Triton kernels of wire version 3; `codec.gpu.launch` prepares their arguments and launches them.

A program of an encode or decode kernel is one warp. It processes one chunk of one plane in one
pass. Programs do not synchronize with one another or with the host. Everything that changes
between calls is read from device memory, so a CUDA graph of the launches serves any call that fits
its grid. Programs beyond a segment return at once.

Pages, planes and segments:
    base, base8, base32: base address of all accesses to planes, segments and tables, typed as
        elements, uint8 and int32.
    plane_rows: int64 `[segments * planes, PLANE_FIELDS]`, planes of the same mode of each segment.
    segment_rows, row_words: int64 `[segments, row_words]`. See `parameters.py` for the fields.
    page_ids: int64, page ids of all segments, in token order.

Geometry:
    page_stride, head_stride: strides in elements.
    run_chunks, run_elements, run_columns: number of chunks, elements and columns of a full run (one
        head in one page).
    header_words: number of int32 words of a segment's header.

Working memory:
    chunk_sizes: int32 `[chunks]`, for each chunk with codes: its number of entry words in bits 0
        to 7, and its number of second-level codes in the higher bits.
    scratch8, scratch32: entries before they are packed, int32 `[chunks, SCRATCH_STRIDE]`, as uint8
        and as int32.
    accumulators: int64 `[segments, ACCUMULATORS]`: partial checksums and escape counts, error
        flags. Zero between calls.
    results, result_words: int64 `[segments, result_words]`, see `parameters.py`.

Compile-time configuration:
    ELEMENT_BYTES, MANTISSA_BITS, EXPONENT_MASK, REMAINDER_WIDTHS: the element type.
    CODE_BITS, HAS_ESCAPE_CODE: the mode.
    IS_WINDOW: the codebook's exponents are consecutive.
    ALIGNED: full chunks start at multiples of eight elements, so vector accesses are allowed.
    PAGED: planes have several pages.
    OVERFLOW_WORDS: words of each column of an uncoded chunk that are stored as entries.
    SCRATCH_STRIDE: scratch words per chunk.
    KEYS: keys of the checksum.
    TIMED: the first kernel of a call records its start, the last one its duration; requires a GPU.
    DEPENDENT: launched before the previous kernel ends (programmatic dependent launch, from sm_90
        on). The kernel waits for the previous one before it reads the results of that one.
"""

from codec.gpu.kernels.decode import decode_kernel, raw_decode_kernel
from codec.gpu.kernels.encode import encode_kernel, raw_kernel
from codec.gpu.kernels.pack import fetch_kernel, pack_kernel, sum_kernel
from codec.gpu.kernels.verify import verify_kernel

__all__ = [
    "decode_kernel",
    "encode_kernel",
    "fetch_kernel",
    "pack_kernel",
    "raw_decode_kernel",
    "raw_kernel",
    "sum_kernel",
    "verify_kernel",
]
