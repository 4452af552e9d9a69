# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What the codec's kernels are made of: places, words, codes and signs.

A program of an encode or a decode is one warp with one chunk of one plane, in one pass over its
bytes: words of four elements, two elements side by side in each 32-bit half. What is rare stays out
of that pass: it takes its own, row by row, or waits for the second launch. No program waits for
another, and the host for none. Arguments that recur in all kernels:

    x16, x64: the first plane's memory, as int16 and as int64.
    planes: int64 `[planes, 4]`: where a plane starts, in elements from x16; where its block does,
        in bytes from the segment's start; its lowest exponent, -1 if it is raw; unused.
    head_chunks … head_words: of `format.Geometry`: chunks of a head and of a run; full pages of a
        head; elements of a full run and of the last; words of a full run and of a head.
    first_block, block_bytes: where the first block starts and how far apart they lie, in bytes,
        unless some planes are raw and some not (MIXED).
    keys: int32 `[2, KEYS]`, the checksum's.
    out8, out16, out32, out64: the segment, as bytes and as integers; `payload…` likewise.
    codes_at, signs_at: a block's streams after its slots, in bytes from its start.
    spill_at: the spill area, in bytes from the segment's start.
    digests: int64, of each chunk. groups, supers: int32, spill units of each GROUP chunks and each
        GROUP groups. totals: int64 `[TOTALS]`: sums of terms, then three counters.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
LIST, FULL = tl.constexpr(254), tl.constexpr(255)
LENGTHS = [
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
def both(a, b):
    """A mask of two. Triton 3.9's interpreter takes no ``&`` of masks as a mask."""
    return (a.to(tl.int32) & b.to(tl.int32)) != 0


@triton.jit
def shifted(v, n: tl.constexpr):
    """An int32 shifted right without its sign."""
    return (v.to(tl.uint32, bitcast=True) >> n).to(tl.int32, bitcast=True)


@triton.jit
def unsigned(v):
    """An int32's bits as a non-negative int64."""
    return v.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def word_numbers():
    """`[4, 32, 2]`: each lane has two neighbours in each of four rows."""
    row = tl.arange(0, 4)[:, None, None] * 64
    return row + tl.arange(0, 32)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]


@triton.jit
def place_of(chunk, head_chunks, run_chunks, full_pages, run, rest, run_words, head_words):
    """Of a chunk of a plane: head, page, first element in its run, length, first word."""
    head = chunk // head_chunks
    return place_in_head(
        head,
        chunk - head * head_chunks,
        run_chunks,
        full_pages,
        run,
        rest,
        run_words,
        head_words,
        2,
    )


@triton.jit
def place_in_head(
    head, i, run_chunks, full_pages, run, rest, run_words, head_words, PAGES: tl.constexpr
):  # fmt: skip
    """The same of chunk ``i`` of a head. PAGES spares a division: 0 if there is one page at most, 1
    if a run is one chunk at most."""
    if PAGES == 0:
        page = i * 0
    elif PAGES == 1:
        page = i
    else:
        page = tl.minimum(i // run_chunks, full_pages)
    start = (i - page * run_chunks).to(tl.int64) * 1024
    length = tl.minimum(1024, tl.where(page == full_pages, rest, run) - start).to(tl.int32)
    word = head.to(tl.int64) * head_words + page.to(tl.int64) * run_words + start // 4
    return head.to(tl.int64), page, start, length, word


@triton.jit
def block_start(planes, plane, first_block, block_bytes, MIXED: tl.constexpr):
    """Where a plane's block starts: in a row with all others, unless some are raw and some not."""
    if MIXED:
        block = tl.load(planes + 4 * plane + 1)
    else:
        block = plane.to(tl.int64) * block_bytes + first_block
    return block


@triton.jit
def load_words(x16, x64, at, w, length, ALIGNED: tl.constexpr):
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
def codes_of(v, low2, table, WINDOW: tl.constexpr):
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
def pack_codes(c0, c1):
    y = c0 | (c1 << 4)
    return (y | shifted(y, 8)) & 0xFFFF


@triton.jit
def pack_signs(lo, hi):
    s0 = (lo & 0x007F007F) | ((lo >> 8) & 0x00800080)
    s1 = (hi & 0x007F007F) | ((hi >> 8) & 0x00800080)
    return s0 | (s1 << 8)


@triton.jit
def coded(lo, hi, low, table, w, length, WINDOW: tl.constexpr):
    """A chunk's codes (0 for escapes) and escapes, `c0, c1, f0, f1` in 16-bit fields."""
    low2 = low | (low << 16)
    c0, f0 = codes_of(lo, low2, table, WINDOW)
    c1, f1 = codes_of(hi, low2, table, WINDOW)
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
def nibbles(lo, hi, SHIFT: tl.constexpr):
    """Low (7) or high (11) nibbles of the exponents, packed as codes are."""
    return pack_codes(shifted(lo, SHIFT) & 0x000F000F, shifted(hi, SHIFT) & 0x000F000F)


@triton.jit
def unpack(packed):
    """Four codes of a word, in the 16-bit fields of its halves."""
    c0 = (packed & 0xF) | ((packed & 0xF00) << 8)
    c1 = ((packed >> 4) & 0xF) | ((packed & 0xF000) << 4)
    return c0, c1


@triton.jit
def exponents(c, low2, book, WINDOW: tl.constexpr):
    """Exponents of two codes, in 16-bit fields."""
    if WINDOW:
        e = c + low2
    else:
        e = tl.load(book + (c & 0xFF)).to(tl.int32) & 0xFF
        e |= (tl.load(book + (c >> 16)).to(tl.int32) & 0xFF) << 16
    return e


@triton.jit
def joined_words(s, e0, e1):
    """Words of packed signs and of exponents in 16-bit fields."""
    s0 = s & 0x00FF00FF
    s1 = shifted(s, 8) & 0x00FF00FF
    lo = (s0 & 0x007F007F) | ((s0 & 0x00800080) << 8) | (e0 << 7)
    hi = (s1 & 0x007F007F) | ((s1 & 0x00800080) << 8) | (e1 << 7)
    return unsigned(lo) | (hi.to(tl.int64) << 32)


@triton.jit
def store_words(x16, x64, at, w, x, length, ALIGNED: tl.constexpr):
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
