"""The CPU backend's compiled loops over one chunk of a plane with codes. Arguments that recur:

source, target: address of the chunk's first element; its columns are all there.
columns: how many it has.
book: a record of `BOOK`, see `segments.py`.
parts: addresses of the chunk's parts of the streams and of its entries.
units: how many entries it has.
scratch: address of `SCRATCH_BYTES`, zeros when the segment begins.
"""

from typing import NamedTuple

import numpy as np

from codec.cpu.entries import (
    MAX_LISTED,
    POSITIONS,
    TOO_MANY,
    list_positions,
    read_levels,
    read_list,
    scan_list,
    scan_nibbles,
    scan_words,
    write_levels,
    write_list,
)
from codec.cpu.fields import (
    FIELD_BYTES,
    add_high_rests,
    codes_of_table,
    codes_of_window,
    exponents_of_table,
    fill,
    high_rests_of,
    join,
    read_bytes,
    read_pairs,
    rests_of,
    write_bytes,
    write_pairs,
)
from codec.cpu.jit import clear, compiled, copy, load, pointer, store
from codec.cpu.streams import (
    count_escapes3,
    count_escapes4,
    marks_of,
    unweave3,
    unweave4,
    unweave8,
    weave3,
    weave4,
    weave8,
)
from codec.cpu.sums import (
    Keys,
    Sum,
    add_fours,
    add_ones,
    sum_columns,
    sum_elements,
    sum_entries,
    tag_columns,
)
from codec.cpu.tables import Element, Record
from codec.format import COLUMNS, WORD_BYTES

_STREAMS = 3
"""Of codes, of the rests' low bits and of their high ones, which only some types have."""
_CODES = FIELD_BYTES
_RESTS = 2 * FIELD_BYTES
_HIGH = 3 * FIELD_BYTES
_MARKS = 4 * FIELD_BYTES
DIGESTS = _MARKS + WORD_BYTES * COLUMNS
_LISTED = DIGESTS + 8 * COLUMNS
_POSITIONS = _LISTED + WORD_BYTES * MAX_LISTED
SCRATCH_BYTES = _POSITIONS + 2 * POSITIONS
"""The chunk's fields come first, then what the names before say; a stream's fields in its order."""


class Parts(NamedTuple):
    """Addresses of a chunk's parts of the streams, in their order, and of its entries."""

    codes: int
    low: int
    high: int
    entries: int


@compiled
def encode_chunk(
    source: int, columns: int, element: Element, book: Record, parts: Parts, scratch: int
) -> tuple[int, int]:
    """Write a chunk; returns its entries' words, and its escapes."""
    fields, codes, rests = scratch, scratch + _CODES, scratch + _RESTS
    mantissa, exponent_mask = element.mantissa_bits, (1 << element.exponent_bits) - 1
    if columns < COLUMNS:
        fill(fields, book.lowest << mantissa)
    if element.size == 2:
        read_pairs(source, columns, fields)
    else:
        read_bytes(source, columns, fields)
    if book.window:
        escapes = codes_of_window(
            fields, mantissa, exponent_mask, book.lowest, book.count, book.escape, codes
        )
    else:
        escapes = codes_of_table(fields, mantissa, exponent_mask, book.codes, codes)
    units, most = 0, book.spilled * columns
    if escapes:
        units = _list_escapes(escapes, most, element, book, parts.entries, scratch)
    if units == most:
        _move_words(source, columns, element, book, parts, True)
        return units, escapes
    rests_of(fields, mantissa, element.exponent_bits, rests)
    if element.high_bits:
        high_rests_of(rests, scratch + _HIGH)
    for stream in range(_STREAMS):
        bits = _bits(stream, element, book)
        _weave(codes + FIELD_BYTES * stream, bits, columns, parts[stream])
    return units, escapes


@compiled
def _list_escapes(
    escapes: int, most: int, element: Element, book: Record, entries: int, scratch: int
) -> int:
    """Write the entries of a chunk's escapes, unless there would be `most`; returns how many."""
    if escapes >= most and not book.escape:
        return most
    marks, listed, positions = scratch + _MARKS, scratch + _LISTED, scratch + _POSITIONS
    marks_of(scratch + _CODES, 0, 4, marks)
    list_positions(marks, positions)
    if not book.escape:
        write_list(scratch, element, positions, escapes, entries)
        return escapes
    units = write_levels(scratch, element, positions, escapes, book, listed)
    if units > MAX_LISTED or units >= most:
        return most
    copy(listed, entries, WORD_BYTES * units)
    return units


