# mypy: allow-untyped-defs, allow-untyped-decorators
"""Triton kernels: one program for each chunk of one plane. `cuda.py` launches them.

A program holds its chunk as four vectors of `WORDS` elements: vector k has the elements 4 w + k, so
that the checksum's words and the codes' bytes are made without a shuffle. Arguments that recur:

    plane: int16 pointer to a plane's first element; page_stride, head_stride in elements.
    chunks: int64 `[chunks, 4]` of `chunks.chunk_table`.
    starts: int64 `[chunks, 3]`: where a chunk's codes, signs and tail start, in bytes from the
        block's start.
    block: u8 pointer to the plane's block in the segment.
    counts: int32 `[chunks]`, escapes of each chunk, `RAW_CHUNK` for one stored in full.
"""

import triton
import triton.language as tl

WORDS = tl.constexpr(256)
NO_CODE = tl.constexpr(16)
RAW_CHUNK = tl.constexpr(0xFFFF)
MASK32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _both(a, b):
    """A mask of two. Triton 3.9's interpreter takes no ``&`` of masks as a mask."""
    return (a.to(tl.int32) & b.to(tl.int32)) != 0


@triton.jit
def _first_element(chunks, page_stride, head_stride, chunk):
    page = tl.load(chunks + 4 * chunk)
    head = tl.load(chunks + 4 * chunk + 1)
    return page * page_stride + head * head_stride + tl.load(chunks + 4 * chunk + 2)


