# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Between memory and registers: one column of a chunk to a lane, one word of it to a register.

Every value is a tensor `[32]`, and a column a tuple of these: what a thread does is what is written
here, whatever layouts the compiler would choose. SIZE is an element's, in bytes.
"""

import triton
import triton.language as tl

from codec.gpu.kernels.words import LANES


@triton.jit
def place_of(
    i, head, run_chunks, full_pages, run, rest, run_columns, head_columns, PAGED: tl.constexpr
):  # fmt: skip
    """Of chunk ``i`` of a head: its page, first element in its run, length, and first column."""
    page = tl.minimum(i // run_chunks, full_pages) if PAGED else 0 * i
    start = (i - page * run_chunks).to(tl.int64) * 1024
    length = tl.minimum(1024, tl.where(page == full_pages, rest, run) - start).to(tl.int32)
    column = head.to(tl.int64) * head_columns + page.to(tl.int64) * run_columns + start // 32
    return page, start, length, column


@triton.jit
def of_plane(row, NUMBER: tl.constexpr, plane, first, step, EVEN: tl.constexpr):
    """A number of a plane's row, or of evenly spaced planes without a load to wait for."""
    if EVEN:
        value = first + plane.to(tl.int64) * step
    else:
        value = tl.load(row + NUMBER)
    return value


@triton.jit
def page_start(page_ids, page, page_stride, PAGED: tl.constexpr):
    """Where a page starts, in elements; 0 if there is but one, with which the plane starts."""
    if PAGED:
        start = tl.load(page_ids + page).to(tl.int64) * page_stride
    else:
        start = tl.zeros((), tl.int64)
    return start


@triton.jit
def element_at(place, lane, lanes, SIZE: tl.constexpr):
    """Which element of its chunk has this place in this column."""
    row = (place & 12) * 2 * lanes + lane * 8
    if SIZE == 2:
        inside = ((place & 3) << 1) | (place >> 4)
    else:
        inside = ((place & 2) << 1) | (place & 1) | ((place >> 4) << 1)
    return row + inside


@triton.jit
def apart(v, G: tl.constexpr):
    """`[32, G]` as G registers."""
    if G == 4:
        even, odd = tl.split(tl.reshape(v, [LANES, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        parts = (a, b, c, d)
    elif G == 2:
        parts = tl.split(v)
    else:
        parts = (tl.reshape(v, [LANES]),)
    return parts


@triton.jit
def together(words, FIRST: tl.constexpr, G: tl.constexpr):
    """G registers, from number FIRST on, as `[32, G]`."""
    if G == 4:
        even = tl.join(words[FIRST], words[FIRST + 2])
        odd = tl.join(words[FIRST + 1], words[FIRST + 3])
        v = tl.reshape(tl.join(even, odd), [LANES, 4])
    elif G == 2:
        v = tl.join(words[FIRST], words[FIRST + 1])
    else:
        v = tl.reshape(words[FIRST], [LANES, 1])
    return v


@triton.jit
def first_word(stream, column, BITS: tl.constexpr, G: tl.constexpr):
    """Where a column's words of a stream start, G of them in one access.

    The compiler is told so here: on what a function took or returned such a hint would be lost.
    """
    return tl.multiple_of(stream + column * BITS, G)


@triton.jit
def load_stream(p, lanes, COUNT: tl.constexpr, G: tl.constexpr):
    """COUNT words of each column; G of them lie together."""
    lane = tl.arange(0, LANES)[:, None]
    words = ()
    for g in tl.static_range(COUNT // G):
        at = p + g * G * lanes + (lane * G + tl.arange(0, G)[None, :])
        words = words + apart(tl.load(at, mask=lane < lanes, other=0), G)
    return words


@triton.jit
def store_stream(p, lanes, words, G: tl.constexpr):
    lane = tl.arange(0, LANES)[:, None]
    for g in tl.static_range(len(words) // G):
        at = p + g * G * lanes + (lane * G + tl.arange(0, G)[None, :])
        tl.store(at, together(words, g * G, G), mask=lane < lanes)


@triton.jit
def load_columns(
    xe, x32, at, lanes, length, pad, SIZE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """A chunk's words, from element ``at`` on; elements ``pad`` past its length."""
    if ALIGNED and length == 1024:
        p = x32 + tl.multiple_of(at * SIZE // 4, 2 * SIZE)
        words = load_stream(p, LANES, 8 * SIZE, 2 * SIZE)
    else:
        words = ()
        lane = tl.arange(0, LANES)
        for w in tl.static_range(8 * SIZE):
            first = ((w // (2 * SIZE)) * lanes + lane) * 8 + (w % (2 * SIZE)) * (4 // SIZE)
            word = tl.zeros((LANES,), tl.int32)
            for k in tl.static_range(4 // SIZE):
                here = (first + k < length) & (lane < lanes)
                e = tl.load(xe + at + first + k, mask=here, other=0).to(tl.int32)
                e = tl.where(here, e & (0xFFFF if SIZE == 2 else 0xFF), pad)
                word |= e << (8 * SIZE * k)
            words = words + (word,)
    return words


@triton.jit
def store_columns(
    ye, y32, at, words, lanes, length, SIZE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """A chunk's words to element ``at`` and on, and nothing past its length."""
    if ALIGNED and length == 1024:
        store_stream(y32 + tl.multiple_of(at * SIZE // 4, 2 * SIZE), LANES, words, 2 * SIZE)
    else:
        lane = tl.arange(0, LANES)
        for w in tl.static_range(8 * SIZE):
            first = ((w // (2 * SIZE)) * lanes + lane) * 8 + (w % (2 * SIZE)) * (4 // SIZE)
            for k in tl.static_range(4 // SIZE):
                e = words[w] >> (8 * SIZE * k)
                here = (first + k < length) & (lane < lanes)
                tl.store(ye + at + first + k, e.to(ye.dtype.element_ty), mask=here)
