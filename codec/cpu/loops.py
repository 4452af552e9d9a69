"""Compiled loops over the chunks of a segment; `backend.py` prepares their tables.

The loops take addresses and do not check them. Shapes, strides, pages and sizes are checked in
`ops.py`, the table of entry starts in `backend.py`, and the entries by `scan_segment` before
`decode_segment` reads them. Common arguments:

    addresses: see `SegmentAddresses`.
    planes, books, chunks: tables of `PLANE`, `BOOK` and `CHUNKS`; see `tables.py`.
    keys: uint32 `[16]`, keys of the checksum.
"""

import numpy as np
from numpy.typing import NDArray

from codec.cpu.coded_chunks import (
    DIGESTS,
    SCRATCH_BYTES,
    Parts,
    decode_chunk,
    encode_chunk,
    scan_chunk,
    sum_chunk,
)
from codec.cpu.jit import clear, compiled, copy, load_word, pointer, store, store_word
from codec.cpu.sums import Keys, Sum, sum_elements
from codec.cpu.tables import Element, Record, SegmentAddresses, Table
from codec.format import ALIGNMENT, CHUNK, COLUMN, WORD_BYTES

_PADDED_BYTES = 2 * CHUNK
"""Size of the first part of the scratch memory: a copy of a chunk, padded to whole columns."""
_BUFFER_BYTES = _PADDED_BYTES + SCRATCH_BYTES


@compiled
def _address(plane: Record, chunk: Record, element: Element) -> int:
    """Return the address of a chunk's first element."""
    run = plane.address + chunk.page * plane.page_stride + chunk.head * plane.head_stride
    return int(run + element.size * chunk.start)


@compiled
def _columns(chunk: Record) -> int:
    return int(chunk.length + COLUMN - 1) // COLUMN


@compiled
def _whole_columns(source: int, length: int, element: Element, padding: int, scratch: int) -> int:
    """Return the address of a chunk with whole columns: `source`, or a padded copy in `scratch`."""
    if length % COLUMN == 0:
        return source
    for number in range(length, length + COLUMN - length % COLUMN):
        if element.size == 2:
            store(pointer(scratch, np.uint16), number, np.uint16(padding))
        else:
            store(pointer(scratch, np.uint8), number, np.uint8(padding))
    copy(source, scratch, element.size * length)
    return scratch


@compiled
def _first_parts(plane: Record, addresses: SegmentAddresses, entry_start: int) -> Parts:
    """Return the addresses of a block's first chunk, whose entries start at `entry_start`."""
    segment, entries = addresses.segment, addresses.entries + WORD_BYTES * entry_start
    return Parts(segment + plane.codes, segment + plane.low, segment + plane.high, entries)


@compiled
def _next_parts(
    parts: Parts, columns: int, element: Element, book: Record, entry_words: int
) -> Parts:
    """Return the addresses of the next chunk of a block.

    If the block is raw, only `codes` of the result is meaningful.

    Args:
        parts, columns, entry_words: addresses, columns and entry words of the current chunk.
    """
    stride = WORD_BYTES * columns
    return Parts(
        parts.codes + stride * (book.code_bits if book.code_bits else 8 * element.size),
        parts.low + stride * element.low_bits,
        parts.high + stride * element.high_bits,
        parts.entries + WORD_BYTES * entry_words,
    )


@compiled
def _pad_streams(parts: Parts, plane: Record, book: Record, segment: int) -> None:
    """Zero the padding after the last chunk in each stream of a block.

    Args:
        parts: addresses after the last chunk.
        segment: address of the segment.
    """
    clear(parts.codes, segment + plane.low - parts.codes)
    if book.code_bits:
        clear(parts.low, segment + plane.high - parts.low)
        clear(parts.high, segment + plane.end - parts.high)


@compiled
def _pad_words(address: int, words: int) -> None:
    """Zero the padding after `words` words, up to the next aligned offset."""
    size = WORD_BYTES * words
    clear(address + size, -size % ALIGNMENT)


@compiled
def _entry_words(addresses: SegmentAddresses, coded_chunk: int) -> int:
    """Return the number of entry words of a chunk.

    Args:
        coded_chunk: index of the chunk among the chunks of the planes with codes.
    """
    return load_word(addresses.starts, coded_chunk + 1) - load_word(addresses.starts, coded_chunk)


@compiled
def _keep_alive(_buffer: NDArray[np.uint8]) -> None:
    """Keep a buffer allocated until this call, because the loops hold only its address."""


