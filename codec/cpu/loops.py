"""The CPU backend's compiled loops over segments. Loops only: `cpu.py` prepares their tables.

They take addresses and do not check: shapes, strides, pages and room were checked in `ops.py`, the
starts in `cpu.py`, and `scan_segment` goes over a payload's entries before `decode_segment` follows
them. Arguments that recur:

    places: addresses, see `Places`.
    planes, books, chunks: tables of `PLANE`, `BOOK` and `CHUNKS`, see `segments.py`.
    keys: u32 `[16]`, the checksum's.
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
from codec.cpu.tables import Element, Places, Record, Table
from codec.format import ALIGNMENT, CHUNK, COLUMN, WORD_BYTES

_PADDED_BYTES = 2 * CHUNK
"""A chunk's elements, filled up to whole columns, come first in the scratch."""
_BUFFER_BYTES = _PADDED_BYTES + SCRATCH_BYTES


@compiled
def _address(plane: Record, chunk: Record, element: Element) -> int:
    """The address of a chunk's first element."""
    run = plane.address + chunk.page * plane.page_stride + chunk.head * plane.head_stride
    return int(run + element.size * chunk.start)


@compiled
def _columns(chunk: Record) -> int:
    return int(chunk.length + COLUMN - 1) // COLUMN


@compiled
def _whole_columns(source: int, length: int, element: Element, padding: int, scratch: int) -> int:
    """Where a chunk's columns are whole: in place, or else in scratch, padded with a pattern."""
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
def _first_parts(plane: Record, places: Places, unit: int) -> Parts:
    """Of a block's first chunk, whose entries start `unit` words into the segment's."""
    segment, entries = places.segment, places.entries + WORD_BYTES * unit
    return Parts(segment + plane.codes, segment + plane.low, segment + plane.high, entries)


@compiled
def _next_parts(parts: Parts, columns: int, element: Element, book: Record, units: int) -> Parts:
    """Of the chunk after one of so many columns and entries; of a raw one, only `codes` counts."""
    stride = WORD_BYTES * columns
    return Parts(
        parts.codes + stride * (book.code_bits if book.code_bits else 8 * element.size),
        parts.low + stride * element.low_bits,
        parts.high + stride * element.high_bits,
        parts.entries + WORD_BYTES * units,
    )


@compiled
def _pad_streams(parts: Parts, plane: Record, book: Record, segment: int) -> None:
    """Zero what follows a block's last chunk in each stream."""
    clear(parts.codes, segment + plane.low - parts.codes)
    if book.code_bits:
        clear(parts.low, segment + plane.high - parts.low)
        clear(parts.high, segment + plane.end - parts.high)


@compiled
def _pad_words(address: int, words: int) -> None:
    """Zero what follows so many words, up to the next place where something may start."""
    size = WORD_BYTES * words
    clear(address + size, -size % ALIGNMENT)


@compiled
def _units(places: Places, start: int) -> int:
    """How many entries a chunk has, from its number among those with codes."""
    return load_word(places.starts, start + 1) - load_word(places.starts, start)


@compiled
def _keep(_buffer: NDArray[np.uint8]) -> None:
    """Its caller's last use of a buffer whose address is in use until then."""


