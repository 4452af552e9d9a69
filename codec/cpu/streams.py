"""Compiled loops that pack the fields of a chunk into the words of its streams, and unpack them.

In a stream of b bits per element, row h of the fields is stored in word h mod b of each column. If
b is 3, the last row uses the highest bit of each half of the three words. The number at the end of
a function's name is b. Common arguments:

    fields: address of uint32 `[16, 32]`; see `fields.py`.
    stream: address of the chunk's words in a stream.
    columns: number of columns.
"""

import numpy as np

from codec.cpu.jit import compiled, load, pointer, popcount, store
from codec.format import COLUMNS

_EACH = 0x0001_0001
"""Multiplier that copies a number into both fields of a uint32."""
_BYTES, _NIBBLES, _THREES = 0xFF * _EACH, 0xF * _EACH, 7 * _EACH


@compiled
def pack8(fields: int, columns: int, stream: int) -> None:
    data = pointer(fields, np.uint32)
    for half in range(2):
        out = pointer(stream + 16 * columns * half, np.uint32)
        for c in range(columns):
            for word in range(4):
                first = COLUMNS * (4 * half + word) + c
                low, high = load(data, first), load(data, first + 8 * COLUMNS)
                store(out, 4 * c + word, np.uint32(low & _BYTES | (high & _BYTES) << 8))


@compiled
def unpack8(stream: int, columns: int, fields: int) -> None:
    out = pointer(fields, np.uint32)
    for half in range(2):
        data = pointer(stream + 16 * columns * half, np.uint32)
        for c in range(columns):
            for word in range(4):
                value, first = load(data, 4 * c + word), COLUMNS * (4 * half + word) + c
                store(out, first, np.uint32(value & _BYTES))
                store(out, first + 8 * COLUMNS, np.uint32(value >> 8 & _BYTES))


@compiled
def pack4(fields: int, columns: int, stream: int) -> None:
    data, out = pointer(fields, np.uint32), pointer(stream, np.uint32)
    for c in range(columns):
        for word in range(4):
            first, value = COLUMNS * word + c, 0
            for step in range(4):
                value |= (load(data, first + 4 * COLUMNS * step) & _NIBBLES) << 4 * step
            store(out, 4 * c + word, np.uint32(value))


@compiled
def unpack4(stream: int, columns: int, fields: int) -> None:
    data, out = pointer(stream, np.uint32), pointer(fields, np.uint32)
    for c in range(columns):
        # Load all four words before the first store; otherwise the compiler loads them one by one.
        word0, word1 = load(data, 4 * c), load(data, 4 * c + 1)
        word2, word3 = load(data, 4 * c + 2), load(data, 4 * c + 3)
        for step in range(4):
            shift, first = 4 * step, 4 * COLUMNS * step + c
            store(out, first, np.uint32(word0 >> shift & _NIBBLES))
            store(out, first + COLUMNS, np.uint32(word1 >> shift & _NIBBLES))
            store(out, first + 2 * COLUMNS, np.uint32(word2 >> shift & _NIBBLES))
            store(out, first + 3 * COLUMNS, np.uint32(word3 >> shift & _NIBBLES))


@compiled
def pack3(fields: int, columns: int, stream: int) -> None:
    data, out = pointer(fields, np.uint32), pointer(stream, np.uint32)
    for c in range(columns):
        last = load(data, 15 * COLUMNS + c)
        for k in range(3):
            word = (last >> k & _EACH) << 15
            for step in range(5):
                word |= (load(data, COLUMNS * (3 * step + k) + c) & _THREES) << 3 * step
            store(out, columns * k + c, np.uint32(word))


@compiled
def unpack3(stream: int, columns: int, fields: int) -> None:
    data, out = pointer(stream, np.uint32), pointer(fields, np.uint32)
    for c in range(columns):
        last = 0
        for k in range(3):
            word = load(data, columns * k + c)
            last |= (word >> 15 & _EACH) << k
            for step in range(5):
                store(out, COLUMNS * (3 * step + k) + c, np.uint32(word >> 3 * step & _THREES))
        store(out, 15 * COLUMNS + c, np.uint32(last))


@compiled
def escape_masks(fields: int, plus: int, bit: int, masks: int) -> None:
    """Write, for each of 32 columns, the bit mask of the places of its escapes, to `masks`.

    The bit of a place is bit `bit` of (field + `plus`). Fields from `codes_of_window` and
    `codes_of_table` mark escapes in bit 4, so `plus` is 0 and `bit` is 4. In fields of b-bit codes,
    adding 1 to the escape code sets bit b, so `plus` is 1 and `bit` is b.
    """
    data, out = pointer(fields, np.uint32), pointer(masks, np.uint32)
    for c in range(COLUMNS):
        mark = 0
        for row in range(16):
            mark |= (load(data, COLUMNS * row + c) + plus * _EACH >> bit & _EACH) << row
        store(out, c, np.uint32(mark))


@compiled
def count_escapes4(stream: int, columns: int) -> int:
    """Count the escape codes in a chunk's words of a stream of four-bit codes."""
    data, total = pointer(stream, np.uint32), 0
    for word in range(4 * columns):
        value = load(data, word)
        twos = value & value >> 1
        total += popcount(np.uint64(twos & twos >> 2 & 0x1111_1111))
    return total


@compiled
def count_escapes3(stream: int, columns: int) -> int:
    """Count the escape codes in a chunk's words of a stream of three-bit codes."""
    data, total = pointer(stream, np.uint32), 0
    for c in range(columns):
        last = 0x8000 * _EACH
        for k in range(3):
            value = load(data, columns * k + c)
            last &= value
            total += popcount(np.uint64(value & value >> 1 & value >> 2 & 0x1249 * _EACH))
        total += popcount(np.uint64(last))
    return total
