# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Kernels that run before and after those of the chunks: fetch descriptors, and pack entries."""

import triton
import triton.language as tl

from codec.gpu.kernels.parameters import (
    CODED_CHUNKS,
    FIRST_SCRATCH,
    MAX_NIBBLES,
    NOT_SPECIALIZED,
    PACK_CHUNKS,
    RESULT_CHECKSUM,
    RESULT_FOURTH,
    RESULT_LENGTH,
    RESULT_NANOSECONDS,
    RESULT_THIRD,
    SEGMENT,
    SEGMENT_ENTRIES,
    SEGMENT_FIELDS,
)
from codec.gpu.kernels.words import (
    ACCUMULATORS,
    ESCAPE_COUNTS,
    NUM_SUMS,
    START,
    nanoseconds_since,
    seal_of,
    shift_right,
    unsigned,
)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def fetch_kernel(host, device, words):
    """Copy `words` int64 words from pinned host memory to device memory."""
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(device + i, tl.load(host + i, mask=i < words, other=0), mask=i < words)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def sum_kernel(
    chunk_sizes, segment_rows, row_words, sums, sums_of_segment, DEPENDENT: tl.constexpr
):
    """Write to `sums` the total entry words of the PACK_CHUNKS chunks of a `pack_kernel` program.

    Grid: as for `pack_kernel`.
    """
    row = segment_rows + tl.program_id(1) * row_words
    chunk = tl.program_id(0) * PACK_CHUNKS + tl.arange(0, PACK_CHUNKS)
    here = chunk < tl.load(row + CODED_CHUNKS)
    first = tl.load(row + FIRST_SCRATCH)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    size = tl.load(chunk_sizes + first + chunk, mask=here, other=0)
    at = sums + tl.program_id(1) * sums_of_segment + tl.program_id(0)
    tl.store(at, tl.sum(size & 0xFF, axis=0))


@triton.jit
def sum_of_first(partials, count, keep):
    """Return the sum of `partials[i] & keep` over i from 0 to `count` - 1."""
    total = tl.zeros((8192,), tl.int32)
    for first in range(0, count, 8192):
        i = first + tl.arange(0, 8192)
        total += tl.load(partials + i, mask=i < count, other=0) & keep
    return tl.sum(total.to(tl.int64), axis=0)


