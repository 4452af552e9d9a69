"""Compiled loops over the escapes of a chunk and their entries. Common arguments:

fields: address of the chunk's elements, uint32 `[16, 32]`; see `fields.py`.
count: number of escapes of the chunk.
masks: address of uint32 `[32]`: for each column, the bit mask of the places of its escapes.
positions: address of uint16 `[POSITIONS]`, positions of the escapes in the chunk, ascending.
entries: address of the chunk's `entry_words` entry words.
book: record of `BOOK`; see `tables.py`.
"""

import numpy as np

from codec.codebook import SECOND_CODES
from codec.cpu.jit import (
    compiled,
    load,
    load_word,
    pointer,
    popcount,
    store,
    store_word,
    trailing_zeros,
)
from codec.cpu.tables import Element, Record
from codec.format import CHUNK, COLUMN, COLUMNS, MAX_LISTED, MAX_NIBBLES

NIBBLES = 8
"""Number of second-level codes in an entry word."""
MAX_CHUNK_WORDS = MAX_NIBBLES // NIBBLES + MAX_LISTED
"""Maximum entry words of a coded chunk in a mode with an escape code."""
_AT_ONCE = 8
"""Minimum number of positions that `list_positions` stores for each pair of columns."""
POSITIONS = CHUNK + _AT_ONCE
"""Length of the positions buffer, with space for the invalid positions after the last escape."""

TOO_MANY, OUTSIDE, DISORDERED, EXPONENT, UNUSED, SECOND, COUNT, DISPLACED = range(1, 9)
"""Error codes of the `scan_` functions; `codec.cpu.backend` has their messages."""


