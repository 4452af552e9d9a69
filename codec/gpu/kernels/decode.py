# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Decoding: a chunk in one pass, then what has no code is written over; then the verdict."""

import triton
import triton.language as tl

from codec.gpu.kernels.columns import (
    element_at,
    first_word,
    load_stream,
    of_plane,
    page_start,
    place_of,
    store_columns,
)
from codec.gpu.kernels.fields import (
    fours_of,
    joined,
    marked_in,
    words_of,
)
from codec.gpu.kernels.parameters import LENGTHS, MAX_NIBBLES, ROW
from codec.gpu.kernels.words import (
    ERRORS,
    LANES,
    SUMS,
    any_lane,
    digest_of,
    entry_key,
    hashed_column,
    ones,
    ranks,
    seal_of,
    shifted,
    unsigned,
)


@triton.jit
def exponents_of(codes, lowest, book, WINDOW: tl.constexpr):
    """The exponents of 8 registers of four codes."""
    exponents = ()
    for w in tl.static_range(8):
        if WINDOW:
            four = codes[w] + lowest * 0x01010101
        else:
            four = tl.load(book + (codes[w] & 0xFF)).to(tl.int32)
            for b in tl.static_range(1, 4):
                four |= tl.load(book + (shifted(codes[w], 8 * b) & 0xFF)).to(tl.int32) << (8 * b)
        exponents = exponents + (four,)
    return exponents


@triton.jit
def added(exponents, place, difference):
    """Exponents with a difference added to the one at a place, given as the bit of a mask.

    Registers have no index: each asks whether the place is one of its four. If the exponent was
    above 255 for a moment, what it carried into the next one goes back with the difference.
    """
    sums = ()
    for w in tl.static_range(8):
        sums = sums + (exponents[w] + (shifted(place, w) & 0x01010101) * difference,)
    return sums


