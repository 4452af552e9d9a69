# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The checksum on a GPU: digests of chunks, their terms, and the sum of these."""

import triton
import triton.language as tl

from codec.kernels.words import (
    GROUP,
    LENGTHS,
    LIST,
    both,
    load_words,
    place_in_head,
    place_of,
    shifted,
    unsigned,
    word_numbers,
)

KEYS = tl.constexpr(260)
SUMS = tl.constexpr(64)
ESCAPES, DONE, ERRORS = tl.constexpr(64), tl.constexpr(65), tl.constexpr(66)
TOTALS = 67
FOREIGN, BAD_SLOT = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def shifted64(v, n: tl.constexpr):
    return (v.to(tl.uint64, bitcast=True) >> n).to(tl.int64, bitcast=True)


@triton.jit
def mix64(z):
    """`checksum.mix64`."""
    z = (z ^ shifted64(z, 30)) * (-4658895280553007687)
    z = (z ^ shifted64(z, 27)) * (-7723592293110705685)
    return z ^ shifted64(z, 31)


@triton.jit
def nh(x, y, keys, k):
    """One word's part of a digest, of two int32."""
    a = unsigned(x + tl.load(keys + k))
    b = unsigned(y + tl.load(keys + KEYS + k))
    return a * b + a + b


@triton.jit
def chunk_sum(v):
    """The sum of a chunk's words `[4, 32, 2]`."""
    return tl.sum(tl.sum(tl.sum(v, axis=2), axis=0), axis=0)


@triton.jit
def full_tag(w, h):
    return (1 << 40) | (w.to(tl.int64) << 16) | h.to(tl.int64)


@triton.jit
def slot_kinds(g, total, chunks, planes, payload8, SLOT: tl.constexpr):
    """Of a group's chunks: their numbers in it, and their slots' first bytes, 0 for a raw one."""
    j = tl.arange(0, GROUP)
    number = g.to(tl.int64) * GROUP + j
    here = number < total
    plane = number // chunks
    coded = tl.load(planes + 4 * plane + 2, mask=here, other=-1) >= 0
    slots = tl.load(planes + 4 * plane + 1, mask=here, other=0) + (number - plane * chunks) * SLOT
    kinds = tl.load(payload8 + slots, mask=both(here, coded), other=0).to(tl.int32)
    return j, kinds


@triton.jit
def terms(
    g, total, chunks, planes, payload32, keys, digests,
    head_chunks, run_chunks, full_pages, run, rest, SLOT: tl.constexpr,
):  # fmt: skip
    """The sum of the checksum's terms of group ``g``, slots included, and the escapes they name."""
    n = g.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    here = n < total
    plane = n // chunks
    chunk = (n - plane * chunks).to(tl.int32)
    coded = both(here, tl.load(planes + 4 * plane + 2, mask=here, other=-1) >= 0)
    slot = tl.load(planes + 4 * plane + 1, mask=here, other=0) + chunk.to(tl.int64) * SLOT
    _, _, _, length, _ = place_of(chunk, head_chunks, run_chunks, full_pages, run, rest, 0, 0)
    d = tl.load(digests + n, mask=here, other=0)
    for j in tl.static_range(SLOT // 8):
        x = tl.load(payload32 + slot // 4 + 2 * j, mask=coded, other=0)
        y = tl.load(payload32 + slot // 4 + 2 * j + 1, mask=coded, other=0)
        d += tl.where(coded, nh(x, y, keys, 256 + j), 0)
        if j == 0:
            kind = x & 0xFF
            escapes = tl.where(kind < LIST, kind, tl.where(kind == LIST, shifted(x, 16), 0))
    term = mix64(d + mix64((n << 11) | length.to(tl.int64)))
    return tl.sum(tl.where(here, term, 0), axis=0), tl.sum(escapes, axis=0)


@triton.jit
def finished(totals, g, term):
    """Adds a group's terms. Returns whether this was the last program, and then the checksum."""
    tl.atomic_add(totals + g % SUMS, term)
    tl.debug_barrier()
    last = tl.atomic_add(totals + DONE, 1) == tl.num_programs(0) - 1
    checksum = tl.zeros((), tl.int64)
    if last:
        i = tl.arange(0, SUMS)
        checksum = tl.sum(tl.load(totals + i, volatile=True), axis=0)
        tl.store(totals + i, tl.zeros((SUMS,), tl.int64))
        tl.store(totals + DONE, 0)
    return last, checksum


@triton.jit
def seal_of(length, checksum, crc):
    return mix64(length ^ mix64(checksum ^ crc))


@triton.jit(do_not_specialize=LENGTHS)
def digest_kernel(
    x16, x64, planes, page_ids, page_stride, head_stride,
    run_chunks, full_pages, run, rest, keys, digests, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Digests of chunks as if they were stored raw."""
    i, head, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk = head * tl.num_programs(0) + i
    chunks = tl.num_programs(0) * tl.num_programs(1)
    head, page, start, length, _ = place_in_head(
        head, i, run_chunks, full_pages, run, rest, 0, 0, 2
    )
    page_id = tl.load(page_ids + page).to(tl.int64)
    w = word_numbers()
    at = tl.load(planes + 4 * plane) + page_id * page_stride + head * head_stride + start
    x = load_words(x16, x64, at, w, length, ALIGNED)
    d = nh(x.to(tl.int32), (x >> 32).to(tl.int32), keys, w)
    number = plane.to(tl.int64) * chunks + chunk
    tl.store(digests + number, chunk_sum(tl.where(4 * w < length, d, 0)))


@triton.jit(do_not_specialize=LENGTHS)
def sum_kernel(
    planes, chunks, total, keys, digests, totals, facts,
    head_chunks, run_chunks, full_pages, run, rest,
):  # fmt: skip
    """The checksum of digests of chunks that are raw, into ``facts[1]``."""
    g = tl.program_id(0)
    term, _ = terms(
        g, total, chunks, planes, keys, keys, digests,
        head_chunks, run_chunks, full_pages, run, rest, 8,
    )  # fmt: skip
    last, checksum = finished(totals, g, term)
    if last:
        tl.store(facts + 1, checksum)
