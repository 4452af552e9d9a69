# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Last step of encoding: pack the entries, write their starts and complete the header."""

import triton
import triton.language as tl

from codec.gpu.kernels.parameters import MAX_NIBBLES, NOT_SPECIALIZED, PACK_CHUNKS
from codec.gpu.kernels.words import ESCAPE_COUNTS, NUM_SUMS, seal_of, shift_right, unsigned


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def sum_kernel(chunk_sizes, sums, chunks):
    """Write the total entry words of the PACK_CHUNKS chunks of a `pack_kernel` program."""
    chunk = tl.program_id(0) * PACK_CHUNKS + tl.arange(0, PACK_CHUNKS)
    entry_words = tl.load(chunk_sizes + chunk, mask=chunk < chunks, other=0) & 0xFF
    tl.store(sums + tl.program_id(0), tl.sum(entry_words, axis=0))


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
def write_header_end(
    out32, out64, starts_offset, entries_offset, chunks, entry_words, checksum, crc, results
):
    """Write the last entry start, padding, and the header fields that depend on the data."""
    four = tl.arange(0, 4)
    zeros = tl.zeros((4,), tl.int32)
    if chunks > 0:
        p = out32 + starts_offset + chunks
        tl.store(p, entry_words.to(tl.int32))
        tl.store(p + 1 + four, zeros, mask=four < 3 - chunks % 4)
    end = entries_offset.to(tl.int64) + entry_words
    tl.store(out32 + end + four, zeros, mask=four < (4 - end % 4) % 4)
    length = (end + 3) // 4 * 16
    tl.store(out64 + 5, length)
    tl.store(out64 + 6, checksum)
    tl.store(out64 + 7, seal_of(length, checksum, unsigned(crc)))
    tl.store(results, length)
    tl.store(results + 1, checksum)
    tl.store(results + 3, entry_words)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def pack_kernel(
    chunk_sizes, partials, each, keep, scratch32, out32, out64, starts_offset, entries_offset,
    chunks, header, header_words, accumulators, results, SCRATCH_STRIDE: tl.constexpr,
):  # fmt: skip
    """Pack the entries of PACK_CHUNKS chunks; the last program completes the segment.

    All loads are issued before the first reduction, as in `verify_kernel`, to overlap their
    latency.

    Args:
        chunk_sizes: int32 `[chunks]`; see `kernels/__init__.py`.
        partials: int32; `partials[i] & keep` is the number of entry words of `each` consecutive
            chunks. It is `chunk_sizes` itself or the output of `sum_kernel`.
        each, keep: see `partials`.
        scratch32: int32 `[chunks, SCRATCH_STRIDE]`, unpacked entries.
        out32, out64: the segment.
        starts_offset, entries_offset: offsets of the entry starts and of the entries, in words.
        chunks: number of chunks with codes.
        header, header_words: int32 header from `pack_static`, and its length.
        accumulators: int64 `[ACCUMULATORS]`; zeroed at the end.
        results: int64 `[4]` output: length in bytes, checksum, escapes, entry words.
    """
    g = tl.program_id(0)
    last = g == tl.num_programs(0) - 1
    chunk = g * PACK_CHUNKS + tl.arange(0, PACK_CHUNKS)
    i = tl.arange(0, NUM_SUMS)
    size = tl.load(chunk_sizes + chunk, mask=chunk < chunks, other=0)
    own = i < tl.where(last, NUM_SUMS, 0)
    sums = tl.load(accumulators + i, mask=own, other=0)
    escapes = tl.load(accumulators + ESCAPE_COUNTS + i, mask=own, other=0)
    crc = tl.load(header + 5)
    before = sum_of_first(partials, g * (PACK_CHUNKS // each), keep)
    entry_words = size & 0xFF
    nibbles = size >> 8
    upto = tl.cumsum(entry_words, axis=0)
    at = before + (upto - entry_words)
    max_entry_words = tl.max(entry_words, axis=0)
    tl.store(out32 + starts_offset + chunk, at.to(tl.int32), mask=chunk < chunks)
    entries = out32 + entries_offset
    if last:
        total_words = before + tl.max(upto, axis=0)
        checksum = tl.sum(sums, axis=0)
        write_header_end(
            out32, out64, starts_offset, entries_offset, chunks, total_words, checksum, crc, results
        )
        tl.store(results + 2, tl.sum(escapes, axis=0))
        tl.store(accumulators + i, tl.zeros((NUM_SUMS,), tl.int64))
        tl.store(accumulators + ESCAPE_COUNTS + i, tl.zeros((NUM_SUMS,), tl.int64))
    if g == 0:
        for word in range(0, header_words, 256):
            j = word + tl.arange(0, 256)
            here = (j < header_words) & ((j < 10) | (j > 15))
            tl.store(out32 + j, tl.load(header + j, mask=here, other=0), mask=here)
    if max_entry_words > 0:
        if max_entry_words <= 4:
            move_entries(scratch32, chunk, entry_words, nibbles, at, 0, entries, SCRATCH_STRIDE, 4)
        else:
            for first in range(0, max_entry_words, 8):
                move_entries(
                    scratch32, chunk, entry_words, nibbles, at, first, entries, SCRATCH_STRIDE, 8
                )