@triton.jit
def move_entries(
    scratch32, chunk, entry_words, nibbles, at, first, entries,
    SCRATCH_STRIDE: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Copy the entry words `first` to `first` + W - 1 of each chunk to their final positions.

    In scratch memory, second-level codes are bytes and precede the listed words. They are packed
    here, eight to a word.

    Args:
        chunk: index of each chunk in `scratch32`.
        entry_words, nibbles: number of entry words and of second-level codes of each chunk.
        at: index in `entries` of each chunk's first entry word.
        entries: pointer to the segment's entries, int32.
    """
    j = first + tl.arange(0, W)[None, :]
    here = j < entry_words[:, None]
    scratch_start = scratch32 + chunk.to(tl.int64)[:, None] * SCRATCH_STRIDE
    packed = ((nibbles + 7) // 8)[:, None]
    listed_mask = tl.where(packed > 0, MAX_NIBBLES // 4 - packed, 0)
    word = tl.load(scratch_start + listed_mask + j, mask=here & (j >= packed), other=0)
    if tl.max(nibbles, axis=0) > 0:
        a = tl.load(scratch_start + 2 * j, mask=j < packed, other=0)
        b = tl.load(scratch_start + 2 * j + 1, mask=j < packed, other=0)
        a = (a | shift_right(a, 4)) & 0x00FF00FF
        b = (b | shift_right(b, 4)) & 0x00FF00FF
        both = ((a | shift_right(a, 8)) & 0xFFFF) | ((b | shift_right(b, 8)) << 16)
        left = nibbles[:, None] - 8 * j
        used = (1 << (4 * tl.minimum(tl.maximum(left, 0), 7))) - 1
        word |= tl.where(j < packed, both & tl.where(left < 8, used, -1), 0)
    tl.store(entries + at[:, None] + j, word, mask=here)


@triton.jit
def write_header_end(segment32, header_words, entries_offset, chunks, entry_words, checksum, crc):
    """Write the last entry start, padding, and the header fields that depend on the data.

    Returns the length of the segment in bytes.
    """
    four = tl.arange(0, 4)
    zeros = tl.zeros((4,), tl.int32)
    if chunks > 0:
        p = segment32 + header_words + chunks
        tl.store(p, entry_words.to(tl.int32))
        tl.store(p + 1 + four, zeros, mask=four < 3 - chunks % 4)
    end = entries_offset + entry_words
    tl.store(segment32 + end + four, zeros, mask=four < (4 - end % 4) % 4)
    length = (end + 3) // 4 * 16
    out64 = segment32.to(tl.pointer_type(tl.int64))
    tl.store(out64 + 5, length)
    tl.store(out64 + 6, checksum)
    tl.store(out64 + 7, seal_of(length, checksum, unsigned(crc)))
    return length


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def pack_kernel(
    base32, segment_rows, row_words, header_words, chunk_sizes, partials, sums_of_segment,
    scratch32, accumulators, results, result_words,
    SUMMED: tl.constexpr, SCRATCH_STRIDE: tl.constexpr, TIMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Pack the entries of PACK_CHUNKS chunks; the last program of a segment completes the segment.

    Descriptors are read before the wait for the previous kernel, and all loads are issued before
    the first reduction, to overlap their latency. The results are: length in bytes, checksum,
    escapes, entry words.

    Grid: `[largest number of chunks with codes / PACK_CHUNKS, segments]`. See
    `kernels/__init__.py` for the other parameters.

    Args:
        partials: `chunk_sizes`, or the sums of `sum_kernel` if SUMMED.
        sums_of_segment: number of sums of a segment.
    """
    g, number = tl.program_id(0), tl.program_id(1)
    row = segment_rows + number * row_words
    chunks = tl.load(row + CODED_CHUNKS)
    last_program = tl.maximum((chunks + PACK_CHUNKS - 1) // PACK_CHUNKS, 1) - 1
    header = (row + SEGMENT_FIELDS).to(tl.pointer_type(tl.int32))
    if (tl.load(header) == 0) | (g > last_program):  # the header of an unused row is zero
        return
    last = g == last_program
    first = tl.load(row + FIRST_SCRATCH)
    segment32 = base32 + tl.load(row + SEGMENT)
    entries_offset = tl.load(row + SEGMENT_ENTRIES)
    crc = tl.load(header + 5)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    start = tl.load(accumulators + START)
    accumulators += number * ACCUMULATORS
    results += number * result_words
    chunk = g * PACK_CHUNKS + tl.arange(0, PACK_CHUNKS)
    i = tl.arange(0, NUM_SUMS)
    size = tl.load(chunk_sizes + first + chunk, mask=chunk < chunks, other=0)
    own = i < tl.where(last, NUM_SUMS, 0)
    sums = tl.load(accumulators + i, mask=own, other=0)
    escapes = tl.load(accumulators + ESCAPE_COUNTS + i, mask=own, other=0)
    if SUMMED:
        before = sum_of_first(partials + number * sums_of_segment, g, -1)
    else:
        before = sum_of_first(partials + first, g * PACK_CHUNKS, 0xFF)
    entry_words = size & 0xFF
    nibbles = size >> 8
    upto = tl.cumsum(entry_words, axis=0)
    at = before + (upto - entry_words)
    max_entry_words = tl.max(entry_words, axis=0)
    tl.store(segment32 + header_words + chunk, at.to(tl.int32), mask=chunk < chunks)
    entries = segment32 + entries_offset
    if last:
        total_words = before + tl.max(upto, axis=0)
        checksum = tl.sum(sums, axis=0)
        length = write_header_end(
            segment32, header_words, entries_offset, chunks, total_words, checksum, crc
        )
        tl.store(results + RESULT_LENGTH, length)
        tl.store(results + RESULT_CHECKSUM, checksum)
        tl.store(results + RESULT_THIRD, tl.sum(escapes, axis=0))
        tl.store(results + RESULT_FOURTH, total_words)
        tl.store(results + RESULT_NANOSECONDS, nanoseconds_since(start, TIMED))
        tl.store(accumulators + i, tl.zeros((NUM_SUMS,), tl.int64))
        tl.store(accumulators + ESCAPE_COUNTS + i, tl.zeros((NUM_SUMS,), tl.int64))
    if g == 0:
        for word in range(0, header_words, 256):
            j = word + tl.arange(0, 256)
            here = (j < header_words) & ((j < 10) | (j > 15))
            tl.store(segment32 + j, tl.load(header + j, mask=here, other=0), mask=here)
    if max_entry_words > 0:
        scratch32 += first * SCRATCH_STRIDE
        if max_entry_words <= 4:
            move_entries(scratch32, chunk, entry_words, nibbles, at, 0, entries, SCRATCH_STRIDE, 4)
        else:
            for j in range(0, max_entry_words, 8):
                move_entries(
                    scratch32, chunk, entry_words, nibbles, at, j, entries, SCRATCH_STRIDE, 8
                )
