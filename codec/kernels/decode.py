# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Decoding: `decode_kernel` in one pass, then `verify_kernel` for the rest and the sum."""

import triton
import triton.language as tl

from codec.kernels.checksum import (
    BAD_SLOT,
    ERRORS,
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
    exponents,
    joined_words,
    place_in_head,
    place_of,
    store_words,
    unpack,
    unsigned,
    word_numbers,
)


@triton.jit
def foreign(payload32, expected, header_words):
    """How many words of the header differ from what both sides know of it."""
    i = tl.arange(0, 64)
    differing = 0
    for first in range(0, header_words, 64):
        word = first + i
        known = both(word < header_words, tl.where(word < 10, 1, word >= 16) > 0)
        theirs = tl.load(payload32 + word, mask=known, other=0)
        ours = tl.load(expected + word, mask=known, other=0)
        differing += tl.sum(tl.where(theirs == ours, 0, 1), axis=0)
    return differing


@triton.jit
def patch(x16, at, payload8, signs, entries, n, length, kind):
    """Writes the elements that ``n`` entries name.

    Returns the sum of the entries' hashes if they are a list's, and whether they are in order.
    """
    hashed = tl.zeros((), tl.int64)
    wrong = 0
    for first in range(0, n, 32):
        j = first + tl.arange(0, 32)
        here = j < n
        entry = payload8 + entries + 3 * j
        low = tl.load(entry, mask=here, other=0).to(tl.int32)
        position = low | (tl.load(entry + 1, mask=here, other=0).to(tl.int32) << 8)
        exponent = tl.load(entry + 2, mask=here, other=0).to(tl.int32)
        after = both(here, j > 0)
        low = tl.load(entry - 3, mask=after, other=0).to(tl.int32)
        previous = low | (tl.load(entry - 2, mask=after, other=0).to(tl.int32) << 8)
        previous = tl.where(j > 0, previous, -1)
        bad = (position <= previous).to(tl.int32) | (position >= length).to(tl.int32)
        wrong += tl.sum(tl.where(here, bad, 0), axis=0)
        inside = both(here, position < length)
        e = position & 3
        byte = (position - e) + tl.where(e == 1, 2, tl.where(e == 2, 1, e))
        sign = tl.load(payload8 + signs + byte, mask=inside, other=0).to(tl.int32)
        value = (sign & 0x7F) | ((sign & 0x80) << 8) | (exponent << 7)
        tl.store(x16 + at + position, value.to(tl.int16), mask=inside)
        if kind == LIST:
            tag = (j.to(tl.int64) << 24) | ((exponent << 16) | position).to(tl.int64)
            hashed += tl.sum(tl.where(here, mix64(tag), 0), axis=0)
    return hashed, wrong