@compiled
def list_positions(masks: int, positions: int) -> int:
    """Write the positions of the escapes; return their number.

    For each pair of columns, at least eight positions are stored. If the pair has fewer escapes,
    the excess positions are invalid, and the positions of the next pair overwrite them. A loop over
    the exact number of escapes would cause branch mispredictions.

    Args:
        masks: address of uint32 `[32]`: for each column, the bit mask of the places of its escapes.
        positions: address of uint16 `[POSITIONS]`, written.
    """
    data, out = pointer(masks, np.uint64), pointer(positions, np.uint16)
    count = 0
    for pair in range(COLUMNS // 2):
        left = load(data, pair)
        found = popcount(left)
        for i in range(_AT_ONCE):
            store(out, count + i, np.uint16(2 * COLUMN * pair + trailing_zeros(left)))
            left &= left - np.uint64(1)
        for i in range(_AT_ONCE, found):
            store(out, count + i, np.uint16(2 * COLUMN * pair + trailing_zeros(left)))
            left &= left - np.uint64(1)
        count += found
    return count


@compiled
def _field(position: int) -> int:
    """Return the index in uint16 `[16, 32, 2]` of the field of the element at a position."""
    return 2 * (COLUMNS * (position & 15) + (position >> 5)) + (position >> 4 & 1)


@compiled
def _position(positions: int, escape: int) -> int:
    return int(np.int64(load(pointer(positions, np.uint16), escape)))


@compiled
def _exponent(fields: int, position: int, element: Element) -> int:
    value = np.int64(load(pointer(fields, np.uint16), _field(position)))
    return int(value >> element.mantissa_bits & (1 << element.exponent_bits) - 1)


@compiled
def _put_exponent(fields: int, position: int, element: Element, exponent: int) -> None:
    data, field = pointer(fields, np.uint16), _field(position)
    mask = (1 << element.exponent_bits) - 1 << element.mantissa_bits
    value = np.int64(load(data, field)) & ~mask | exponent << element.mantissa_bits
    store(data, field, np.uint16(value))


@compiled
def write_list(fields: int, element: Element, positions: int, count: int, entries: int) -> None:
    """Write the entries of a chunk of a `TOP16` plane: one word for each of `count` escapes.

    `fields`, `positions` and `entries` are addresses; see the head of this file.
    """
    for i in range(count):
        position = _position(positions, i)
        store_word(entries, i, _exponent(fields, position, element) << 16 | position)


@compiled
def write_levels(
    fields: int, element: Element, positions: int, count: int, book: Record, entries: int
) -> int:
    """Write the entries of a chunk with `count` escapes, in a mode with an escape code.

    `fields`, `positions` and `entries` are addresses; see the head of this file.

    Returns:
        The number of entry words, or `MAX_CHUNK_WORDS` + 1 if the chunk has too many escapes.
    """
    if count > MAX_NIBBLES:
        return MAX_CHUNK_WORDS + 1
    second_codes = book.second_codes
    nibble_words, nibbles, second = (count + NIBBLES - 1) // NIBBLES, 0, 0
    for i in range(count):
        position = _position(positions, i)
        exponent = _exponent(fields, position, element)
        nibble = int(np.int64(second_codes[exponent]))
        nibbles |= nibble << 4 * (i % NIBBLES)
        if nibble == SECOND_CODES:
            if second == MAX_LISTED:
                return MAX_CHUNK_WORDS + 1
            store_word(entries, nibble_words + second, exponent << 16 | position)
            second += 1
        if i % NIBBLES == NIBBLES - 1 or i == count - 1:
            store_word(entries, i // NIBBLES, nibbles)
            nibbles = 0
    return nibble_words + second


@compiled
def read_list(fields: int, element: Element, entries: int, entry_words: int) -> None:
    """Write the exponents of validated `TOP16` entries into the fields of their elements.

    `fields` and `entries` are addresses; see the head of this file.
    """
    for i in range(entry_words):
        entry = load_word(entries, i)
        _put_exponent(fields, entry & CHUNK - 1, element, entry >> 16)


@compiled
def read_levels(
    fields: int, element: Element, positions: int, count: int, book: Record, entries: int
) -> None:
    """Write the exponents of `count` validated escapes into the fields of their elements.

    `fields`, `positions` and `entries` are addresses; see the head of this file.
    """
    second_exponents, second = book.second_exponents, (count + NIBBLES - 1) // NIBBLES
    for i in range(count):
        nibble = load_word(entries, i // NIBBLES) >> 4 * (i % NIBBLES) & 15
        if nibble == SECOND_CODES:
            exponent = load_word(entries, second) >> 16
            second += 1
        else:
            exponent = int(np.int64(second_exponents[nibble]))
        _put_exponent(fields, _position(positions, i), element, exponent)


@compiled
def _element_index(position: int, columns: int, element: Element) -> int:
    """Return the index in the chunk of the element at a position."""
    column, side, row, pair = position >> 5, position >> 4 & 1, position >> 2 & 3, position & 3
    in_row = 2 * pair + side if element.size == 2 else 4 * (pair >> 1) + (pair & 1) + 2 * side
    return 8 * (row * columns + column) + in_row


@compiled
def _scan_word(entry: int, element: Element) -> int:
    exponent = entry >> 16
    if exponent >> element.exponent_bits:
        return EXPONENT
    return UNUSED if entry != exponent << 16 | entry & CHUNK - 1 else 0


@compiled
def scan_list(element: Element, length: int, columns: int, entries: int, entry_words: int) -> int:
    """Validate the `TOP16` entries of a chunk of `length` elements; return 0 or an error code."""
    last = -1
    for i in range(entry_words):
        entry = load_word(entries, i)
        position, error = entry & CHUNK - 1, _scan_word(entry, element)
        if error:
            return error
        if position >> 5 >= columns or _element_index(position, columns, element) >= length:
            return OUTSIDE
        if position <= last:
            return DISORDERED
        last = position
    return 0


@compiled
def scan_nibbles(count: int, book: Record, entries: int, entry_words: int) -> tuple[int, int]:
    """Validate the second-level codes of a chunk with `count` escapes, and its `entry_words`.

    Returns:
        0 or an error code, and the number of listed escapes.
    """
    nibble_words, second = (count + NIBBLES - 1) // NIBBLES, 0
    if count > MAX_NIBBLES or nibble_words > entry_words:
        return TOO_MANY, 0
    for i in range(count):
        nibble = load_word(entries, i // NIBBLES) >> 4 * (i % NIBBLES) & 15
        if nibble == SECOND_CODES:
            second += 1
        elif nibble >= book.num_second:
            return SECOND, 0
    if count % NIBBLES and load_word(entries, nibble_words - 1) >> 4 * (count % NIBBLES):
        return UNUSED, 0
    if second > MAX_LISTED or nibble_words + second != entry_words:
        return COUNT, 0
    return 0, second


@compiled
def scan_words(element: Element, positions: int, count: int, entries: int) -> int:
    """Validate the entry words of listed escapes; return 0 or an error code.

    Args:
        positions: address of the positions of the chunk's `count` escapes.
        entries: address of the chunk's entries.
    """
    second = (count + NIBBLES - 1) // NIBBLES
    for i in range(count):
        nibble = load_word(entries, i // NIBBLES) >> 4 * (i % NIBBLES) & 15
        if nibble == SECOND_CODES:
            entry = load_word(entries, second)
            error = _scan_word(entry, element)
            if error:
                return error
            if entry & CHUNK - 1 != _position(positions, i):
                return DISPLACED
            second += 1
    return 0
