# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Loads and stores between memory and registers: one column per lane, one word per register.

A vector is `[32]`, one element per lane. A column is a tuple of such vectors, one for each of its
words. This fixes which values each thread holds, independently of the compiler's layouts.
"""

import triton
import triton.language as tl

from codec.gpu.kernels.parameters import (
    CODES_STREAM,
    FIRST_PAGE,
    FULL_PAGES,
    LAST_RUN,
    PLANE_START,
    SEGMENT,
)
from codec.gpu.kernels.words import LANES


@triton.jit
def locate_chunk(
    i, head, full_pages, last_run, run_chunks, run_elements, run_columns, PAGED: tl.constexpr
):
    """Locate a chunk of a head.

    Args:
        i: index of the chunk among the chunks of the head.
        head: index of the KV head.
        full_pages: number of pages whose slots are all used.
        last_run: number of elements of the head in the last, partly used page; 0 if there is none.

    Returns:
        Index of the chunk's page in the segment; index of its first element within the run; its
        number of elements; and index of its first column in the plane.
    """
    page = tl.minimum(i // run_chunks, full_pages) if PAGED else 0 * i
    start = (i - page * run_chunks).to(tl.int64) * 1024
    run = tl.where(page == full_pages, last_run, run_elements)
    length = tl.minimum(1024, run - start).to(tl.int32)
    head_columns = full_pages.to(tl.int64) * run_columns + (last_run + 31) // 32
    first_column = head.to(tl.int64) * head_columns + page.to(tl.int64) * run_columns + start // 32
    return page, start, length, first_column


@triton.jit
def load_row(row, run_chunks):
    """Load the fields of a plane row that every program needs, to overlap their latency.

    Returns:
        Word offset of the segment from the base address; word offset of the plane's first stream;
        offset of the plane in elements; index of the first page id; `full_pages` and `last_run`,
        see `locate_chunk`; and number of chunks of a head.
    """
    segment = tl.load(row + SEGMENT)
    codes_start = segment + tl.load(row + CODES_STREAM)
    plane_start = tl.load(row + PLANE_START)
    first_page = tl.load(row + FIRST_PAGE)
    full_pages = tl.load(row + FULL_PAGES).to(tl.int32)
    last_run = tl.load(row + LAST_RUN)
    head_chunks = full_pages * run_chunks + ((last_run + 1023) // 1024).to(tl.int32)
    return segment, codes_start, plane_start, first_page, full_pages, last_run, head_chunks


@triton.jit
def page_offset(page_ids, page, page_stride, PAGED: tl.constexpr):
    """Return the offset of a page in its plane, in elements; 0 if the plane has a single page.

    Args:
        page_ids: pointer to the segment's page ids.
        page: index of the page in the segment.
    """
    if PAGED:
        start = tl.load(page_ids + page) * page_stride
    else:
        start = tl.zeros((), tl.int64)
    return start


@triton.jit
def element_index(place, lane, num_columns, ELEMENT_BYTES: tl.constexpr):
    """Return the index in the chunk of the element at a place (0 to 31) of a lane's column."""
    row = (place & 12) * 2 * num_columns + lane * 8
    if ELEMENT_BYTES == 2:
        inside = ((place & 3) << 1) | (place >> 4)
    else:
        inside = ((place & 2) << 1) | (place & 1) | ((place >> 4) << 1)
    return row + inside


@triton.jit
def split_registers(v, G: tl.constexpr):
    """Split a tensor `[32, G]` into G vectors."""
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
def join_registers(words, FIRST: tl.constexpr, G: tl.constexpr):
    """Join the G vectors `words[FIRST : FIRST + G]` into a tensor `[32, G]`."""
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
def first_word(stream, first_column, BITS: tl.constexpr, G: tl.constexpr):
    """Return the offset of a column's first word in a stream that is accessed G words at a time.

    The alignment hint must be computed here, because function arguments and results lose it.
    """
    return tl.multiple_of(stream + first_column * BITS, G)


@triton.jit
def load_stream(p, num_columns, COUNT: tl.constexpr, G: tl.constexpr):
    """Load COUNT words of each column, in groups of G words that are contiguous in memory.

    Args:
        p: pointer to the chunk's first word in a stream, int32.

    Returns:
        Tuple of COUNT vectors, int32 `[32]`.
    """
    lane = tl.arange(0, LANES)[:, None]
    words = ()
    for g in tl.static_range(COUNT // G):
        at = p + g * G * num_columns + (lane * G + tl.arange(0, G)[None, :])
        words = words + split_registers(tl.load(at, mask=lane < num_columns, other=0), G)
    return words


@triton.jit
def store_stream(p, num_columns, words, G: tl.constexpr):
    """Store the words of each column, in groups of G words; inverse of `load_stream`."""
    lane = tl.arange(0, LANES)[:, None]
    for g in tl.static_range(len(words) // G):
        at = p + g * G * num_columns + (lane * G + tl.arange(0, G)[None, :])
        tl.store(at, join_registers(words, g * G, G), mask=lane < num_columns)


@triton.jit
def load_columns(
    source, source_words, at, num_columns, length, pad,
    ELEMENT_BYTES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load the words of a chunk, padded to whole columns.

    A full, aligned chunk is loaded with vector loads and without a mask.

    Args:
        source, source_words: pointer to the plane, as elements and as int32 words.
        at: index of the chunk's first element in the plane.
        length: number of elements of the chunk.
        pad: bit pattern of a padding element.
    """
    if ALIGNED and length == 1024:
        p = source_words + tl.multiple_of(at * ELEMENT_BYTES // 4, 2 * ELEMENT_BYTES)
        words = load_stream(p, LANES, 8 * ELEMENT_BYTES, 2 * ELEMENT_BYTES)
    else:
        words = ()
        lane = tl.arange(0, LANES)
        for w in tl.static_range(8 * ELEMENT_BYTES):
            first = ((w // (2 * ELEMENT_BYTES)) * num_columns + lane) * 8 + (
                w % (2 * ELEMENT_BYTES)
            ) * (4 // ELEMENT_BYTES)
            word = tl.zeros((LANES,), tl.int32)
            for k in tl.static_range(4 // ELEMENT_BYTES):
                here = (first + k < length) & (lane < num_columns)
                e = tl.load(source + at + first + k, mask=here, other=0).to(tl.int32)
                e = tl.where(here, e & (0xFFFF if ELEMENT_BYTES == 2 else 0xFF), pad)
                word |= e << (8 * ELEMENT_BYTES * k)
            words = words + (word,)
    return words


@triton.jit
def store_columns(
    target_elements, target_words, at, words, num_columns, length,
    ELEMENT_BYTES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store the words of a chunk without padding; see `load_columns` for the arguments."""
    if ALIGNED and length == 1024:
        store_stream(
            target_words + tl.multiple_of(at * ELEMENT_BYTES // 4, 2 * ELEMENT_BYTES),
            LANES,
            words,
            2 * ELEMENT_BYTES,
        )
    else:
        lane = tl.arange(0, LANES)
        for w in tl.static_range(8 * ELEMENT_BYTES):
            first = ((w // (2 * ELEMENT_BYTES)) * num_columns + lane) * 8 + (
                w % (2 * ELEMENT_BYTES)
            ) * (4 // ELEMENT_BYTES)
            for k in tl.static_range(4 // ELEMENT_BYTES):
                e = words[w] >> (8 * ELEMENT_BYTES * k)
                here = (first + k < length) & (lane < num_columns)
                tl.store(
                    target_elements + at + first + k,
                    e.to(target_elements.dtype.element_ty),
                    mask=here,
                )