@triton.jit(do_not_specialize=LENGTHS)
def decode_kernel(
    x16, x64, planes, books, page_ids, page_stride, head_stride,
    run_chunks, full_pages, run, rest, run_words, head_words,
    keys, payload8, payload16, payload32, payload64, first_block, block_bytes,
    codes_at, signs_at, spill_at, spill_bytes, digests, totals,
    SLOT: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    MIXED: tl.constexpr, RAW: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """A chunk into its page. Never reads or writes out of bounds, whatever the payload holds."""
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
    number = plane.to(tl.int64) * chunks + chunk
    raw = low < 0 if MIXED else RAW
    if raw:
        x = tl.load(payload64 + block // 8 + word + w, mask=used, other=0)
        store_words(x16, x64, at, w, x, length, ALIGNED)
        d = nh(x.to(tl.int32), (x >> 32).to(tl.int32), keys, w)
        tl.store(digests + number, chunk_sum(tl.where(used, d, 0)))
    else:
        codes = (block + codes_at) // 2 + word
        signs = (block + signs_at) // 4 + word
        if length * ALIGNED == 1024:
            c = tl.load(payload16 + tl.multiple_of(codes, 8) + w).to(tl.int32) & 0xFFFF
            s = tl.load(payload32 + tl.multiple_of(signs, 4) + w)
        else:
            c = tl.load(payload16 + codes + w, mask=used, other=0).to(tl.int32) & 0xFFFF
            s = tl.load(payload32 + signs + w, mask=used, other=0)
        slot = block + chunk.to(tl.int64) * SLOT
        kind = tl.load(payload8 + slot).to(tl.int32)
        low2 = low | (low << 16)
        c0, c1 = unpack(c)
        book = books + plane * 16
        d = nh(s, c, keys, w)
        if length < 1024:
            d = tl.where(used, d, 0)
        digest = chunk_sum(d)
        n = kind
        words = (length + 3) // 4
        entries = slot + 1
        wrong = both(kind > (SLOT - 1) // 3, kind < LIST).to(tl.int32)
        if kind >= LIST:
            offset = unsigned(tl.load(payload32 + slot // 4 + 1)) * 8
            n = tl.load(payload16 + slot // 2 + 1).to(tl.int32) & 0xFFFF
            n = tl.where(kind == LIST, n, 0)
            held = (SLOT - 8) // 2
            size = tl.where(kind == LIST, 3 * n, tl.maximum(2 * (words - held), 0))
            wrong = (offset + size > spill_bytes).to(tl.int32)
            if kind == LIST:
                wrong |= (3 * n > 2 * words).to(tl.int32) | (n <= (SLOT - 1) // 3).to(tl.int32)
            entries = spill_at + offset
        if wrong > 0:
            n = 0
        e0 = exponents(c0, low2, book, WINDOW)
        e1 = exponents(c1, low2, book, WINDOW)
        x = joined_words(s, e0, e1)
        store_words(x16, x64, at, w, x, length, ALIGNED)
        if n > 0:
            tl.debug_barrier()
            sign_bytes = block + signs_at + 4 * word
            hashed, disorder = patch(x16, at, payload8, sign_bytes, entries, n, length, kind)
            digest += hashed
            wrong += disorder
        if wrong > 0:
            tl.atomic_or(totals + ERRORS, tl.full((), BAD_SLOT, tl.int64))
        tl.store(digests + number, digest)


@triton.jit
def load_full(
    x16, x64, at, length, payload16, payload32, slot, spill, codes, signs,
    SLOT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Writes a chunk that is stored in full. Returns the hashes of what lies in its tail."""
    held = (SLOT - 8) // 2
    column = tl.arange(0, 32)[:, None] * 2 + tl.arange(0, 2)[None, :]
    hashed = tl.zeros((), tl.int64)
    for row in range(4):
        w = row * 64 + column
        used = 4 * w < length
        near = both(used, w < held)
        far = both(used, w >= held)
        h = tl.load(payload16 + slot // 2 + 4 + w, mask=near, other=0).to(tl.int32)
        h |= tl.load(payload16 + spill // 2 + w - held, mask=far, other=0).to(tl.int32)
        h &= 0xFFFF
        c = tl.load(payload16 + codes + w, mask=used, other=0).to(tl.int32) & 0xFFFF
        s = tl.load(payload32 + signs + w, mask=used, other=0)
        c0, c1 = unpack(c)
        h0, h1 = unpack(h)
        x = joined_words(s, c0 | (h0 << 4), c1 | (h1 << 4))
        store_words(x16, x64, at, w, x, length, ALIGNED)
        hashed += tl.sum(tl.reshape(tl.where(far, mix64(full_tag(w, h)), 0), [64]), axis=0)
    return hashed


@triton.jit(do_not_specialize=LENGTHS)
def verify_kernel(
    x16, x64, planes, page_ids, page_stride, head_stride,
    head_chunks, run_chunks, full_pages, run, rest, run_words, head_words,
    keys, payload8, payload16, payload32, payload64, expected, header_words,
    codes_at, signs_at, spill_at, spill_bytes, chunks, total, payload_bytes,
    digests, totals, facts, SLOT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Brings a group's chunks that are stored in full, and sums the checksum.

    ``facts`` int64 `[4]`: length, checksum found, that announced, errors.
    """
    g = tl.program_id(0)
    j, kinds = slot_kinds(g, total, chunks, planes, payload8, SLOT)
    stored = (kinds == FULL).to(tl.int32)
    i = -1
    for _ in range(tl.sum(stored, axis=0)):
        i = tl.min(tl.where(both(stored > 0, j > i), j, GROUP), axis=0)
        number = g.to(tl.int64) * GROUP + i
        plane = number // chunks
        chunk = (number - plane * chunks).to(tl.int32)
        head, page, start, length, word = place_of(
            chunk, head_chunks, run_chunks, full_pages, run, rest, run_words, head_words
        )
        page_id = tl.load(page_ids + page).to(tl.int64)
        at = tl.load(planes + 4 * plane) + page_id * page_stride + head * head_stride + start
        block = tl.load(planes + 4 * plane + 1)
        slot = block + chunk.to(tl.int64) * SLOT
        offset = unsigned(tl.load(payload32 + slot // 4 + 1)) * 8
        size = tl.maximum(2 * ((length + 3) // 4) - (SLOT - 8), 0)
        if offset + size <= spill_bytes:
            hashed = load_full(
                x16, x64, at, length, payload16, payload32, slot, spill_at + offset,
                (block + codes_at) // 2 + word, (block + signs_at) // 4 + word, SLOT, ALIGNED,
            )  # fmt: skip
            tl.store(digests + number, tl.load(digests + number) + hashed)
    tl.debug_barrier()
    term, _ = terms(
        g, total, chunks, planes, payload32, keys, digests,
        head_chunks, run_chunks, full_pages, run, rest, SLOT,
    )  # fmt: skip
    last, checksum = finished(totals, g, term)
    if last:
        length = tl.load(payload64 + 5)
        announced = tl.load(payload64 + 6)
        seal = seal_of(length, announced, unsigned(tl.load(payload32 + 5)))
        errors = tl.load(totals + ERRORS, volatile=True)
        differing = foreign(payload32, expected, header_words)
        differing += (length != payload_bytes).to(tl.int32)
        differing += (seal != tl.load(payload64 + 7)).to(tl.int32)
        if differing > 0:
            errors |= 1
        tl.store(facts, length)
        tl.store(facts + 1, checksum)
        tl.store(facts + 2, announced)
        tl.store(facts + 3, errors)
        tl.store(totals + ERRORS, tl.zeros((), tl.int64))