@triton.jit
def rest_at(
    ye, at, rests8, place, lane, lanes, here,
    SIZE: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The element at this place, without its exponent.

    Of bf16 it is a byte of a stream, which the cache still has; of any other type it is read back
    from where the element was just written.
    """
    if SHIFT == 7:
        byte = (place & 4) * 4 * lanes + lane * 16 + (place & 3) * 4 + (place >> 3)
        rest = tl.load(rests8 + byte, mask=here, other=0).to(tl.int32)
        rest = (rest & 0x7F) | ((rest & 0x80) << 8)
    else:
        target = ye + at + element_at(place, lane, lanes, SIZE)
        rest = tl.load(target, mask=here, other=0).to(tl.int32) & ~(MASK << SHIFT)
    return rest


@triton.jit
def store_element(ye, at, place, lane, lanes, element, here, SIZE: tl.constexpr):
    target = ye + at + element_at(place, lane, lanes, SIZE)
    tl.store(target, element.to(ye.dtype.element_ty), mask=here)


@triton.jit
def nibbles_from(entries, rank, packed, here):
    """The next eight nibbles of each lane, from number ``rank`` on, the lowest first."""
    word = rank >> 3
    low = tl.load(entries + word, mask=here, other=0)
    high = tl.load(entries + word + 1, mask=here & (word + 1 < packed), other=0)
    both = unsigned(low) | (unsigned(high) << 32)
    return (both.to(tl.uint64, bitcast=True) >> (4 * (rank & 7)).to(tl.uint64)).to(tl.int32)


@triton.jit
def places_inside(lane, lanes, length, SIZE: tl.constexpr):
    """The mask of a column's places whose elements a chunk has."""
    inside = tl.zeros_like(lane)
    for place in range(32):
        here = element_at(tl.full((LANES,), place, tl.int32), lane, lanes, SIZE) < length
        inside |= here.to(tl.int32) << place
    return inside


@triton.jit(do_not_specialize=LENGTHS)
def decode_kernel(
    ye, y32, rows, first_start, start_step, codes_at, rests_at, others_at, block_step,
    books, seconds, page_ids, page_stride, head_stride,
    run_chunks, full_pages, run, rest, run_columns, head_columns,
    in8, in32, starts_at, entries_at, entry_words, totals,
    SIZE: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, RESTS: tl.constexpr,
    BITS: tl.constexpr, ESCAPES: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    EVEN: tl.constexpr, PAGED: tl.constexpr, SPILLED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Writes a chunk's elements and adds its part of the checksum to ``totals``.

    Nothing is read outside of the payload or written outside of the chunk, whatever it says.
    """
    i, head, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = rows + ROW * plane
    lane = tl.arange(0, LANES)
    page, start, length, column = place_of(
        i, head, run_chunks, full_pages, run, rest, run_columns, head_columns, PAGED
    )
    chunk = head * tl.num_programs(0) + i
    coded = tl.load(row + 3) + chunk
    lanes = (length + 31) // 32
    begin = unsigned(tl.load(in32 + starts_at + coded))
    units = (unsigned(tl.load(in32 + starts_at + coded + 1)) - begin).to(tl.int32)
    G: tl.constexpr = 1 if BITS == 3 else 4
    p = of_plane(row, 4, plane, codes_at, block_step, EVEN)
    streams = load_stream(in32 + first_word(p, column, BITS, G), lanes, BITS, G)
    R: tl.constexpr = 1 if RESTS[0] == 3 else 4
    p = of_plane(row, 5, plane, rests_at, block_step, EVEN)
    p = in32 + first_word(p, column, RESTS[0], R)
    streams = streams + load_stream(p, lanes, RESTS[0], R)
    if len(RESTS) == 2:
        p = of_plane(row, 6, plane, others_at, block_step, EVEN)
        streams = streams + load_stream(in32 + first_word(p, column, 3, 1), lanes, 3, 1)
    lowest = tl.load(row + 1).to(tl.int32)
    at = of_plane(row, 0, plane, first_start, start_step, EVEN)
    at += page_start(page_ids, page, page_stride, PAGED) + head.to(tl.int64) * head_stride + start
    exponents = exponents_of(fours_of(streams, BITS), lowest, books + plane * 16, WINDOW)
    most = SPILLED * lanes
    wrong = (units < 0) | (units > most) | (begin + units > entry_words)
    listed = tl.where(wrong | (units == most), 0, units)
    entries = in32 + entries_at + begin
    number = tl.load(row + 2) + chunk
    hashed = tl.zeros((LANES,), tl.int64)
    if ESCAPES:
        if listed > 0:
            mask = marked_in(streams, BITS)
            counts = ones(mask)
            rank, n = ranks(counts)
            packed = (n + 7) // 8
            listed = units - packed
            if length < 1024:
                wrong = any_lane((mask & ~places_inside(lane, lanes, length, SIZE)) != 0)
            if (listed < 0) | (n > MAX_NIBBLES) | wrong:
                wrong = True
                listed = 0
            else:
                escape = lowest + ((1 << BITS) - 1)
                if not WINDOW:
                    escape = tl.load(books + plane * 16 + ((1 << BITS) - 1)).to(tl.int32)
                second = tl.load(seconds + plane * 16 + (lane & 15)).to(tl.int32) - escape
                word = tl.load(entries + lane, mask=lane < packed, other=0)
                hashed += unsigned(word) * entry_key(number, lane)
                rounds = tl.max(counts, axis=0)
                for done in range(0, rounds, 8):
                    nibbles = nibbles_from(entries, rank, packed, mask != 0)
                    for _ in range(done, tl.minimum(done + 8, rounds)):
                        place = mask & -mask
                        exponents = added(exponents, place, tl.gather(second, nibbles & 15, 0))
                        nibbles = nibbles >> 4
                        mask ^= place
                    rank += 8
    words = words_of(joined(exponents, streams[BITS : len(streams)], RESTS, SHIFT), SIZE)
    digest = digest_of(streams, KEYS, 0)
    if (units == most) & (wrong == 0):
        spilled = load_stream(entries, lanes, SPILLED, 1)
        digest += digest_of(spilled, KEYS, len(streams))
        words = streams + spilled
    hashed += tl.where(lane < lanes, hashed_column(digest, number, lane, units), 0)
    store_columns(ye, y32, at, words, lanes, length, SIZE, ALIGNED)
    if listed > 0:
        tl.debug_barrier()
        rests8 = in8 + 4 * (tl.load(row + 5) + column * RESTS[0])
        entries += units - listed
        for first in range(0, listed, LANES):
            here = first + lane < listed
            word = tl.load(entries + first + lane, mask=here, other=0)
            hashed += unsigned(word) * entry_key(number, units - listed + first + lane)
            other = (word >> 5) & 31
            place = word & 31
            inside = (other < lanes) & (element_at(place, other, lanes, SIZE) < length)
            inside = inside & ((word & ~(0x3FF | (MASK << 16))) == 0)
            if any_lane(here & (inside == 0)):
                wrong = True
            here = here & inside
            x = rest_at(ye, at, rests8, place, other, lanes, here, SIZE, SHIFT, MASK)
            x |= (word >> 16) << SHIFT
            store_element(ye, at, place, other, lanes, x, here, SIZE)
    if wrong:
        tl.atomic_or(totals + ERRORS, 2, sem="relaxed")
    tl.atomic_add(totals + number % SUMS, tl.sum(hashed, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=LENGTHS)
def raw_decode_kernel(
    ye, y32, rows, first_start, start_step, codes_at, block_step,
    page_ids, page_stride, head_stride,
    run_chunks, full_pages, run, rest, run_columns, head_columns, in32, totals,
    SIZE: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, PAGED: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The same of planes without codes."""
    i, head, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = rows + ROW * plane
    lane = tl.arange(0, LANES)
    page, start, length, column = place_of(
        i, head, run_chunks, full_pages, run, rest, run_columns, head_columns, PAGED
    )
    lanes = (length + 31) // 32
    at = of_plane(row, 0, plane, first_start, start_step, EVEN)
    at += page_start(page_ids, page, page_stride, PAGED) + head.to(tl.int64) * head_stride + start
    p = of_plane(row, 4, plane, codes_at, block_step, EVEN)
    p = in32 + first_word(p, column, 8 * SIZE, 2 * SIZE)
    words = load_stream(p, lanes, 8 * SIZE, 2 * SIZE)
    store_columns(ye, y32, at, words, lanes, length, SIZE, ALIGNED)
    number = tl.load(row + 2) + head * tl.num_programs(0) + i
    hashed = hashed_column(digest_of(words, KEYS, 0), number, lane, 0)
    hashed = tl.where(lane < lanes, hashed, 0)
    tl.atomic_add(totals + number % SUMS, tl.sum(hashed, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=LENGTHS)
def verify_kernel(
    in32, in64, starts_at, chunks, entry_words, payload_bytes, header, header_words, totals, facts,
):  # fmt: skip
    """The checksum, and whether the header is what both sides know of it. One program.

    ``facts`` int64 `[4]`: length, checksum, the checksum announced, errors. ``totals`` is zero
    again at the end. Everything is loaded before anything is added up: a load takes longer than all
    the rest. Without a payload (0 bytes) the checksum alone counts; the segment may be any memory.
    """
    i = tl.arange(0, SUMS)
    sums = tl.load(totals + i)
    errors = tl.load(totals + ERRORS)
    length = tl.load(in64 + 5)
    announced = tl.load(in64 + 6)
    seal = tl.load(in64 + 7)
    crc = tl.load(in32 + 5)
    first = tl.load(in32 + starts_at)
    end = unsigned(tl.load(in32 + starts_at + chunks))
    differing = tl.zeros((256,), tl.int32)
    for word in range(0, header_words, 256):
        j = word + tl.arange(0, 256)
        known = (j < header_words) & ((j < 10) | (j > 15))
        theirs = tl.load(in32 + j, mask=known, other=0)
        differing |= (theirs != tl.load(header + j, mask=known, other=0)).to(tl.int32)
    checksum = tl.sum(sums, axis=0)
    if payload_bytes > 0:
        wrong = (length != payload_bytes) | (seal != seal_of(length, announced, unsigned(crc)))
        if wrong | (tl.max(differing, axis=0) > 0):
            errors |= 1
        if chunks > 0:
            if (first != 0) | ((end + 3) // 4 * 4 != entry_words):
                errors |= 2
    tl.store(facts, length)
    tl.store(facts + 1, checksum)
    tl.store(facts + 2, announced)
    tl.store(facts + 3, errors)
    tl.store(totals + i, tl.zeros((SUMS,), tl.int64))
    tl.store(totals + ERRORS, tl.zeros((), tl.int64))
