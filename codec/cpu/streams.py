"""The CPU backend's compiled loops between a chunk's fields and the words of its streams.

Of b bits an element, the rows of fields go to a column's b words in turn; of three bits, the last
row goes to the highest bits of all words. The functions are named for these bits. Arguments that
recur:

    fields: address of u32 `[16][32]`, see `fields.py`.
    stream: address of the chunk's part of a stream.
    columns: how many the chunk has.
"""

import numpy as np

from codec.cpu.jit import compiled, load, ones, pointer, store
from codec.format import COLUMNS

_EACH = 0x0001_0001
"""Times a number: that number in both fields of a u32."""
_BYTES, _NIBBLES, _THREES = 0xFF * _EACH, 0xF * _EACH, 7 * _EACH


@compiled
def weave8(fields: int, columns: int, stream: int) -> None:
    data = pointer(fields, np.uint32)
    for half in range(2):
        out = pointer(stream + 16 * columns * half, np.uint32)
        for c in range(columns):
            for word in range(4):
                first = COLUMNS * (4 * half + word) + c
                low, high = load(data, first), load(data, first + 8 * COLUMNS)
                store(out, 4 * c + word, np.uint32(low & _BYTES | (high & _BYTES) << 8))


@compiled
def unweave8(stream: int, columns: int, fields: int) -> None:
    out = pointer(fields, np.uint32)
    for half in range(2):
        data = pointer(stream + 16 * columns * half, np.uint32)
        for c in range(columns):
            for word in range(4):
                value, first = load(data, 4 * c + word), COLUMNS * (4 * half + word) + c
                store(out, first, np.uint32(value & _BYTES))
                store(out, first + 8 * COLUMNS, np.uint32(value >> 8 & _BYTES))


@compiled
def weave4(fields: int, columns: int, stream: int) -> None:
    data, out = pointer(fields, np.uint32), pointer(stream, np.uint32)
    for c in range(columns):
        for word in range(4):
            first, value = COLUMNS * word + c, 0
            for turn in range(4):
                value |= (load(data, first + 4 * COLUMNS * turn) & _NIBBLES) << 4 * turn
            store(out, 4 * c + word, np.uint32(value))


@compiled
def unweave4(stream: int, columns: int, fields: int) -> None:
    data, out = pointer(stream, np.uint32), pointer(fields, np.uint32)
    for c in range(columns):
        # All four come before a store, or else the compiler gathers them one by one.
        word0, word1 = load(data, 4 * c), load(data, 4 * c + 1)
        word2, word3 = load(data, 4 * c + 2), load(data, 4 * c + 3)
        for turn in range(4):
            shift, first = 4 * turn, 4 * COLUMNS * turn + c
            store(out, first, np.uint32(word0 >> shift & _NIBBLES))
            store(out, first + COLUMNS, np.uint32(word1 >> shift & _NIBBLES))
            store(out, first + 2 * COLUMNS, np.uint32(word2 >> shift & _NIBBLES))
            store(out, first + 3 * COLUMNS, np.uint32(word3 >> shift & _NIBBLES))


@compiled
def weave3(fields: int, columns: int, stream: int) -> None:
    data, out = pointer(fields, np.uint32), pointer(stream, np.uint32)
    for c in range(columns):
        last = load(data, 15 * COLUMNS + c)
        for k in range(3):
            word = (last >> k & _EACH) << 15
            for turn in range(5):
                word |= (load(data, COLUMNS * (3 * turn + k) + c) & _THREES) << 3 * turn
            store(out, columns * k + c, np.uint32(word))


@compiled
def unweave3(stream: int, columns: int, fields: int) -> None:
    data, out = pointer(stream, np.uint32), pointer(fields, np.uint32)
    for c in range(columns):
        last = 0
        for k in range(3):
            word = load(data, columns * k + c)
            last |= (word >> 15 & _EACH) << k
            for turn in range(5):
                store(out, COLUMNS * (3 * turn + k) + c, np.uint32(word >> 3 * turn & _THREES))
        store(out, 15 * COLUMNS + c, np.uint32(last))


@compiled
def marks_of(fields: int, plus: int, bit: int, marks: int) -> None:
    """Write a u32 for each of 32 columns: at an element's place, a bit of its field plus `plus`."""
    data, out = pointer(fields, np.uint32), pointer(marks, np.uint32)
    for c in range(COLUMNS):
        mark = 0
        for row in range(16):
            mark |= (load(data, COLUMNS * row + c) + plus * _EACH >> bit & _EACH) << row
        store(out, c, np.uint32(mark))


@compiled
def count_escapes4(stream: int, columns: int) -> int:
    """How many codes of a stream are the highest, as `count_escapes3` for three bits."""
    data, total = pointer(stream, np.uint32), 0
    for word in range(4 * columns):
        value = load(data, word)
        twos = value & value >> 1
        total += ones(np.uint64(twos & twos >> 2 & 0x1111_1111))
    return total


@compiled
def count_escapes3(stream: int, columns: int) -> int:
    data, total = pointer(stream, np.uint32), 0
    for c in range(columns):
        last = 0x8000 * _EACH
        for k in range(3):
            value = load(data, columns * k + c)
            last &= value
            total += ones(np.uint64(value & value >> 1 & value >> 2 & 0x1249 * _EACH))
        total += ones(np.uint64(last))
    return total
