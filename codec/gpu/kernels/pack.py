# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""After encoding: entries moved next to one another, their starts, and the header."""

import triton
import triton.language as tl

from codec.gpu.kernels.parameters import LENGTHS, MAX_NIBBLES, PACK
from codec.gpu.kernels.words import ESCAPES, SUMS, seal_of, shifted, unsigned


@triton.jit(do_not_specialize=LENGTHS)
def sum_kernel(sizes, sums, chunks):
    """Units of the chunks of each program of `pack_kernel`."""
    chunk = tl.program_id(0) * PACK + tl.arange(0, PACK)
    units = tl.load(sizes + chunk, mask=chunk < chunks, other=0) & 0xFF
    tl.store(sums + tl.program_id(0), tl.sum(units, axis=0))


@triton.jit
def units_before(partials, count, keep):
    """The sum of the first ``count`` numbers, of their bits in ``keep``."""
    total = tl.zeros((8192,), tl.int32)
    for first in range(0, count, 8192):
        i = first + tl.arange(0, 8192)
        total += tl.load(partials + i, mask=i < count, other=0) & keep
    return tl.sum(total.to(tl.int64), axis=0)


@triton.jit
def move(
    scratch32, chunk, units, nibbles, at, first, entries, STRIDE: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Moves W words of each chunk, from its ``first`` on. Nibbles come as bytes, and first."""
    j = first + tl.arange(0, W)[None, :]
    here = j < units[:, None]
    slot = scratch32 + chunk.to(tl.int64)[:, None] * STRIDE
    packed = ((nibbles + 7) // 8)[:, None]
    others = tl.where(packed > 0, MAX_NIBBLES // 4 - packed, 0)
    word = tl.load(slot + others + j, mask=here & (j >= packed), other=0)
    if tl.max(nibbles, axis=0) > 0:
        a = tl.load(slot + 2 * j, mask=j < packed, other=0)
        b = tl.load(slot + 2 * j + 1, mask=j < packed, other=0)
        a = (a | shifted(a, 4)) & 0x00FF00FF
        b = (b | shifted(b, 4)) & 0x00FF00FF
        both = ((a | shifted(a, 8)) & 0xFFFF) | ((b | shifted(b, 8)) << 16)
        left = nibbles[:, None] - 8 * j
        used = (1 << (4 * tl.minimum(tl.maximum(left, 0), 7))) - 1
        word |= tl.where(j < packed, both & tl.where(left < 8, used, -1), 0)
    tl.store(entries + at[:, None] + j, word, mask=here)


@triton.jit
def finish(out32, out64, starts_at, entries_at, chunks, units, checksum, crc, facts):
    """The last start, zeros behind it and behind the entries, and the header's end."""
    four = tl.arange(0, 4)
    zeros = tl.zeros((4,), tl.int32)
    if chunks > 0:
        p = out32 + starts_at + chunks
        tl.store(p, units.to(tl.int32))
        tl.store(p + 1 + four, zeros, mask=four < 3 - chunks % 4)
    end = entries_at.to(tl.int64) + units
    tl.store(out32 + end + four, zeros, mask=four < (4 - end % 4) % 4)
    length = (end + 3) // 4 * 16
    tl.store(out64 + 5, length)
    tl.store(out64 + 6, checksum)
    tl.store(out64 + 7, seal_of(length, checksum, unsigned(crc)))
    tl.store(facts, length)
    tl.store(facts + 1, checksum)
    tl.store(facts + 3, units)


@triton.jit(do_not_specialize=LENGTHS)
def pack_kernel(
    sizes, partials, each, keep, scratch32, out32, out64, starts_at, entries_at, chunks,
    header, header_words, totals, facts, STRIDE: tl.constexpr,
):  # fmt: skip
    """Packs the entries of PACK chunks; the last program finishes the segment.

    ``partials``: units of ``each`` chunks. ``facts`` int64 `[4]`: length, checksum, escapes, units
    of all entries. ``totals`` is zero again at the end. Everything is loaded before anything is
    added up, as in `verify_kernel`.
    """
    g = tl.program_id(0)
    last = g == tl.num_programs(0) - 1
    chunk = g * PACK + tl.arange(0, PACK)
    i = tl.arange(0, SUMS)
    size = tl.load(sizes + chunk, mask=chunk < chunks, other=0)
    own = i < tl.where(last, SUMS, 0)
    sums = tl.load(totals + i, mask=own, other=0)
    escapes = tl.load(totals + ESCAPES + i, mask=own, other=0)
    crc = tl.load(header + 5)
    before = units_before(partials, g * (PACK // each), keep)
    units = size & 0xFF
    nibbles = size >> 8
    upto = tl.cumsum(units, axis=0)
    at = before + (upto - units)
    most = tl.max(units, axis=0)
    tl.store(out32 + starts_at + chunk, at.to(tl.int32), mask=chunk < chunks)
    entries = out32 + entries_at
    if last:
        all_units = before + tl.max(upto, axis=0)
        checksum = tl.sum(sums, axis=0)
        finish(out32, out64, starts_at, entries_at, chunks, all_units, checksum, crc, facts)
        tl.store(facts + 2, tl.sum(escapes, axis=0))
        tl.store(totals + i, tl.zeros((SUMS,), tl.int64))
        tl.store(totals + ESCAPES + i, tl.zeros((SUMS,), tl.int64))
    if g == 0:
        for word in range(0, header_words, 256):
            j = word + tl.arange(0, 256)
            here = (j < header_words) & ((j < 10) | (j > 15))
            tl.store(out32 + j, tl.load(header + j, mask=here, other=0), mask=here)
    if most > 0:
        if most <= 4:
            move(scratch32, chunk, units, nibbles, at, 0, entries, STRIDE, 4)
        else:
            for first in range(0, most, 8):
                move(scratch32, chunk, units, nibbles, at, first, entries, STRIDE, 8)
