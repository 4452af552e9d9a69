# mypy: allow-untyped-defs, allow-untyped-decorators
"""Triton kernels of wire version 2. `cuda.py` prepares their arguments and launches them.

A program of `encode_kernel` or `decode_kernel` is one warp with one chunk of one plane, in one pass
over its bytes: words of four elements, two elements side by side in each 32-bit half. What is rare
stays out of that pass: entries of escapes are patched in afterwards, and tails go to the spill area
in `seal_kernel` or come from it. No program waits for another, and the host for none.

Arguments that recur:
    x16, x64: the first plane's memory, as int16 and as int64.
    planes: int64 `[planes, 4]`: where a plane starts, in elements from x16; where its block does, in
        bytes from the segment's start; its lowest exponent, -1 if it is raw; unused.
    head_chunks … head_words: `format.Geometry`: chunks of a head, of a run; full pages of a head;
        elements of a full run and of the last; words of a full run and of a head.
    keys: int32 `[2, KEYS]`, the checksum's.
    out8, out16, out32, out64: the segment, as bytes and as integers; `payload…` likewise.
    slots_at, codes_at, signs_at: a block's streams, in bytes from its start. spill_at: the spill
        area, from the segment's.
    digests: int64, of each chunk. groups, supers: int32, spill units of each GROUP chunks and each
        GROUP groups. totals: int64 `[TOTALS]`; see `seal_kernel`.
"""

import triton
import triton.language as tl

WORDS = tl.constexpr(256)
KEYS = tl.constexpr(260)
GROUP = tl.constexpr(64)
SUMS = tl.constexpr(64)
LIST, FULL = tl.constexpr(254), tl.constexpr(255)
ESCAPES, DONE, ERRORS = tl.constexpr(64), tl.constexpr(65), tl.constexpr(66)
FOREIGN, BAD_SLOT = tl.constexpr(1), tl.constexpr(2)

_LENGTHS = [
    "head_chunks",
    "run_chunks",
    "full_pages",
    "run",
    "rest",
    "run_words",
    "head_words",
    "codes_at",
    "signs_at",
    "spill_at",
    "spill_bytes",
    "payload_bytes",
    "chunks",
    "total",
    "first_block",
    "block_bytes",
    "header_words",
]
"""What changes from prompt to prompt: kernels are not compiled anew for it."""


@triton.jit
def _both(a, b):
    """A mask of two. Triton 3.9's interpreter takes no ``&`` of masks as a mask."""
    return (a.to(tl.int32) & b.to(tl.int32)) != 0


@triton.jit
def _shifted(v, n: tl.constexpr):
    """An int32 shifted right without its sign."""
    return (v.to(tl.uint32, bitcast=True) >> n).to(tl.int32, bitcast=True)


@triton.jit
def _shifted64(v, n: tl.constexpr):
    return (v.to(tl.uint64, bitcast=True) >> n).to(tl.int64, bitcast=True)


@triton.jit
def _unsigned(v):
    """An int32's bits as a non-negative int64."""
    return v.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _mix64(z):
    """`checksum.mix64`."""
    z = (z ^ _shifted64(z, 30)) * (-4658895280553007687)
    z = (z ^ _shifted64(z, 27)) * (-7723592293110705685)
    return z ^ _shifted64(z, 31)


@triton.jit
def _nh(x, y, keys, k):
    """One word's part of a digest, of two int32."""
    a = _unsigned(x + tl.load(keys + k))
    b = _unsigned(y + tl.load(keys + KEYS + k))
    return a * b + a + b


@triton.jit
def _all(v):
    """The sum of a chunk's words `[4, 32, 2]`."""
    return tl.sum(tl.sum(tl.sum(v, axis=2), axis=0), axis=0)


@triton.jit
def _word_numbers():
    """`[4, 32, 2]`: each lane has two neighbours in each of four rows."""
    row = tl.arange(0, 4)[:, None, None] * 64
    return row + tl.arange(0, 32)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]


