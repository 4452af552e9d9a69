"""Compiled loops of the checksum; `codec/checksum.py` defines it.

Common arguments:

    chunk: index of the chunk in the segment.
    words: address of uint32 words of the chunk in one stream.
    digests: address of uint64 `[32]`, in which the digests of a chunk's columns are accumulated.
    columns: number of columns.
    keys: uint32 `[16]`, keys of the checksum.
    key: index in `keys` of the key of the first word.
    entry_words: number of entry words of the chunk.

All sums are uint64 and wrap around.
"""

import numpy as np
from numpy.typing import NDArray

from codec.checksum import ENTRY_COUNT_BITS, GOLDEN
from codec.cpu.jit import compiled, load, pointer, store
from codec.cpu.tables import Element
from codec.format import COLUMNS

Keys = NDArray[np.uint32]
Sum = np.uint64

_u = np.uint64
_GOLDEN = _u(GOLDEN)
_LOW = _u(0xFFFF_FFFF)


@compiled
def _fold(value: Sum) -> Sum:
    value = (value ^ value >> _u(32)) * _GOLDEN
    return value ^ value >> _u(32)


@compiled
def tag_columns(chunk: int, entry_words: int, columns: int, digests: int) -> None:
    """Initialize the digests of a chunk's columns with `chunk` and `entry_words`."""
    out = pointer(digests, np.uint64)
    for c in range(columns):
        store(out, c, _u(COLUMNS * chunk + c << ENTRY_COUNT_BITS | entry_words) * _GOLDEN)


@compiled
def add_quads(words: int, columns: int, keys: Keys, key: int, digests: int) -> None:
    """Add four words of each column to `digests`, multiplied by `keys[key : key + 4]`.

    The words are uint32 `[columns, 4]` at address `words`.
    """
    data, out = pointer(words, np.uint64), pointer(digests, np.uint64)
    key0, key1, key2, key3 = _u(keys[key]), _u(keys[key + 1]), _u(keys[key + 2]), _u(keys[key + 3])
    for c in range(columns):
        first, second = load(data, 2 * c), load(data, 2 * c + 1)
        added = (first & _LOW) * key0 + (first >> _u(32)) * key1
        added += (second & _LOW) * key2 + (second >> _u(32)) * key3
        store(out, c, load(out, c) + added)


@compiled
def add_pairs(words: int, columns: int, keys: Keys, key: int, digests: int) -> None:
    """Add two words of each column to `digests`, multiplied by `keys[key : key + 2]`.

    The words are uint32 `[columns, 2]` at address `words`.
    """
    data, out = pointer(words, np.uint64), pointer(digests, np.uint64)
    key0, key1 = _u(keys[key]), _u(keys[key + 1])
    for c in range(columns):
        both = load(data, c)
        store(out, c, load(out, c) + (both & _LOW) * key0 + (both >> _u(32)) * key1)


@compiled
def add_triples(words: int, columns: int, keys: Keys, key: int, digests: int) -> None:
    """Add three words of each column to `digests`, multiplied by `keys[key : key + 3]`.

    The words are uint32 `[3, columns]` at address `words`.
    """
    data, out = pointer(words, np.uint32), pointer(digests, np.uint64)
    key0, key1, key2 = _u(keys[key]), _u(keys[key + 1]), _u(keys[key + 2])
    for c in range(columns):
        added = _u(load(data, c)) * key0 + _u(load(data, columns + c)) * key1
        added += _u(load(data, 2 * columns + c)) * key2
        store(out, c, load(out, c) + added)


@compiled
def sum_columns(digests: int, columns: int) -> Sum:
    """Return the sum of the checksum terms of a chunk's columns, from their final digests."""
    data, total = pointer(digests, np.uint64), _u(0)
    for c in range(columns):
        total += _fold(load(data, c))
    return total


@compiled
def sum_elements(
    chunk: int,
    elements: int,
    columns: int,
    element: Element,
    entry_words: int,
    digests: int,
    keys: Keys,
) -> Sum:
    """Return the checksum of a raw or uncoded chunk, computed from its elements.

    Args:
        chunk: index of the chunk in the segment.
        elements: address of the chunk's elements, padded to whole columns.
        entry_words: number of entry words of the chunk; 0 if it is raw.
        digests: address of uint64 `[32]`, overwritten.
    """
    tag_columns(chunk, entry_words, columns, digests)
    for row in range(4):
        if element.size == 2:
            add_quads(elements + 16 * columns * row, columns, keys, 4 * row, digests)
        else:
            add_pairs(elements + 8 * columns * row, columns, keys, 2 * row, digests)
    return sum_columns(digests, columns)


@compiled
def sum_entries(chunk: int, entries: int, entry_words: int) -> Sum:
    """Return the sum of the checksum terms of a chunk's entries, modulo 2**64.

    Args:
        chunk: index of the chunk in the segment.
        entries: address of the entries, uint32 `[entry_words]`.
    """
    data, total = pointer(entries, np.uint32), _u(0)
    for j in range(entry_words):
        key = _fold(_u(chunk << ENTRY_COUNT_BITS | j) * _GOLDEN) | _u(1)
        total += _u(load(data, j)) * key
    return total
