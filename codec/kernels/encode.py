# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Encoding: `encode_kernel` in one pass, then `seal_kernel` for tails and the header."""

import triton
import triton.language as tl

from codec.kernels.checksum import (
    ESCAPES,
    chunk_sum,
    finished,
    full_tag,
    mix64,
    nh,
    seal_of,
    slot_kinds,
    terms,
)
from codec.kernels.words import (
    FULL,
    GROUP,
    LENGTHS,
    LIST,
    block_start,
    both,
    coded,
    load_words,
    nibbles,
    pack_codes,
    pack_signs,
    place_in_head,
    place_of,
    shifted,
    unsigned,
    word_numbers,
)


@triton.jit
def list_escapes(
    x16, x64, at, length, low, table, out8, entries, WINDOW: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Reads a chunk again and lists its escapes from byte ``entries`` on.

    Row by row, so that what few chunks need takes no registers from all of them. Returns the sum of
    the entries' hashes.
    """
    column = tl.arange(0, 32)[:, None] * 2 + tl.arange(0, 2)[None, :]
    listed = 0
    total = tl.zeros((), tl.int64)
    for row in range(4):
        w = row * 64 + column
        x = load_words(x16, x64, at, w, length, ALIGNED)
        lo = x.to(tl.int32)
        hi = (x >> 32).to(tl.int32)
        _, _, f0, f1 = coded(lo, hi, low, table, w, length, WINDOW)
        n = f0 + f1
        mine = tl.reshape((n & 0xFFFF) + (n >> 16), [64])
        rank = listed + tl.reshape(tl.cumsum(mine, axis=0) - mine, [32, 2])
        listed += tl.sum(mine, axis=0)
        for e in tl.static_range(4):
            flag = ((f0 if e < 2 else f1) >> (16 * (e % 2))) & 1
            exponent = shifted(lo if e < 2 else hi, 7 + 16 * (e % 2)) & 0xFF
            position = 4 * w + e
            entry = out8 + entries + 3 * rank
            tl.store(entry, (position & 0xFF).to(tl.uint8), mask=flag > 0)
            tl.store(entry + 1, (position >> 8).to(tl.uint8), mask=flag > 0)
            tl.store(entry + 2, exponent.to(tl.uint8), mask=flag > 0)
            hashed = mix64((rank.to(tl.int64) << 24) | ((exponent << 16) | position).to(tl.int64))
            total += tl.sum(tl.sum(tl.where(flag > 0, hashed, 0), axis=1), axis=0)
            rank += flag
    return total


@triton.jit
def pad(out8, end):
    """Zeros from ``end`` to the next multiple of 16."""
    i = tl.arange(0, 16)
    tl.store(out8 + end + i, tl.zeros((16,), tl.uint8), mask=i < (16 - end % 16) % 16)


@triton.jit(do_not_specialize=LENGTHS)
def encode_kernel(
    x16, x64, planes, tables, page_ids, page_stride, head_stride,
    run_chunks, full_pages, run, rest, run_words, head_words,
    keys, out8, out16, out32, out64, first_block, block_bytes, codes_at, signs_at,
    digests, groups, supers,
    SLOT: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    MIXED: tl.constexpr, RAW: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """All of a chunk but what depends on others: its tail, and the slot that points to it."""
    i, head, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk = head * tl.num_programs(0) + i
    chunks = tl.num_programs(0) * tl.num_programs(1)
    head, page, start, length, word = place_in_head(
        head, i, run_chunks, full_pages, run, rest, run_words, head_words, PAGES
    )
    block = block_start(planes, plane, first_block, block_bytes, MIXED)
    low = tl.load(planes + 4 * plane + 2).to(tl.int32)
    page_id = tl.load(page_ids + page).to(tl.int64)
    w = word_numbers()
    used = 4 * w < length
    at = tl.load(planes + 4 * plane) + page_id * page_stride + head * head_stride + start
    x = load_words(x16, x64, at, w, length, ALIGNED)
    lo = x.to(tl.int32)
    hi = (x >> 32).to(tl.int32)
    number = plane.to(tl.int64) * chunks + chunk
    raw = low < 0 if MIXED else RAW
    if chunk == chunks - 1:
        words_end = word + (length + 3) // 4
        if raw:
            pad(out8, block + 8 * words_end)
        else:
            pad(out8, block + (chunk + 1).to(tl.int64) * SLOT)
            pad(out8, block + codes_at + 2 * words_end)
            pad(out8, block + signs_at + 4 * words_end)
    if raw:
        tl.store(out64 + block // 8 + word + w, x, mask=used)
        d = nh(lo, hi, keys, w)
    else:
        c0, c1, f0, f1 = coded(lo, hi, low, tables + plane * 256, w, length, WINDOW)
        codes = (block + codes_at) // 2 + word
        signs = (block + signs_at) // 4 + word
        c = pack_codes(c0, c1)
        s = pack_signs(lo, hi)
        if length * ALIGNED == 1024:
            tl.store(out16 + tl.multiple_of(codes, 8) + w, c.to(tl.int16))
            tl.store(out32 + tl.multiple_of(signs, 4) + w, s)
        else:
            tl.store(out16 + codes + w, c.to(tl.int16), mask=used)
            tl.store(out32 + signs + w, s, mask=used)
        d = nh(s, c, keys, w)
        n = f0 + f1
        n = chunk_sum((n & 0xFFFF) + (n >> 16))
        slot = block + chunk.to(tl.int64) * SLOT
        j = tl.arange(0, SLOT // 4)
        if n == 0:
            tl.store(out32 + slot // 4 + j, tl.zeros_like(j))
        else:
            words = (length + 3) // 4
            units = 0
            first = n
            if n > (SLOT - 1) // 3:
                if 3 * n <= 2 * words:
                    first = LIST | (n << 16)
                    units = (3 * n + 7) // 8
                else:
                    first = FULL
                    units = (tl.maximum(2 * words - (SLOT - 8), 0) + 7) // 8
                group = number // GROUP
                tl.atomic_add(groups + group, units, sem="relaxed")
                tl.atomic_add(supers + group // GROUP, units, sem="relaxed")
            tl.store(out32 + slot // 4 + j, tl.where(j == 0, first, 0))
            if n <= (SLOT - 1) // 3:
                tl.debug_barrier()
                table = tables + plane * 256
                list_escapes(x16, x64, at, length, low, table, out8, slot + 1, WINDOW, ALIGNED)
    if length < 1024:
        d = tl.where(used, d, 0)
    tl.store(digests + number, chunk_sum(d))


@triton.jit
def store_full(
    x16, x64, at, length, low, table, keys, out16, out32, slot, spill, codes, signs,
    SLOT: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Stores a chunk in full: low nibbles for codes, high ones in its slot and its tail.

    Returns its digest, and how many escapes it has.
    """
    held = (SLOT - 8) // 2
    column = tl.arange(0, 32)[:, None] * 2 + tl.arange(0, 2)[None, :]
    digest = tl.zeros((), tl.int64)
    escapes = 0
    for row in range(4):
        w = row * 64 + column
        used = 4 * w < length
        x = load_words(x16, x64, at, w, length, ALIGNED)
        lo = x.to(tl.int32)
        hi = (x >> 32).to(tl.int32)
        _, _, f0, f1 = coded(lo, hi, low, table, w, length, WINDOW)
        n = f0 + f1
        escapes += tl.sum(tl.reshape((n & 0xFFFF) + (n >> 16), [64]), axis=0)
        c = nibbles(lo, hi, 7)
        h = nibbles(lo, hi, 11)
        tl.store(out16 + codes + w, c.to(tl.int16), mask=used)
        tl.store(out16 + slot // 2 + 4 + w, h.to(tl.int16), mask=both(used, w < held))
        far = both(used, w >= held)
        tl.store(out16 + spill // 2 + w - held, h.to(tl.int16), mask=far)
        s = tl.load(out32 + signs + w, mask=used, other=0)
        d = tl.where(used, nh(s, c, keys, w), 0) + tl.where(far, mix64(full_tag(w, h)), 0)
        digest += tl.sum(tl.reshape(d, [64]), axis=0)
    return digest, escapes


@triton.jit
def units_before(groups, supers, g):
    """Spill units of all groups before group ``g``."""
    i = tl.arange(0, GROUP)
    first = g // GROUP * GROUP
    near = tl.load(groups + first + i, mask=first + i < g, other=0)
    before = tl.sum(near.to(tl.int64), axis=0)
    for k in range(0, g // GROUP, GROUP):
        far = tl.load(supers + k + i, mask=k + i < g // GROUP, other=0)
        before += tl.sum(far.to(tl.int64), axis=0)
    return before


@triton.jit(do_not_specialize=LENGTHS)
def seal_kernel(
    x16, x64, planes, tables, page_ids, page_stride, head_stride,
    head_chunks, run_chunks, full_pages, run, rest, run_words, head_words,
    keys, out8, out16, out32, out64, codes_at, signs_at, chunks, total, spill_at,
    digests, groups, supers, totals, facts,
    SLOT: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Writes the tails of a group's chunks; the last program writes the header's end.

    ``facts`` int64 `[4]`: length, checksum, escapes, spill units. What counted in ``groups``,
    ``supers`` and ``totals`` is zero again at the end.
    """
    g = tl.program_id(0)
    lost = 0
    if tl.load(groups + g) > 0:
        before = units_before(groups, supers, g)
        j, kinds = slot_kinds(g, total, chunks, planes, out8, SLOT)
        spilled = (kinds >= LIST).to(tl.int32)
        i = -1
        for _ in range(tl.sum(spilled, axis=0)):
            i = tl.min(tl.where(both(spilled > 0, j > i), j, GROUP), axis=0)
            number = g.to(tl.int64) * GROUP + i
            plane = number // chunks
            chunk = (number - plane * chunks).to(tl.int32)
            low = tl.load(planes + 4 * plane + 2).to(tl.int32)
            slot = tl.load(planes + 4 * plane + 1) + chunk.to(tl.int64) * SLOT
            kind = tl.load(out8 + slot).to(tl.int32)
            head, page, start, length, word = place_of(
                chunk, head_chunks, run_chunks, full_pages, run, rest, run_words, head_words
            )
            page_id = tl.load(page_ids + page).to(tl.int64)
            at = tl.load(planes + 4 * plane) + page_id * page_stride
            at += head * head_stride + start
            words = (length + 3) // 4
            spill = spill_at + 8 * before
            if kind == LIST:
                filled = 3 * (tl.load(out16 + slot // 2 + 1).to(tl.int32) & 0xFFFF)
                hashed = list_escapes(
                    x16, x64, at, length, low, tables + plane * 256, out8, spill, WINDOW, ALIGNED
                )
            else:
                filled = tl.maximum(2 * words - (SLOT - 8), 0)
                block = tl.load(planes + 4 * plane + 1)
                streams = (block + codes_at) // 2 + word, (block + signs_at) // 4 + word
                changed, n = store_full(
                    x16, x64, at, length, low, tables + plane * 256, keys,
                    out16, out32, slot, spill, streams[0], streams[1], SLOT, WINDOW, ALIGNED,
                )  # fmt: skip
                hashed = changed - tl.load(digests + number)
                lost += n
            units = (filled + 7) // 8
            k = tl.arange(0, 8)
            zeros = tl.zeros((8,), tl.uint8)
            tl.store(out8 + spill + filled + k, zeros, mask=filled + k < 8 * units)
            tl.store(out32 + slot // 4 + 1, before.to(tl.int32))
            tl.store(digests + number, tl.load(digests + number) + hashed)
            before += units
        tl.debug_barrier()
    term, escapes = terms(
        g, total, chunks, planes, out32, keys, digests,
        head_chunks, run_chunks, full_pages, run, rest, SLOT,
    )  # fmt: skip
    tl.atomic_add(totals + ESCAPES, (escapes + lost).to(tl.int64))
    last, checksum = finished(totals, g, term)
    if last:
        num_groups = tl.num_programs(0)
        units = units_before(groups, supers, (num_groups + GROUP - 1) // GROUP * GROUP)
        length = spill_at + 8 * units
        tl.store(out64 + length // 8, tl.zeros((), tl.int64), mask=length % 16 > 0)
        length = (length + 15) // 16 * 16
        crc = unsigned(tl.load(out32 + 5))
        tl.store(out64 + 5, length)
        tl.store(out64 + 6, checksum)
        tl.store(out64 + 7, seal_of(length, checksum, crc))
        tl.store(facts, length)
        tl.store(facts + 1, checksum)
        tl.store(facts + 2, tl.load(totals + ESCAPES, volatile=True))
        tl.store(facts + 3, units)
        tl.store(totals + ESCAPES, tl.zeros((), tl.int64))
        i = tl.arange(0, 256)
        for k in range(0, num_groups, 256):
            tl.store(groups + k + i, tl.zeros((256,), tl.int32), mask=k + i < num_groups)
        for k in range(0, (num_groups + GROUP - 1) // GROUP, 256):
            tl.store(
                supers + k + i,
                tl.zeros((256,), tl.int32),
                mask=(k + i) * GROUP < num_groups,
            )