@compiled
def encode_segment(
    places: Places, planes: Table, books: Table, chunks: Table, element: Element, keys: Keys
) -> tuple[int, int, Sum]:
    """Write starts, blocks and entries; returns the entries' words, the escapes, the checksum."""
    buffer = np.zeros(_BUFFER_BYTES, dtype=np.uint8)
    scratch = int(np.int64(buffer.ctypes.data))
    work, digests = scratch + _PADDED_BYTES, scratch + _PADDED_BYTES + DIGESTS
    start, unit, escapes, checksum = 0, 0, 0, np.uint64(0)
    for plane_number in range(len(planes)):
        plane, book = planes[plane_number], books[plane_number]
        parts, padding = _first_parts(plane, places, unit), book.lowest << element.mantissa_bits
        for chunk_number in range(len(chunks)):
            chunk = chunks[chunk_number]
            columns, source = _columns(chunk), _address(plane, chunk, element)
            source = _whole_columns(source, chunk.length, element, padding, scratch)
            number, units = plane_number * len(chunks) + chunk_number, 0
            if book.code_bits:
                units, escaped = encode_chunk(source, columns, element, book, parts, work)
                start, unit, escapes = start + 1, unit + units, escapes + escaped
                store_word(places.starts, start, unit)
                checksum += sum_chunk(
                    number, source, columns, element, book, parts, units, work, keys
                )
            else:
                copy(source, parts.codes, element.size * COLUMN * columns)
                checksum += sum_elements(number, source, columns, element, units, digests, keys)
            parts = _next_parts(parts, columns, element, book, units)
        _pad_streams(parts, plane, book, places.segment)
    if start:
        store_word(places.starts, 0, 0)
        _pad_words(places.starts, start + 1)
    _pad_words(places.entries, unit)
    _keep(buffer)
    return unit, escapes, checksum


@compiled
def scan_segment(
    places: Places, planes: Table, books: Table, chunks: Table, element: Element
) -> tuple[int, int]:
    """0, or what is wrong with a chunk's entries, and the number of its plane."""
    buffer = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
    scratch, start, unit = int(np.int64(buffer.ctypes.data)), 0, 0
    for number in range(len(planes)):
        book = books[number]
        if not book.code_bits:
            continue
        parts = _first_parts(planes[number], places, unit)
        for chunk in chunks:
            units, columns = _units(places, start), _columns(chunk)
            error = scan_chunk(chunk.length, columns, element, book, parts, units, scratch)
            if error:
                return error, number
            parts = _next_parts(parts, columns, element, book, units)
            start, unit = start + 1, unit + units
    _keep(buffer)
    return 0, 0


@compiled
def decode_segment(
    places: Places, planes: Table, books: Table, chunks: Table, element: Element, keys: Keys
) -> Sum:
    """Write all planes of a scanned payload; returns the checksum of what it says."""
    buffer = np.zeros(_BUFFER_BYTES, dtype=np.uint8)
    scratch = int(np.int64(buffer.ctypes.data))
    work, digests = scratch + _PADDED_BYTES, scratch + _PADDED_BYTES + DIGESTS
    start, unit, checksum = 0, 0, np.uint64(0)
    for plane_number in range(len(planes)):
        plane, book = planes[plane_number], books[plane_number]
        parts = _first_parts(plane, places, unit)
        for chunk_number in range(len(chunks)):
            chunk = chunks[chunk_number]
            columns, target = _columns(chunk), _address(plane, chunk, element)
            number, units = plane_number * len(chunks) + chunk_number, 0
            if book.code_bits:
                units, start = _units(places, start), start + 1
                whole = target if chunk.length % COLUMN == 0 else scratch
                decode_chunk(whole, columns, element, book, parts, units, work)
                if whole != target:
                    copy(whole, target, element.size * chunk.length)
                checksum += sum_chunk(
                    number, whole, columns, element, book, parts, units, work, keys
                )
            else:
                copy(parts.codes, target, element.size * chunk.length)
                checksum += sum_elements(
                    number, parts.codes, columns, element, units, digests, keys
                )
            unit, parts = unit + units, _next_parts(parts, columns, element, book, units)
    _keep(buffer)
    return checksum


@compiled
def checksum_segment(planes: Table, chunks: Table, element: Element, keys: Keys) -> Sum:
    """The checksum of the content, as if all planes were stored raw."""
    buffer = np.zeros(_BUFFER_BYTES, dtype=np.uint8)
    scratch, checksum = int(np.int64(buffer.ctypes.data)), np.uint64(0)
    digests = scratch + _PADDED_BYTES + DIGESTS
    for plane_number in range(len(planes)):
        for chunk_number in range(len(chunks)):
            chunk, number = chunks[chunk_number], plane_number * len(chunks) + chunk_number
            source = _address(planes[plane_number], chunk, element)
            source = _whole_columns(source, chunk.length, element, 0, scratch)
            checksum += sum_elements(number, source, _columns(chunk), element, 0, digests, keys)
    _keep(buffer)
    return checksum
