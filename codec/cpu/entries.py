"""The CPU backend's compiled loops over a chunk's escapes and its entries.

Arguments that recur:

    fields: address of the chunk's elements, u32 `[16][32]`, see `fields.py`.
    marks: address of a u32 for each of 32 columns, 1 at the places of escapes.
    positions: address of u16 `[POSITIONS]`, those of the escapes.
    entries: address of the chunk's entries; `units` is how many there are.
    book: a record of `BOOK`, see `segments.py`.
"""

import numpy as np

from codec.codebook import SECOND_CODES
from codec.cpu.jit import compiled, load, load_word, lowest, ones, pointer, store, store_word
from codec.cpu.tables import Element, Record
from codec.format import CHUNK, COLUMN, COLUMNS, MAX_NIBBLES, MAX_SECOND

NIBBLES = 8
"""Second-level codes in a word."""
MAX_LISTED = MAX_NIBBLES // NIBBLES + MAX_SECOND
"""Words of a chunk's entries in a mode with an escape code, unless it is stored in full."""
_AT_ONCE = 8
POSITIONS = CHUNK + _AT_ONCE

TOO_MANY, OUTSIDE, DISORDERED, EXPONENT, UNUSED, SECOND, COUNT, DISPLACED = range(1, 9)
"""What may be wrong with a chunk's entries."""


@compiled
def list_positions(marks: int, positions: int) -> int:
    """Write the escapes' positions; returns how many there are.

    Always eight for two columns, since as many turns as there are marks cannot be predicted.
    """
    data, out = pointer(marks, np.uint64), pointer(positions, np.uint16)
    count = 0
    for pair in range(COLUMNS // 2):
        left = load(data, pair)
        found = ones(left)
        for i in range(_AT_ONCE):
            store(out, count + i, np.uint16(2 * COLUMN * pair + lowest(left)))
            left &= left - np.uint64(1)
        for i in range(_AT_ONCE, found):
            store(out, count + i, np.uint16(2 * COLUMN * pair + lowest(left)))
            left &= left - np.uint64(1)
        count += found
    return count


@compiled
def _field(position: int) -> int:
    """The number of an element's field among u16 `[16][32][2]`."""
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
    """Write the entries of a chunk in `TOP16`: a word for each escape."""
    for i in range(count):
        position = _position(positions, i)
        store_word(entries, i, _exponent(fields, position, element) << 16 | position)


@compiled
def write_levels(
    fields: int, element: Element, positions: int, count: int, book: Record, entries: int
) -> int:
    """Write up to `MAX_LISTED` entries of a chunk in a mode with an escape code.

    Returns how many there are, or one more than that if there would be more.
    """
    if count > MAX_NIBBLES:
        return MAX_LISTED + 1
    second_codes = book.second_codes
    nibble_words, nibbles, second = (count + NIBBLES - 1) // NIBBLES, 0, 0
    for i in range(count):
        position = _position(positions, i)
        exponent = _exponent(fields, position, element)
        nibble = int(np.int64(second_codes[exponent]))
        nibbles |= nibble << 4 * (i % NIBBLES)
        if nibble == SECOND_CODES:
            if second == MAX_SECOND:
                return MAX_LISTED + 1
            store_word(entries, nibble_words + second, exponent << 16 | position)
            second += 1
        if i % NIBBLES == NIBBLES - 1 or i == count - 1:
            store_word(entries, i // NIBBLES, nibbles)
            nibbles = 0
    return nibble_words + second


@compiled
def read_list(fields: int, element: Element, entries: int, units: int) -> None:
    """Put the exponents that a scanned list names at their places."""
    for i in range(units):
        entry = load_word(entries, i)
        _put_exponent(fields, entry & CHUNK - 1, element, entry >> 16)


@compiled
def read_levels(
    fields: int, element: Element, positions: int, count: int, book: Record, entries: int
) -> None:
    """Put the exponents that scanned entries name at the places of the escape codes."""
    seconds, second = book.seconds, (count + NIBBLES - 1) // NIBBLES
    for i in range(count):
        nibble = load_word(entries, i // NIBBLES) >> 4 * (i % NIBBLES) & 15
        if nibble == SECOND_CODES:
            exponent = load_word(entries, second) >> 16
            second += 1
        else:
            exponent = int(np.int64(seconds[nibble]))
        _put_exponent(fields, _position(positions, i), element, exponent)


@compiled
def _number(position: int, columns: int, element: Element) -> int:
    """Which element of its chunk has this position."""
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
def scan_list(element: Element, length: int, columns: int, entries: int, units: int) -> int:
    """Whether a list of a chunk of `length` elements is valid: 0, or why not."""
    last = -1
    for i in range(units):
        entry = load_word(entries, i)
        position, error = entry & CHUNK - 1, _scan_word(entry, element)
        if error:
            return error
        if position >> 5 >= columns or _number(position, columns, element) >= length:
            return OUTSIDE
        if position <= last:
            return DISORDERED
        last = position
    return 0


@compiled
def scan_nibbles(count: int, book: Record, entries: int, units: int) -> tuple[int, int]:
    """Whether the second-level codes of so many escapes are valid, and words as many as needed.

    Returns 0 or why not, and how many escapes have a word.
    """
    nibble_words, second = (count + NIBBLES - 1) // NIBBLES, 0
    if count > MAX_NIBBLES or nibble_words > units:
        return TOO_MANY, 0
    for i in range(count):
        nibble = load_word(entries, i // NIBBLES) >> 4 * (i % NIBBLES) & 15
        if nibble == SECOND_CODES:
            second += 1
        elif nibble >= book.num_seconds:
            return SECOND, 0
    if count % NIBBLES and load_word(entries, nibble_words - 1) >> 4 * (count % NIBBLES):
        return UNUSED, 0
    if second > MAX_SECOND or nibble_words + second != units:
        return COUNT, 0
    return 0, second


@compiled
def scan_words(element: Element, positions: int, count: int, entries: int) -> int:
    """Whether the words of escapes, whose second-level codes are valid, are: 0, or why not."""
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