@compiled
def decode_chunk(
    target: int, columns: int, element: Element, book: Record, parts: Parts, units: int,
    scratch: int,
) -> None:  # fmt: skip
    """Write the elements of a scanned chunk."""
    if units == book.spilled * columns:
        _move_words(target, columns, element, book, parts, False)
        return
    fields, codes, rests = scratch, scratch + _CODES, scratch + _RESTS
    for stream in range(_STREAMS):
        bits = _bits(stream, element, book)
        _unweave(parts[stream], bits, columns, codes + FIELD_BYTES * stream)
    if element.high_bits:
        add_high_rests(scratch + _HIGH, rests)
    positions, escapes = scratch + _POSITIONS, 0
    if units and book.escape:
        escapes = _find_escapes(columns, book, scratch)
    lowest = book.lowest
    if not book.window:
        exponents_of_table(codes, book.exponents)
        lowest = 0
    join(codes, lowest, rests, element.mantissa_bits, element.exponent_bits, fields)
    if escapes:
        read_levels(fields, element, positions, escapes, book, parts.entries)
    else:
        read_list(fields, element, parts.entries, units)
    if element.size == 2:
        write_pairs(fields, columns, target)
    else:
        write_bytes(fields, columns, target)


@compiled
def _find_escapes(columns: int, book: Record, scratch: int) -> int:
    """List the positions of a chunk's escape codes; returns how many there are."""
    marks = scratch + _MARKS
    marks_of(scratch + _CODES, 1, book.code_bits, marks)
    clear(marks + WORD_BYTES * columns, WORD_BYTES * (COLUMNS - columns))
    return list_positions(marks, scratch + _POSITIONS)


@compiled
def scan_chunk(
    length: int, columns: int, element: Element, book: Record, parts: Parts, units: int,
    scratch: int,
) -> int:  # fmt: skip
    """Whether a chunk's entries are valid: 0, or why not, see `entries.py`."""
    most = book.spilled * columns
    if units >= most:
        return TOO_MANY if units > most else 0
    if not book.escape:
        return scan_list(element, length, columns, parts.entries, units)
    if book.code_bits == 4:
        escapes = count_escapes4(parts.codes, columns)
    else:
        escapes = count_escapes3(parts.codes, columns)
    error, second = scan_nibbles(escapes, book, parts.entries, units)
    if error or not second:
        return error
    _unweave(parts.codes, book.code_bits, columns, scratch + _CODES)
    _find_escapes(columns, book, scratch)
    return scan_words(element, scratch + _POSITIONS, escapes, parts.entries)


@compiled
def sum_chunk(
    chunk: int, elements: int, columns: int, element: Element, book: Record, parts: Parts,
    units: int, scratch: int, keys: Keys,
) -> Sum:  # fmt: skip
    """What chunk number `chunk` of the segment, with these whole columns, adds to the checksum."""
    digests = scratch + DIGESTS
    if units == book.spilled * columns:
        return sum_elements(chunk, elements, columns, element, units, digests, keys)
    tag_columns(chunk, units, columns, digests)
    key = 0
    for stream in range(_STREAMS):
        bits, words = _bits(stream, element, book), parts[stream]
        if bits == 3:
            add_ones(words, columns, keys, key, digests)
        else:
            for word in range(0, bits, 4):
                add_fours(words + WORD_BYTES * columns * word, columns, keys, key + word, digests)
        key += bits
    return sum_columns(digests, columns) + sum_entries(chunk, parts.entries, units)


@compiled
def _bits(stream: int, element: Element, book: Record) -> int:
    """Of an element in a stream, by its number; 0 if there is no such stream."""
    if stream == 0:
        return int(book.code_bits)
    return element.low_bits if stream == 1 else element.high_bits


@compiled
def _weave(fields: int, bits: int, columns: int, stream: int) -> None:
    if bits == 8:
        weave8(fields, columns, stream)
    elif bits == 4:
        weave4(fields, columns, stream)
    elif bits == 3:
        weave3(fields, columns, stream)


@compiled
def _unweave(stream: int, bits: int, columns: int, fields: int) -> None:
    if bits == 8:
        unweave8(stream, columns, fields)
    elif bits == 4:
        unweave4(stream, columns, fields)
    elif bits == 3:
        unweave3(stream, columns, fields)


@compiled
def _move_words(
    elements: int, columns: int, element: Element, book: Record, parts: Parts, to_streams: bool
) -> None:
    """The words of a chunk stored in full, to the streams and entries or from there."""
    in_row = 2 * element.size
    for word in range(4 * in_row):
        raw = elements + WORD_BYTES * (word // in_row * in_row * columns + word % in_row)
        place, step = _place_of(word, columns, element, book, parts)
        if to_streams:
            _move(raw, in_row, place, step, columns)
        else:
            _move(place, step, raw, in_row, columns)


@compiled
def _place_of(
    word: int, columns: int, element: Element, book: Record, parts: Parts
) -> tuple[int, int]:
    """Where the first column's word of this number lies, and how many words on the next one's."""
    stream, bits = parts.codes, book.code_bits
    if word >= bits:
        word, stream, bits = word - bits, parts.low, element.low_bits
        if word >= bits:
            word, stream, bits = word - bits, parts.high, element.high_bits
            if word >= bits:
                return parts.entries + WORD_BYTES * columns * (word - bits), 1
    if bits == 3:
        return stream + WORD_BYTES * columns * word, 1
    return stream + WORD_BYTES * (4 * columns * (word // 4) + word % 4), 4


@compiled
def _move(source: int, step: int, target: int, out_step: int, columns: int) -> None:
    data, out = pointer(source, np.uint32), pointer(target, np.uint32)
    for c in range(columns):
        store(out, out_step * c, load(data, step * c))
