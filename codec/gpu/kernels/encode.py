# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Encoding: the streams of a chunk and, to a place of its own, its entries."""

import triton
import triton.language as tl

from codec.gpu.kernels.columns import (
    element_at,
    first_word,
    load_columns,
    of_plane,
    page_start,
    place_of,
    store_stream,
)
from codec.gpu.kernels.fields import (
    codes_of,
    distances,
    escapes_of,
    halves_of,
    marked_in,
    pack,
    rests_of,
    union_of,
)
from codec.gpu.kernels.parameters import LENGTHS, MAX_NIBBLES, MAX_SECOND, ROW
from codec.gpu.kernels.words import ESCAPES as ESCAPE_COUNTS
from codec.gpu.kernels.words import (
    LANES,
    SUMS,
    any_lane,
    digest_of,
    entry_key,
    hashed_column,
    lowest_one,
    ones,
    ranks,
    unsigned,
)


@triton.jit
def exponent_at(
    xe, at, mask, lane, lanes, SIZE: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """Of the first element of each lane's mask: whether there is one, its place, its exponent."""
    here = mask != 0
    place = lowest_one(mask)
    e = tl.load(xe + at + element_at(place, lane, lanes, SIZE), mask=here, other=0).to(tl.int32)
    return here, place, (e >> SHIFT) & MASK


@triton.jit
def zero_to_multiple(p, words):
    """Zeros behind so many words, up to a multiple of four."""
    i = tl.arange(0, 4)
    tl.store(p + words + i, tl.zeros((4,), tl.int32), mask=i < (4 - words % 4) % 4)


@triton.jit(do_not_specialize=LENGTHS)
def encode_kernel(
    xe, x32, rows, first_start, start_step, tables, seconds, page_ids, page_stride, head_stride,
    run_chunks, full_pages, run, rest, run_columns, head_columns,
    out32, sizes, scratch8, scratch32, totals,
    SIZE: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, RESTS: tl.constexpr,
    BITS: tl.constexpr, ESCAPES: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    EVEN: tl.constexpr, PAGED: tl.constexpr, SPILLED: tl.constexpr, STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Writes a chunk's streams; its entries to ``scratch``, how many to ``sizes``.

    A chunk in full is written as one. Its part of the checksum, and its escapes, go to ``totals``.
    """
    i, head, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = rows + ROW * plane
    lane = tl.arange(0, LANES)
    page, start, length, column = place_of(
        i, head, run_chunks, full_pages, run, rest, run_columns, head_columns, PAGED
    )
    lowest = tl.load(row + 1).to(tl.int32)
    lanes = (length + 31) // 32
    at = of_plane(row, 0, plane, first_start, start_step, EVEN)
    at += page_start(page_ids, page, page_stride, PAGED) + head.to(tl.int64) * head_stride + start
    words = load_columns(xe, x32, at, lanes, length, lowest << SHIFT, SIZE, ALIGNED)
    halves = halves_of(words, SIZE)
    chunk = head * tl.num_programs(0) + i
    coded = tl.load(row + 3) + chunk
    CODES: tl.constexpr = (1 << BITS) - ESCAPES
    found = distances(halves, lowest, tables + plane * 256, SHIFT, MASK, WINDOW)
    codes = codes_of(found, CODES, ESCAPES)
    some = any_lane((union_of(found) & 0x01F001F0) != 0) if not ESCAPES else True
    code_words = pack(codes, BITS)
    streams = code_words + rests_of(halves, RESTS, SHIFT)
    number = tl.load(row + 2) + chunk
    size = 0
    hashed = tl.zeros((LANES,), tl.int64)
    digest = digest_of(streams, KEYS, 0)
    if some:
        mask = marked_in(code_words, BITS) if ESCAPES else escapes_of(found, CODES)
        counts = ones(mask)
        rank, n = ranks(counts)
        rounds = tl.max(counts, axis=0)
        most = SPILLED * lanes
        slot = coded * STRIDE
        units = n
        nibbles = 0
        full = n >= most
        if ESCAPES:
            nibbles = n
            units = (n + 7) // 8
            full = (n > MAX_NIBBLES) | (units >= most)
            if not full:
                second = seconds + plane * 256
                others = tl.zeros((LANES,), tl.int32)
                for _ in range(rounds):
                    here, _, e = exponent_at(xe, at, mask, lane, lanes, SIZE, SHIFT, MASK)
                    code = tl.load(second + e, mask=here, other=0)
                    tl.store(scratch8 + 4 * slot + rank, code, mask=here)
                    others |= tl.where(code == 15, mask & -mask, 0)
                    word = unsigned(code.to(tl.int32) << (4 * (rank & 7)))
                    hashed += word * entry_key(number, rank >> 3)
                    rank += 1
                    mask &= mask - 1
                rounds = 0
                if any_lane(others != 0):
                    mask = others
                    slot += MAX_NIBBLES // 4
                    counts = ones(mask)
                    rank, m = ranks(counts)
                    rounds = tl.max(counts, axis=0)
                    units += m
                    full = (m > MAX_SECOND) | (units >= most)
        if full:
            units = most
            nibbles = 0
            S: tl.constexpr = len(streams)
            streams = words[0:S]
            digest = digest_of(words, KEYS, 0)
            hashed = tl.zeros((LANES,), tl.int64)
            tl.debug_barrier()  # other lanes may have written nibbles there
            for w in tl.static_range(SPILLED):
                p = scratch32 + coded * STRIDE + w * lanes + lane
                tl.store(p, words[S + w], mask=lane < lanes)
        else:
            for _ in range(rounds):
                here, place, e = exponent_at(xe, at, mask, lane, lanes, SIZE, SHIFT, MASK)
                word = (lane << 5) | place | (e << 16)
                tl.store(scratch32 + slot + rank, word, mask=here)
                key = entry_key(number, (nibbles + 7) // 8 + rank)
                hashed += tl.where(here, word.to(tl.int64) * key, 0)
                rank += 1
                mask &= mask - 1
        size = units | (nibbles << 8)
        tl.atomic_add(totals + ESCAPE_COUNTS + number % SUMS, n.to(tl.int64), sem="relaxed")
    tl.store(sizes + coded, size)
    last = chunk == tl.num_programs(0) * tl.num_programs(1) - 1
    p = tl.load(row + 4)
    G: tl.constexpr = 1 if BITS == 3 else 4
    store_stream(out32 + first_word(p, column, BITS, G), lanes, streams[0:BITS], G)
    if BITS == 3:
        if last:
            zero_to_multiple(out32 + p, (column + lanes) * 3)
    FIRST: tl.constexpr = BITS + RESTS[0]
    R: tl.constexpr = 1 if RESTS[0] == 3 else 4
    p = tl.load(row + 5)
    store_stream(out32 + first_word(p, column, RESTS[0], R), lanes, streams[BITS:FIRST], R)
    if RESTS[0] == 3:
        if last:
            zero_to_multiple(out32 + p, (column + lanes) * 3)
    if len(RESTS) == 2:
        p = tl.load(row + 6)
        store_stream(out32 + first_word(p, column, 3, 1), lanes, streams[FIRST : FIRST + 3], 1)
        if last:
            zero_to_multiple(out32 + p, (column + lanes) * 3)
    hashed += tl.where(lane < lanes, hashed_column(digest, number, lane, size & 0xFF), 0)
    tl.atomic_add(totals + number % SUMS, tl.sum(hashed, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=LENGTHS)
def raw_kernel(
    xe, x32, rows, first_start, start_step, page_ids, page_stride, head_stride,
    run_chunks, full_pages, run, rest, run_columns, head_columns, out32, totals,
    SIZE: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, PAGED: tl.constexpr,
    STORE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The same of chunks of planes without codes; without STORE their checksum alone."""
    i, head, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = rows + ROW * plane
    lane = tl.arange(0, LANES)
    page, start, length, column = place_of(
        i, head, run_chunks, full_pages, run, rest, run_columns, head_columns, PAGED
    )
    lanes = (length + 31) // 32
    at = of_plane(row, 0, plane, first_start, start_step, EVEN)
    at += page_start(page_ids, page, page_stride, PAGED) + head.to(tl.int64) * head_stride + start
    words = load_columns(xe, x32, at, lanes, length, 0, SIZE, ALIGNED)
    if STORE:
        p = out32 + first_word(tl.load(row + 4), column, 8 * SIZE, 2 * SIZE)
        store_stream(p, lanes, words, 2 * SIZE)
    number = tl.load(row + 2) + head * tl.num_programs(0) + i
    hashed = hashed_column(digest_of(words, KEYS, 0), number, lane, 0)
    hashed = tl.where(lane < lanes, hashed, 0)
    tl.atomic_add(totals + number % SUMS, tl.sum(hashed, axis=0), sem="relaxed")
