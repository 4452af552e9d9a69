"""Triton kernels of wire version 3. `codec.gpu.backend` prepares their arguments and launches them.

A program of an encode or a decode is one warp with one chunk of one plane, in one pass over its
bytes. Programs do not wait for one another, and the host waits for none. Arguments that recur:

    xe, x32 (ye, y32): the first plane's memory, as elements and as int32.
    rows: int64 `[planes, ROW]`, see `parameters.py`; of the planes of one mode.
    tables, seconds, books: u8 of each plane: codes and second-level codes of exponents `[256]` when
        encoding, exponents of codes and of second-level codes `[16]` when decoding.
    page_ids: int64, of the pages in token order. page_stride, head_stride: in elements.
    run_chunks … head_columns: of `format.Geometry`: chunks of a run; full pages of a head; elements
        of a full run and of the last; columns of a full run and of a head.
    out32, out64 (in8, in32, in64): the segment.
    starts_at, entries_at: the table of starts and the entries, in words from the segment's start.
    first_start, start_step, codes_at, rests_at, others_at, block_step: if EVEN, where the first
        plane and its streams start, and how far apart planes and blocks lie; else rows say it.
    sizes: int32, of each chunk with codes: how many entries it has, nibbles among them << 8.
    scratch: STRIDE words of each chunk with codes: what it will have as entries.
    totals: int64 `[TOTALS]`: the checksum's parts, counts of escapes, errors. Zero between calls.
"""

from codec.gpu.kernels.decode import decode_kernel, raw_decode_kernel, verify_kernel
from codec.gpu.kernels.encode import encode_kernel, raw_kernel
from codec.gpu.kernels.pack import pack_kernel, sum_kernel
from codec.gpu.kernels.parameters import MAX_NIBBLES, MAX_SECOND, PACK, ROW
from codec.gpu.kernels.words import TOTALS

__all__ = [
    "MAX_NIBBLES",
    "MAX_SECOND",
    "PACK",
    "ROW",
    "TOTALS",
    "decode_kernel",
    "encode_kernel",
    "pack_kernel",
    "raw_decode_kernel",
    "raw_kernel",
    "sum_kernel",
    "verify_kernel",
]