@compiled
def encode_segment(
    addresses: SegmentAddresses,
    planes: Table,
    books: Table,
    chunks: Table,
    element: Element,
    keys: Keys,
) -> tuple[int, int, Sum]:
    """Write entry starts, blocks and entries of a segment.

    Returns:
        The number of entry words, the number of escapes, and the checksum.
    """
    buffer = np.zeros(_BUFFER_BYTES, dtype=np.uint8)
    scratch = int(np.int64(buffer.ctypes.data))
    work, digests = scratch + _PADDED_BYTES, scratch + _PADDED_BYTES + DIGESTS
    coded_chunk, entry_start, escapes, checksum = 0, 0, 0, np.uint64(0)
    for plane_number in range(len(planes)):
        plane, book = planes[plane_number], books[plane_number]
        parts = _first_parts(plane, addresses, entry_start)
        padding = book.lowest << element.mantissa_bits
        for chunk_number in range(len(chunks)):
            chunk = chunks[chunk_number]
            columns, source = _columns(chunk), _address(plane, chunk, element)
            source = _whole_columns(source, chunk.length, element, padding, scratch)
            number, entry_words = plane_number * len(chunks) + chunk_number, 0
            if book.code_bits:
                entry_words, escaped = encode_chunk(source, columns, element, book, parts, work)
                coded_chunk, escapes = coded_chunk + 1, escapes + escaped
                entry_start += entry_words
                store_word(addresses.starts, coded_chunk, entry_start)
                checksum += sum_chunk(
                    number, source, columns, element, book, parts, entry_words, work, keys
                )
            else:
                copy(source, parts.codes, element.size * COLUMN * columns)
                checksum += sum_elements(
                    number, source, columns, element, entry_words, digests, keys
                )
            parts = _next_parts(parts, columns, element, book, entry_words)
        _pad_streams(parts, plane, book, addresses.segment)
    if coded_chunk:
        store_word(addresses.starts, 0, 0)
        _pad_words(addresses.starts, coded_chunk + 1)
    _pad_words(addresses.entries, entry_start)
    _keep_alive(buffer)
    return entry_start, escapes, checksum


@compiled
def scan_segment(
    addresses: SegmentAddresses, planes: Table, books: Table, chunks: Table, element: Element
) -> tuple[int, int]:
    """Validate all entries; return 0 or an error code of `entries.py`, and the plane's index."""
    buffer = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
    scratch, coded_chunk, entry_start = int(np.int64(buffer.ctypes.data)), 0, 0
    for number in range(len(planes)):
        book = books[number]
        if not book.code_bits:
            continue
        parts = _first_parts(planes[number], addresses, entry_start)
        for chunk in chunks:
            entry_words, columns = _entry_words(addresses, coded_chunk), _columns(chunk)
            error = scan_chunk(chunk.length, columns, element, book, parts, entry_words, scratch)
            if error:
                return error, number
            parts = _next_parts(parts, columns, element, book, entry_words)
            coded_chunk, entry_start = coded_chunk + 1, entry_start + entry_words
    _keep_alive(buffer)
    return 0, 0


@compiled
def decode_segment(
    addresses: SegmentAddresses,
    planes: Table,
    books: Table,
    chunks: Table,
    element: Element,
    keys: Keys,
) -> Sum:
    """Decode a validated payload into all planes; return the checksum of its content."""
    buffer = np.zeros(_BUFFER_BYTES, dtype=np.uint8)
    scratch = int(np.int64(buffer.ctypes.data))
    work, digests = scratch + _PADDED_BYTES, scratch + _PADDED_BYTES + DIGESTS
    coded_chunk, entry_start, checksum = 0, 0, np.uint64(0)
    for plane_number in range(len(planes)):
        plane, book = planes[plane_number], books[plane_number]
        parts = _first_parts(plane, addresses, entry_start)
        for chunk_number in range(len(chunks)):
            chunk = chunks[chunk_number]
            columns, target = _columns(chunk), _address(plane, chunk, element)
            number, entry_words = plane_number * len(chunks) + chunk_number, 0
            if book.code_bits:
                entry_words, coded_chunk = _entry_words(addresses, coded_chunk), coded_chunk + 1
                whole = target if chunk.length % COLUMN == 0 else scratch
                decode_chunk(whole, columns, element, book, parts, entry_words, work)
                if whole != target:
                    copy(whole, target, element.size * chunk.length)
                checksum += sum_chunk(
                    number, whole, columns, element, book, parts, entry_words, work, keys
                )
            else:
                copy(parts.codes, target, element.size * chunk.length)
                checksum += sum_elements(
                    number, parts.codes, columns, element, entry_words, digests, keys
                )
            entry_start += entry_words
            parts = _next_parts(parts, columns, element, book, entry_words)
    _keep_alive(buffer)
    return checksum


@compiled
def checksum_segment(planes: Table, chunks: Table, element: Element, keys: Keys) -> Sum:
    """Return the checksum of planes, as if they were stored raw."""
    buffer = np.zeros(_BUFFER_BYTES, dtype=np.uint8)
    scratch, checksum = int(np.int64(buffer.ctypes.data)), np.uint64(0)
    digests = scratch + _PADDED_BYTES + DIGESTS
    for plane_number in range(len(planes)):
        for chunk_number in range(len(chunks)):
            chunk, number = chunks[chunk_number], plane_number * len(chunks) + chunk_number
            source = _address(planes[plane_number], chunk, element)
            source = _whole_columns(source, chunk.length, element, 0, scratch)
            checksum += sum_elements(number, source, _columns(chunk), element, 0, digests, keys)
    _keep_alive(buffer)
    return checksum