@triton.jit
def _place(chunk, head_chunks, run_chunks, full_pages, run, rest, run_words, head_words):
    """Of a chunk of a plane: head, page, first element in its run, length, first word."""
    head = chunk // head_chunks
    i = chunk - head * head_chunks
    page = tl.minimum(i // run_chunks, full_pages)
    start = (i - page * run_chunks).to(tl.int64) * 1024
    length = tl.minimum(1024, tl.where(page == full_pages, rest, run) - start).to(tl.int32)
    word = head.to(tl.int64) * head_words + page.to(tl.int64) * run_words + start // 4
    return head.to(tl.int64), page, start, length, word


@triton.jit
def _block(planes, plane, first_block, block_bytes, MIXED: tl.constexpr):
    """Where a plane's block starts: in a row with all others, unless some are raw and some not."""
    if MIXED:
        block = tl.load(planes + 4 * plane + 1)
    else:
        block = plane.to(tl.int64) * block_bytes + first_block
    return block


@triton.jit
def _load_words(x16, x64, at, w, length, ALIGNED: tl.constexpr):
    """A chunk's words, from element ``at`` on; zero past its length."""
    if length * ALIGNED == 1024:
        x = tl.load(x64 + tl.multiple_of(at // 4, 2) + w)
    else:
        e = 4 * w
        here = x16 + at + e
        x = tl.load(here, mask=e < length, other=0).to(tl.int64) & 0xFFFF
        x |= (tl.load(here + 1, mask=e + 1 < length, other=0).to(tl.int64) & 0xFFFF) << 16
        x |= (tl.load(here + 2, mask=e + 2 < length, other=0).to(tl.int64) & 0xFFFF) << 32
        x |= tl.load(here + 3, mask=e + 3 < length, other=0).to(tl.int64) << 48
    return x


@triton.jit
def _codes(v, low2, table, WINDOW: tl.constexpr):
    """Of two elements, in 16-bit fields: their codes, and 1 for an escape, whose code is 0."""
    e = (v >> 7) & 0x00FF00FF
    if WINDOW:
        t = (e + (0x01000100 - low2)) ^ 0x01000100
        escape = ((t + 0x7FF07FF0) >> 15) & 0x00010001
        code = t & (0x000F000F - escape * 15)
    else:
        t = tl.load(table + (e & 0xFF)).to(tl.int32)
        t |= tl.load(table + (e >> 16)).to(tl.int32) << 16
        escape = (t >> 4) & 0x00010001
        code = t & 0x000F000F
    return code, escape


@triton.jit
def _pack_codes(c0, c1):
    y = c0 | (c1 << 4)
    return (y | _shifted(y, 8)) & 0xFFFF


@triton.jit
def _pack_signs(lo, hi):
    s0 = (lo & 0x007F007F) | ((lo >> 8) & 0x00800080)
    s1 = (hi & 0x007F007F) | ((hi >> 8) & 0x00800080)
    return s0 | (s1 << 8)


@triton.jit
def _coded(lo, hi, low, table, w, length, WINDOW: tl.constexpr):
    """A chunk's codes (0 for escapes) and escapes, `c0, c1, f0, f1` in 16-bit fields."""
    low2 = low | (low << 16)
    c0, f0 = _codes(lo, low2, table, WINDOW)
    c1, f1 = _codes(hi, low2, table, WINDOW)
    if length < 1024:  # what pads the last word is none
        e = 4 * w
        v0 = (e < length).to(tl.int32) | ((e + 1 < length).to(tl.int32) << 16)
        v1 = (e + 2 < length).to(tl.int32) | ((e + 3 < length).to(tl.int32) << 16)
        f0 &= v0
        f1 &= v1
        c0 &= v0 * 15
        c1 &= v1 * 15
    return c0, c1, f0, f1


@triton.jit
def _list_escapes(
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
        x = _load_words(x16, x64, at, w, length, ALIGNED)
        lo = x.to(tl.int32)
        hi = (x >> 32).to(tl.int32)
        _, _, f0, f1 = _coded(lo, hi, low, table, w, length, WINDOW)
        n = f0 + f1
        mine = tl.reshape((n & 0xFFFF) + (n >> 16), [64])
        rank = listed + tl.reshape(tl.cumsum(mine, axis=0) - mine, [32, 2])
        listed += tl.sum(mine, axis=0)
        for e in tl.static_range(4):
            flag = ((f0 if e < 2 else f1) >> (16 * (e % 2))) & 1
            exponent = _shifted(lo if e < 2 else hi, 7 + 16 * (e % 2)) & 0xFF
            position = 4 * w + e
            entry = out8 + entries + 3 * rank
            tl.store(entry, (position & 0xFF).to(tl.uint8), mask=flag > 0)
            tl.store(entry + 1, (position >> 8).to(tl.uint8), mask=flag > 0)
            tl.store(entry + 2, exponent.to(tl.uint8), mask=flag > 0)
            hashed = _mix64((rank.to(tl.int64) << 24) | ((exponent << 16) | position).to(tl.int64))
            total += tl.sum(tl.sum(tl.where(flag > 0, hashed, 0), axis=1), axis=0)
            rank += flag
    return total


@triton.jit
def _nibbles(lo, hi, SHIFT: tl.constexpr):
    """Low (7) or high (11) nibbles of the exponents, packed as codes are."""
    return _pack_codes(_shifted(lo, SHIFT) & 0x000F000F, _shifted(hi, SHIFT) & 0x000F000F)


@triton.jit
def _pad(out8, end):
    """Zeros from ``end`` to the next multiple of 16."""
    i = tl.arange(0, 16)
    tl.store(out8 + end + i, tl.zeros((16,), tl.uint8), mask=i < (16 - end % 16) % 16)


@triton.jit(do_not_specialize=_LENGTHS)
def encode_kernel(
    x16, x64, planes, tables, page_ids, page_stride, head_stride,
    head_chunks, run_chunks, full_pages, run, rest, run_words, head_words,
    keys, out8, out16, out32, out64, first_block, block_bytes, codes_at, signs_at,
    digests, groups, supers,
    SLOT: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    MIXED: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Everything of a chunk but what depends on other chunks: tails, and slots that point to them."""
    chunk = tl.program_id(0)
    plane = tl.program_id(1)
    head, page, start, length, word = _place(
        chunk, head_chunks, run_chunks, full_pages, run, rest, run_words, head_words
    )
    block = _block(planes, plane, first_block, block_bytes, MIXED)
    low = tl.load(planes + 4 * plane + 2).to(tl.int32)
    page_id = tl.load(page_ids + page).to(tl.int64)
    w = _word_numbers()
    used = 4 * w < length
    at = tl.load(planes + 4 * plane) + page_id * page_stride + head * head_stride + start
    x = _load_words(x16, x64, at, w, length, ALIGNED)
    lo = x.to(tl.int32)
    hi = (x >> 32).to(tl.int32)
    number = plane.to(tl.int64) * tl.num_programs(0) + chunk
    raw = low < 0 if MIXED else RAW
    if chunk == tl.num_programs(0) - 1:
        words_end = word + (length + 3) // 4
        if raw:
            _pad(out8, block + 8 * words_end)
        else:
            _pad(out8, block + (chunk + 1).to(tl.int64) * SLOT)
            _pad(out8, block + codes_at + 2 * words_end)
            _pad(out8, block + signs_at + 4 * words_end)
    if raw:
        tl.store(out64 + block // 8 + word + w, x, mask=used)
        d = _nh(lo, hi, keys, w)
    else:
        c0, c1, f0, f1 = _coded(lo, hi, low, tables + plane * 256, w, length, WINDOW)
        codes = (block + codes_at) // 2 + word
        signs = (block + signs_at) // 4 + word
        c = _pack_codes(c0, c1)
        s = _pack_signs(lo, hi)
        if length * ALIGNED == 1024:
            tl.store(out16 + tl.multiple_of(codes, 8) + w, c.to(tl.int16))
            tl.store(out32 + tl.multiple_of(signs, 4) + w, s)
        else:
            tl.store(out16 + codes + w, c.to(tl.int16), mask=used)
            tl.store(out32 + signs + w, s, mask=used)
        d = _nh(s, c, keys, w)
        n = f0 + f1
        n = _all((n & 0xFFFF) + (n >> 16))
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
                tl.atomic_add(groups + group, units)
                tl.atomic_add(supers + group // GROUP, units)
            tl.store(out32 + slot // 4 + j, tl.where(j == 0, first, 0))
            if n <= (SLOT - 1) // 3:
                tl.debug_barrier()
                table = tables + plane * 256
                _list_escapes(x16, x64, at, length, low, table, out8, slot + 1, WINDOW, ALIGNED)
    if length < 1024:
        d = tl.where(used, d, 0)
    tl.store(digests + number, _all(d))


@triton.jit
def _full_tag(w, h):
    return (1 << 40) | (w.to(tl.int64) << 16) | h.to(tl.int64)


@triton.jit
def _store_full(
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
        x = _load_words(x16, x64, at, w, length, ALIGNED)
        lo = x.to(tl.int32)
        hi = (x >> 32).to(tl.int32)
        _, _, f0, f1 = _coded(lo, hi, low, table, w, length, WINDOW)
        n = f0 + f1
        escapes += tl.sum(tl.reshape((n & 0xFFFF) + (n >> 16), [64]), axis=0)
        c = _nibbles(lo, hi, 7)
        h = _nibbles(lo, hi, 11)
        tl.store(out16 + codes + w, c.to(tl.int16), mask=used)
        tl.store(out16 + slot // 2 + 4 + w, h.to(tl.int16), mask=_both(used, w < held))
        far = _both(used, w >= held)
        tl.store(out16 + spill // 2 + w - held, h.to(tl.int16), mask=far)
        s = tl.load(out32 + signs + w, mask=used, other=0)
        d = tl.where(used, _nh(s, c, keys, w), 0) + tl.where(far, _mix64(_full_tag(w, h)), 0)
        digest += tl.sum(tl.reshape(d, [64]), axis=0)
    return digest, escapes


@triton.jit
def _units_before(groups, supers, g):
    """Spill units of all groups before group ``g``."""
    i = tl.arange(0, GROUP)
    first = g // GROUP * GROUP
    near = tl.load(groups + first + i, mask=first + i < g, other=0)
    before = tl.sum(near.to(tl.int64), axis=0)
    for k in range(0, g // GROUP, GROUP):
        far = tl.load(supers + k + i, mask=k + i < g // GROUP, other=0)
        before += tl.sum(far.to(tl.int64), axis=0)
    return before


@triton.jit
def _terms(
    g, total, chunks, planes, payload32, keys, digests,
    head_chunks, run_chunks, full_pages, run, rest, SLOT: tl.constexpr,
):  # fmt: skip
    """The sum of the checksum's terms of group ``g``, slots included, and the escapes they name."""
    n = g.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    here = n < total
    plane = n // chunks
    chunk = (n - plane * chunks).to(tl.int32)
    coded = _both(here, tl.load(planes + 4 * plane + 2, mask=here, other=-1) >= 0)
    slot = tl.load(planes + 4 * plane + 1, mask=here, other=0) + chunk.to(tl.int64) * SLOT
    _, _, _, length, _ = _place(chunk, head_chunks, run_chunks, full_pages, run, rest, 0, 0)
    d = tl.load(digests + n, mask=here, other=0)
    for j in tl.static_range(SLOT // 8):
        x = tl.load(payload32 + slot // 4 + 2 * j, mask=coded, other=0)
        y = tl.load(payload32 + slot // 4 + 2 * j + 1, mask=coded, other=0)
        d += tl.where(coded, _nh(x, y, keys, 256 + j), 0)
        if j == 0:
            kind = x & 0xFF
            escapes = tl.where(kind < LIST, kind, tl.where(kind == LIST, _shifted(x, 16), 0))
    term = _mix64(d + _mix64((n << 11) | length.to(tl.int64)))
    return tl.sum(tl.where(here, term, 0), axis=0), tl.sum(escapes, axis=0)


@triton.jit
def _kinds(g, total, chunks, planes, payload8, SLOT: tl.constexpr):
    """Of a group's chunks: their numbers in it, and their slots' first bytes, 0 for a raw one."""
    j = tl.arange(0, GROUP)
    number = g.to(tl.int64) * GROUP + j
    here = number < total
    plane = number // chunks
    coded = tl.load(planes + 4 * plane + 2, mask=here, other=-1) >= 0
    slots = tl.load(planes + 4 * plane + 1, mask=here, other=0) + (number - plane * chunks) * SLOT
    kinds = tl.load(payload8 + slots, mask=_both(here, coded), other=0).to(tl.int32)
    return j, kinds


@triton.jit
def _finished(totals, g, term):
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
def _seal(length, checksum, crc):
    return _mix64(length ^ _mix64(checksum ^ crc))


@triton.jit(do_not_specialize=_LENGTHS)
def seal_kernel(
    x16, x64, planes, tables, page_ids, page_stride, head_stride,
    head_chunks, run_chunks, full_pages, run, rest, run_words, head_words,
    keys, out8, out16, out32, out64, codes_at, signs_at, chunks, total, spill_at,
    digests, groups, supers, totals, facts, SLOT: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Writes the tails of a group's chunks; the last program writes the header's end.

    ``facts`` int64 `[4]`: length, checksum, escapes, spill units. What counted in ``groups``,
    ``supers`` and ``totals`` is zero again at the end.
    """
    g = tl.program_id(0)
    lost = 0
    if tl.load(groups + g) > 0:
        before = _units_before(groups, supers, g)
        j, kinds = _kinds(g, total, chunks, planes, out8, SLOT)
        spilled = (kinds >= LIST).to(tl.int32)
        i = -1
        for _ in range(tl.sum(spilled, axis=0)):
            i = tl.min(tl.where(_both(spilled > 0, j > i), j, GROUP), axis=0)
            number = g.to(tl.int64) * GROUP + i
            plane = number // chunks
            chunk = (number - plane * chunks).to(tl.int32)
            low = tl.load(planes + 4 * plane + 2).to(tl.int32)
            slot = tl.load(planes + 4 * plane + 1) + chunk.to(tl.int64) * SLOT
            kind = tl.load(out8 + slot).to(tl.int32)
            head, page, start, length, word = _place(
                chunk, head_chunks, run_chunks, full_pages, run, rest, run_words, head_words
            )
            page_id = tl.load(page_ids + page).to(tl.int64)
            at = tl.load(planes + 4 * plane) + page_id * page_stride
            at += head * head_stride + start
            words = (length + 3) // 4
            spill = spill_at + 8 * before
            if kind == LIST:
                filled = 3 * (tl.load(out16 + slot // 2 + 1).to(tl.int32) & 0xFFFF)
                hashed = _list_escapes(
                    x16, x64, at, length, low, tables + plane * 256, out8, spill, WINDOW, ALIGNED
                )
            else:
                filled = tl.maximum(2 * words - (SLOT - 8), 0)
                block = tl.load(planes + 4 * plane + 1)
                streams = (block + codes_at) // 2 + word, (block + signs_at) // 4 + word
                changed, n = _store_full(
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
    term, escapes = _terms(
        g, total, chunks, planes, out32, keys, digests,
        head_chunks, run_chunks, full_pages, run, rest, SLOT,
    )  # fmt: skip
    tl.atomic_add(totals + ESCAPES, (escapes + lost).to(tl.int64))
    last, checksum = _finished(totals, g, term)
    if last:
        num_groups = tl.num_programs(0)
        units = _units_before(groups, supers, (num_groups + GROUP - 1) // GROUP * GROUP)
        length = spill_at + 8 * units
        tl.store(out64 + length // 8, tl.zeros((), tl.int64), mask=length % 16 > 0)
        length = (length + 15) // 16 * 16
        crc = _unsigned(tl.load(out32 + 5))
        tl.store(out64 + 5, length)
        tl.store(out64 + 6, checksum)
        tl.store(out64 + 7, _seal(length, checksum, crc))
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


@triton.jit
def _unpack(packed):
    """Four codes of a word, in the 16-bit fields of its halves."""
    c0 = (packed & 0xF) | ((packed & 0xF00) << 8)
    c1 = ((packed >> 4) & 0xF) | ((packed & 0xF000) << 4)
    return c0, c1


@triton.jit
def _exponents(c, low2, book, WINDOW: tl.constexpr):
    """Exponents of two codes, in 16-bit fields."""
    if WINDOW:
        e = c + low2
    else:
        e = tl.load(book + (c & 0xFF)).to(tl.int32) & 0xFF
        e |= (tl.load(book + (c >> 16)).to(tl.int32) & 0xFF) << 16
    return e


@triton.jit
def _words(s, e0, e1):
    """Words of packed signs and of exponents in 16-bit fields."""
    s0 = s & 0x00FF00FF
    s1 = _shifted(s, 8) & 0x00FF00FF
    lo = (s0 & 0x007F007F) | ((s0 & 0x00800080) << 8) | (e0 << 7)
    hi = (s1 & 0x007F007F) | ((s1 & 0x00800080) << 8) | (e1 << 7)
    return _unsigned(lo) | (hi.to(tl.int64) << 32)


@triton.jit
def _store_words(x16, x64, at, w, x, length, ALIGNED: tl.constexpr):
    """A chunk's words to element ``at`` and on, and nothing past its length."""
    if length * ALIGNED == 1024:
        tl.store(x64 + tl.multiple_of(at // 4, 2) + w, x)
    else:
        e = 4 * w
        here = x16 + at + e
        tl.store(here, x.to(tl.int16), mask=e < length)
        tl.store(here + 1, (x >> 16).to(tl.int16), mask=e + 1 < length)
        tl.store(here + 2, (x >> 32).to(tl.int16), mask=e + 2 < length)
        tl.store(here + 3, (x >> 48).to(tl.int16), mask=e + 3 < length)


@triton.jit
def _foreign(payload32, expected, header_words):
    """How many words of the header differ from what both sides know of it."""
    i = tl.arange(0, 64)
    differing = 0
    for first in range(0, header_words, 64):
        word = first + i
        known = _both(word < header_words, tl.where(word < 10, 1, word >= 16) > 0)
        theirs = tl.load(payload32 + word, mask=known, other=0)
        ours = tl.load(expected + word, mask=known, other=0)
        differing += tl.sum(tl.where(theirs == ours, 0, 1), axis=0)
    return differing


@triton.jit
def _patch(x16, at, payload8, signs, entries, n, length, kind):
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
        after = _both(here, j > 0)
        low = tl.load(entry - 3, mask=after, other=0).to(tl.int32)
        previous = low | (tl.load(entry - 2, mask=after, other=0).to(tl.int32) << 8)
        previous = tl.where(j > 0, previous, -1)
        bad = (position <= previous).to(tl.int32) | (position >= length).to(tl.int32)
        wrong += tl.sum(tl.where(here, bad, 0), axis=0)
        inside = _both(here, position < length)
        e = position & 3
        byte = (position - e) + tl.where(e == 1, 2, tl.where(e == 2, 1, e))
        sign = tl.load(payload8 + signs + byte, mask=inside, other=0).to(tl.int32)
        value = (sign & 0x7F) | ((sign & 0x80) << 8) | (exponent << 7)
        tl.store(x16 + at + position, value.to(tl.int16), mask=inside)
        if kind == LIST:
            tag = (j.to(tl.int64) << 24) | ((exponent << 16) | position).to(tl.int64)
            hashed += tl.sum(tl.where(here, _mix64(tag), 0), axis=0)
    return hashed, wrong


@triton.jit(do_not_specialize=_LENGTHS)
def decode_kernel(
    x16, x64, planes, books, page_ids, page_stride, head_stride,
    head_chunks, run_chunks, full_pages, run, rest, run_words, head_words,
    keys, payload8, payload16, payload32, payload64, first_block, block_bytes,
    codes_at, signs_at, spill_at, spill_bytes, digests, totals,
    SLOT: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    MIXED: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """A chunk into its page. Never reads or writes out of bounds, whatever the payload holds."""
    chunk = tl.program_id(0)
    plane = tl.program_id(1)
    head, page, start, length, word = _place(
        chunk, head_chunks, run_chunks, full_pages, run, rest, run_words, head_words
    )
    block = _block(planes, plane, first_block, block_bytes, MIXED)
    low = tl.load(planes + 4 * plane + 2).to(tl.int32)
    page_id = tl.load(page_ids + page).to(tl.int64)
    w = _word_numbers()
    used = 4 * w < length
    at = tl.load(planes + 4 * plane) + page_id * page_stride + head * head_stride + start
    number = plane.to(tl.int64) * tl.num_programs(0) + chunk
    raw = low < 0 if MIXED else RAW
    if raw:
        x = tl.load(payload64 + block // 8 + word + w, mask=used, other=0)
        _store_words(x16, x64, at, w, x, length, ALIGNED)
        d = _nh(x.to(tl.int32), (x >> 32).to(tl.int32), keys, w)
        tl.store(digests + number, _all(tl.where(used, d, 0)))
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
        c0, c1 = _unpack(c)
        book = books + plane * 16
        d = _nh(s, c, keys, w)
        if length < 1024:
            d = tl.where(used, d, 0)
        digest = _all(d)
        n = kind
        words = (length + 3) // 4
        entries = slot + 1
        wrong = _both(kind > (SLOT - 1) // 3, kind < LIST).to(tl.int32)
        if kind >= LIST:
            offset = _unsigned(tl.load(payload32 + slot // 4 + 1)) * 8
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
        e0 = _exponents(c0, low2, book, WINDOW)
        e1 = _exponents(c1, low2, book, WINDOW)
        x = _words(s, e0, e1)
        _store_words(x16, x64, at, w, x, length, ALIGNED)
        if n > 0:
            tl.debug_barrier()
            sign_bytes = block + signs_at + 4 * word
            hashed, disorder = _patch(x16, at, payload8, sign_bytes, entries, n, length, kind)
            digest += hashed
            wrong += disorder
        if wrong > 0:
            tl.atomic_or(totals + ERRORS, tl.full((), BAD_SLOT, tl.int64))
        tl.store(digests + number, digest)


@triton.jit
def _load_full(
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
        near = _both(used, w < held)
        far = _both(used, w >= held)
        h = tl.load(payload16 + slot // 2 + 4 + w, mask=near, other=0).to(tl.int32)
        h |= tl.load(payload16 + spill // 2 + w - held, mask=far, other=0).to(tl.int32)
        h &= 0xFFFF
        c = tl.load(payload16 + codes + w, mask=used, other=0).to(tl.int32) & 0xFFFF
        s = tl.load(payload32 + signs + w, mask=used, other=0)
        c0, c1 = _unpack(c)
        h0, h1 = _unpack(h)
        x = _words(s, c0 | (h0 << 4), c1 | (h1 << 4))
        _store_words(x16, x64, at, w, x, length, ALIGNED)
        hashed += tl.sum(tl.reshape(tl.where(far, _mix64(_full_tag(w, h)), 0), [64]), axis=0)
    return hashed


@triton.jit(do_not_specialize=_LENGTHS)
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
    j, kinds = _kinds(g, total, chunks, planes, payload8, SLOT)
    stored = (kinds == FULL).to(tl.int32)
    i = -1
    for _ in range(tl.sum(stored, axis=0)):
        i = tl.min(tl.where(_both(stored > 0, j > i), j, GROUP), axis=0)
        number = g.to(tl.int64) * GROUP + i
        plane = number // chunks
        chunk = (number - plane * chunks).to(tl.int32)
        head, page, start, length, word = _place(
            chunk, head_chunks, run_chunks, full_pages, run, rest, run_words, head_words
        )
        page_id = tl.load(page_ids + page).to(tl.int64)
        at = tl.load(planes + 4 * plane) + page_id * page_stride + head * head_stride + start
        block = tl.load(planes + 4 * plane + 1)
        slot = block + chunk.to(tl.int64) * SLOT
        offset = _unsigned(tl.load(payload32 + slot // 4 + 1)) * 8
        size = tl.maximum(2 * ((length + 3) // 4) - (SLOT - 8), 0)
        if offset + size <= spill_bytes:
            hashed = _load_full(
                x16, x64, at, length, payload16, payload32, slot, spill_at + offset,
                (block + codes_at) // 2 + word, (block + signs_at) // 4 + word, SLOT, ALIGNED,
            )  # fmt: skip
            tl.store(digests + number, tl.load(digests + number) + hashed)
    tl.debug_barrier()
    term, _ = _terms(
        g, total, chunks, planes, payload32, keys, digests,
        head_chunks, run_chunks, full_pages, run, rest, SLOT,
    )  # fmt: skip
    last, checksum = _finished(totals, g, term)
    if last:
        length = tl.load(payload64 + 5)
        announced = tl.load(payload64 + 6)
        seal = _seal(length, announced, _unsigned(tl.load(payload32 + 5)))
        errors = tl.load(totals + ERRORS, volatile=True)
        foreign = _foreign(payload32, expected, header_words)
        foreign += (length != payload_bytes).to(tl.int32)
        foreign += (seal != tl.load(payload64 + 7)).to(tl.int32)
        if foreign > 0:
            errors |= 1
        tl.store(facts, length)
        tl.store(facts + 1, checksum)
        tl.store(facts + 2, announced)
        tl.store(facts + 3, errors)
        tl.store(totals + ERRORS, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize=_LENGTHS)
def digest_kernel(
    x16, x64, planes, page_ids, page_stride, head_stride,
    head_chunks, run_chunks, full_pages, run, rest, keys, digests, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Digests of chunks as if they were stored raw."""
    chunk = tl.program_id(0)
    plane = tl.program_id(1)
    head, page, start, length, _ = _place(
        chunk, head_chunks, run_chunks, full_pages, run, rest, 0, 0
    )
    page_id = tl.load(page_ids + page).to(tl.int64)
    w = _word_numbers()
    at = tl.load(planes + 4 * plane) + page_id * page_stride + head * head_stride + start
    x = _load_words(x16, x64, at, w, length, ALIGNED)
    d = _nh(x.to(tl.int32), (x >> 32).to(tl.int32), keys, w)
    number = plane.to(tl.int64) * tl.num_programs(0) + chunk
    tl.store(digests + number, _all(tl.where(4 * w < length, d, 0)))


@triton.jit(do_not_specialize=_LENGTHS)
def sum_kernel(
    planes, chunks, total, keys, digests, totals, facts,
    head_chunks, run_chunks, full_pages, run, rest,
):  # fmt: skip
    """The checksum of digests of chunks that are raw, into ``facts[1]``."""
    g = tl.program_id(0)
    term, _ = _terms(
        g, total, chunks, planes, keys, keys, digests,
        head_chunks, run_chunks, full_pages, run, rest, 8,
    )  # fmt: skip
    last, checksum = _finished(totals, g, term)
    if last:
        tl.store(facts + 1, checksum)