@triton.jit
def _load(plane, first, length, k):
    """Elements 4 w + k of a chunk as int32 patterns, zero past its length."""
    i = 4 * tl.arange(0, WORDS) + k
    return tl.load(plane + first + i, mask=i < length, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def _code(pattern, table, i, length):
    """The code of each element, `NO_CODE` for an escape, 0 past the length."""
    return tl.load(table + (pattern >> 7 & 0xFF), mask=i < length, other=0).to(tl.int32)


@triton.jit
def _digest(e0, e1, e2, e3, keys_lo, keys_hi, length):
    """`checksum.digest_chunks` of one chunk."""
    w = tl.arange(0, WORDS)
    used = 4 * w < length
    low = e0.to(tl.int64) | e1.to(tl.int64) << 16
    high = e2.to(tl.int64) | e3.to(tl.int64) << 16
    a = (low + tl.load(keys_lo + w)) & MASK32
    b = (high + tl.load(keys_hi + w)) & MASK32
    return tl.sum(tl.where(used, a * b + a + b, 0), axis=0)


@triton.jit
def survey_kernel(
    plane, page_stride, head_stride, chunks, table, keys_lo, keys_hi, counts, digests
):
    """Count each chunk's escapes and digest it; writes `counts` int32, `digests` int64."""
    chunk = tl.program_id(0).to(tl.int64)
    first = _first_element(chunks, page_stride, head_stride, chunk)
    length = tl.load(chunks + 4 * chunk + 3)
    e0 = _load(plane, first, length, 0)
    e1 = _load(plane, first, length, 1)
    e2 = _load(plane, first, length, 2)
    e3 = _load(plane, first, length, 3)
    i = 4 * tl.arange(0, WORDS)
    escapes = (_code(e0, table, i, length) >> 4) + (_code(e1, table, i + 1, length) >> 4)
    escapes += (_code(e2, table, i + 2, length) >> 4) + (_code(e3, table, i + 3, length) >> 4)
    tl.store(counts + chunk, tl.sum(escapes, axis=0))
    tl.store(digests + chunk, _digest(e0, e1, e2, e3, keys_lo, keys_hi, length))


@triton.jit
def _store_sign(block, at, pattern, i, length):
    sign = pattern >> 8 & 0x80 | pattern & 0x7F
    tl.store(block + at + i, sign.to(tl.uint8), mask=i < length)


@triton.jit
def _store_escape(block, tail, rank, pattern, i, escaped):
    entry = block + tail + 3 * rank
    tl.store(entry, (i & 0xFF).to(tl.uint8), mask=escaped)
    tl.store(entry + 1, (i >> 8).to(tl.uint8), mask=escaped)
    tl.store(entry + 2, (pattern >> 7 & 0xFF).to(tl.uint8), mask=escaped)


@triton.jit
def encode_kernel(plane, page_stride, head_stride, chunks, starts, table, counts, block):
    """Write the four streams of a block whose tails' places are known."""
    chunk = tl.program_id(0).to(tl.int64)
    first = _first_element(chunks, page_stride, head_stride, chunk)
    length = tl.load(chunks + 4 * chunk + 3)
    codes = tl.load(starts + 3 * chunk)
    signs = tl.load(starts + 3 * chunk + 1)
    tail = tl.load(starts + 3 * chunk + 2)
    count = tl.load(counts + chunk)
    tl.store(block + 2 * chunk, (count & 0xFF).to(tl.uint8))
    tl.store(block + 2 * chunk + 1, (count >> 8).to(tl.uint8))
    full = count == RAW_CHUNK

    w = tl.arange(0, WORDS)
    i = 4 * w
    e0 = _load(plane, first, length, 0)
    e1 = _load(plane, first, length, 1)
    e2 = _load(plane, first, length, 2)
    e3 = _load(plane, first, length, 3)
    _store_sign(block, signs, e0, i, length)
    _store_sign(block, signs, e1, i + 1, length)
    _store_sign(block, signs, e2, i + 2, length)
    _store_sign(block, signs, e3, i + 3, length)

    c0 = _code(e0, table, i, length)
    c1 = _code(e1, table, i + 1, length)
    c2 = _code(e2, table, i + 2, length)
    c3 = _code(e3, table, i + 3, length)
    low01 = tl.where(full, e0 >> 7 & 0xF | (e1 >> 7 & 0xF) << 4, c0 & 0xF | (c1 & 0xF) << 4)
    low23 = tl.where(full, e2 >> 7 & 0xF | (e3 >> 7 & 0xF) << 4, c2 & 0xF | (c3 & 0xF) << 4)
    tl.store(block + codes + 2 * w, low01.to(tl.uint8), mask=i < length)
    tl.store(block + codes + 2 * w + 1, low23.to(tl.uint8), mask=i + 2 < length)

    high01 = e0 >> 11 & 0xF | (e1 >> 11 & 0xF) << 4
    high23 = e2 >> 11 & 0xF | (e3 >> 11 & 0xF) << 4
    tl.store(block + tail + 2 * w, high01.to(tl.uint8), mask=_both(full, i < length))
    tl.store(block + tail + 2 * w + 1, high23.to(tl.uint8), mask=_both(full, i + 2 < length))

    s0, s1, s2, s3 = c0 >> 4, c1 >> 4, c2 >> 4, c3 >> 4
    in_word = s0 + s1 + s2 + s3
    rank = tl.cumsum(in_word, axis=0) - in_word
    sparse = count != RAW_CHUNK
    _store_escape(block, tail, rank, e0, i, _both(sparse, s0 > 0))
    _store_escape(block, tail, rank + s0, e1, i + 1, _both(sparse, s1 > 0))
    _store_escape(block, tail, rank + s0 + s1, e2, i + 2, _both(sparse, s2 > 0))
    _store_escape(block, tail, rank + s0 + s1 + s2, e3, i + 3, _both(sparse, s3 > 0))


@triton.jit
def scan_kernel(chunks, starts, counts, block, disorder):
    """Set `disorder` int32 to 1 for a chunk whose escape positions do not ascend within it."""
    chunk = tl.program_id(0).to(tl.int64)
    length = tl.load(chunks + 4 * chunk + 3)
    entry = block + tl.load(starts + 3 * chunk + 2)
    count = tl.load(counts + chunk)
    count = tl.where(count == RAW_CHUNK, 0, count)
    n = tl.arange(0, WORDS)
    position = _position(entry + 3 * n, n < count)
    previous = tl.where(n > 0, _position(entry + 3 * n - 3, _both(n > 0, n < count)), -1)
    wrong = (n < count) & ((position >= length) | (position <= previous))
    tl.store(disorder + chunk, tl.max(wrong.to(tl.int32), axis=0))


@triton.jit
def _position(entry, mask):
    low = tl.load(entry, mask=mask, other=0).to(tl.int32)
    return low | tl.load(entry + 1, mask=mask, other=0).to(tl.int32) << 8


@triton.jit
def _store_dense(plane, first, block, signs, i, length, exponent):
    sign = tl.load(block + signs + i, mask=i < length, other=0).to(tl.int32)
    pattern = (sign & 0x80) << 8 | exponent << 7 | sign & 0x7F
    tl.store(plane + first + i, pattern.to(tl.int16), mask=i < length)


@triton.jit
def decode_kernel(
    plane, page_stride, head_stride, chunks, starts, book, counts, block, keys_lo, keys_hi, digests
):
    """Write the elements of a scanned block, escapes over the dense ones, then digest them."""
    chunk = tl.program_id(0).to(tl.int64)
    first = _first_element(chunks, page_stride, head_stride, chunk)
    length = tl.load(chunks + 4 * chunk + 3)
    codes = tl.load(starts + 3 * chunk)
    signs = tl.load(starts + 3 * chunk + 1)
    tail = tl.load(starts + 3 * chunk + 2)
    count = tl.load(counts + chunk)
    full = count == RAW_CHUNK

    w = tl.arange(0, WORDS)
    i = 4 * w
    low01 = tl.load(block + codes + 2 * w, mask=i < length, other=0).to(tl.int32)
    low23 = tl.load(block + codes + 2 * w + 1, mask=i + 2 < length, other=0).to(tl.int32)
    high01 = tl.load(block + tail + 2 * w, mask=_both(full, i < length), other=0).to(tl.int32)
    high23 = tl.load(block + tail + 2 * w + 1, mask=_both(full, i + 2 < length), other=0).to(
        tl.int32
    )
    x0 = tl.where(full, low01 & 0xF | (high01 & 0xF) << 4, tl.load(book + (low01 & 0xF)))
    x1 = tl.where(full, low01 >> 4 | high01 & 0xF0, tl.load(book + (low01 >> 4)))
    x2 = tl.where(full, low23 & 0xF | (high23 & 0xF) << 4, tl.load(book + (low23 & 0xF)))
    x3 = tl.where(full, low23 >> 4 | high23 & 0xF0, tl.load(book + (low23 >> 4)))
    _store_dense(plane, first, block, signs, i, length, x0)
    _store_dense(plane, first, block, signs, i + 1, length, x1)
    _store_dense(plane, first, block, signs, i + 2, length, x2)
    _store_dense(plane, first, block, signs, i + 3, length, x3)

    # Other threads of the program wrote the dense elements that the escapes replace.
    tl.debug_barrier()
    escape = _both(w < count, count != RAW_CHUNK)
    position = _position(block + tail + 3 * w, escape)
    exponent = tl.load(block + tail + 3 * w + 2, mask=escape, other=0).to(tl.int32)
    sign = tl.load(block + signs + position, mask=escape, other=0).to(tl.int32)
    pattern = (sign & 0x80) << 8 | exponent << 7 | sign & 0x7F
    tl.store(plane + first + position, pattern.to(tl.int16), mask=escape)

    tl.debug_barrier()
    e0 = _load(plane, first, length, 0)
    e1 = _load(plane, first, length, 1)
    e2 = _load(plane, first, length, 2)
    e3 = _load(plane, first, length, 3)
    tl.store(digests + chunk, _digest(e0, e1, e2, e3, keys_lo, keys_hi, length))


@triton.jit
def pack_raw_kernel(plane, page_stride, head_stride, chunks, starts, block):
    """Write a raw block: the elements' bytes, the low one first."""
    chunk = tl.program_id(0).to(tl.int64)
    first = _first_element(chunks, page_stride, head_stride, chunk)
    length = tl.load(chunks + 4 * chunk + 3)
    i = tl.arange(0, 4 * WORDS)
    pattern = tl.load(plane + first + i, mask=i < length, other=0).to(tl.int32)
    to = block + tl.load(starts + chunk) + 2 * i
    tl.store(to, (pattern & 0xFF).to(tl.uint8), mask=i < length)
    tl.store(to + 1, (pattern >> 8 & 0xFF).to(tl.uint8), mask=i < length)


@triton.jit
def unpack_raw_kernel(
    plane, page_stride, head_stride, chunks, starts, block, keys_lo, keys_hi, digests
):
    """Write the elements of a raw block and digest them."""
    chunk = tl.program_id(0).to(tl.int64)
    first = _first_element(chunks, page_stride, head_stride, chunk)
    length = tl.load(chunks + 4 * chunk + 3)
    at = block + tl.load(starts + chunk)
    e0 = _unpack(plane, first, at, 0, length)
    e1 = _unpack(plane, first, at, 1, length)
    e2 = _unpack(plane, first, at, 2, length)
    e3 = _unpack(plane, first, at, 3, length)
    tl.store(digests + chunk, _digest(e0, e1, e2, e3, keys_lo, keys_hi, length))


@triton.jit
def _unpack(plane, first, at, k, length):
    i = 4 * tl.arange(0, WORDS) + k
    low = tl.load(at + 2 * i, mask=i < length, other=0).to(tl.int32)
    pattern = low | tl.load(at + 2 * i + 1, mask=i < length, other=0).to(tl.int32) << 8
    tl.store(plane + first + i, pattern.to(tl.int16), mask=i < length)
    return pattern
