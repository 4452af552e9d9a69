"""The CPU backend's compiled loops between a chunk's elements and its fields.

Two elements at once: a u32 holds a pair's two sides in fields of 16 bits, and a chunk is 16 rows of
32 such words, `[16][32]`, one for each h = 4 r + i and each column, whatever its element type. What
concerns exponents and rests then is the same few operations on all fields, and a compiler makes
vectors of them. Of a short chunk the last columns are not used. Arguments that recur:

    source, target: address of the chunk's first element; its columns are all there.
    fields, codes, rests: addresses of u32 `[16][32]`.
    columns: how many the chunk has.
"""

import numpy as np
from numpy.typing import NDArray

from codec.cpu.jit import compiled, load, pointer, store
from codec.format import COLUMNS

ROWS = 16
FIELD_BYTES = 4 * ROWS * COLUMNS
"""Bytes of u32 `[16][32]`."""
NO_CODE = 16
"""Of a field of codes: the bit that says that the exponent has none."""

_u = np.uint64
_EACH = 0x0001_0001_0001_0001
"""Times a number: that number in each of a u64's four fields."""
_QUADS = ROWS * COLUMNS // 2
_BYTES = 0x00FF_00FF


@compiled
def fill(fields: int, value: int) -> None:
    """The same number in all fields."""
    out = pointer(fields, np.uint64)
    for j in range(_QUADS):
        store(out, j, _u(_EACH * value))


@compiled
def read_pairs(source: int, columns: int, fields: int) -> None:
    """Elements of two bytes: a row's four words are its four pairs."""
    for row in range(4):
        data = pointer(source + 16 * row * columns, np.uint32)
        out = pointer(fields + 16 * COLUMNS * row, np.uint32)
        for c in range(columns):
            store(out, c, load(data, 4 * c))
            store(out, COLUMNS + c, load(data, 4 * c + 1))
            store(out, 2 * COLUMNS + c, load(data, 4 * c + 2))
            store(out, 3 * COLUMNS + c, load(data, 4 * c + 3))


@compiled
def read_bytes(source: int, columns: int, fields: int) -> None:
    """Elements of one byte: a word's even bytes are a pair, its odd ones are the next."""
    for row in range(4):
        data = pointer(source + 8 * row * columns, np.uint32)
        out = pointer(fields + 16 * COLUMNS * row, np.uint32)
        for c in range(columns):
            low, high = load(data, 2 * c), load(data, 2 * c + 1)
            store(out, c, np.uint32(low & _BYTES))
            store(out, COLUMNS + c, np.uint32(low >> 8 & _BYTES))
            store(out, 2 * COLUMNS + c, np.uint32(high & _BYTES))
            store(out, 3 * COLUMNS + c, np.uint32(high >> 8 & _BYTES))


@compiled
def write_pairs(fields: int, columns: int, target: int) -> None:
    """The inverse of `read_pairs`."""
    for row in range(4):
        data = pointer(fields + 16 * COLUMNS * row, np.uint32)
        out = pointer(target + 16 * row * columns, np.uint32)
        for c in range(columns):
            store(out, 4 * c, load(data, c))
            store(out, 4 * c + 1, load(data, COLUMNS + c))
            store(out, 4 * c + 2, load(data, 2 * COLUMNS + c))
            store(out, 4 * c + 3, load(data, 3 * COLUMNS + c))


@compiled
def write_bytes(fields: int, columns: int, target: int) -> None:
    """The inverse of `read_bytes`."""
    for row in range(4):
        data = pointer(fields + 16 * COLUMNS * row, np.uint32)
        out = pointer(target + 8 * row * columns, np.uint32)
        for c in range(columns):
            low = load(data, c) | load(data, COLUMNS + c) << 8
            high = load(data, 2 * COLUMNS + c) | load(data, 3 * COLUMNS + c) << 8
            store(out, 2 * c, np.uint32(low))
            store(out, 2 * c + 1, np.uint32(high))


@compiled
def codes_of_window(
    fields: int, mantissa_bits: int, exponent_mask: int, lowest: int, count: int, escape: int,
    codes: int,
) -> int:  # fmt: skip
    """Write the codes of `count` consecutive exponents from `lowest` on; returns the escapes.

    256 more than the distance from the lowest never borrows from the next field. Of that, with its
    highest bit flipped, only distances from 0 to `count` - 1 are below `count`. `escape` is the
    escape code; 0 keeps the low four bits of the distance instead.
    """
    data, out = pointer(fields, np.uint64), pointer(codes, np.uint64)
    shift, mask = _u(mantissa_bits), _u(_EACH * exponent_mask)
    offset, beyond = _u(_EACH * (256 - lowest)), _u(_EACH * (0x8000 - count))
    kept, escaped = _u(_EACH * (15 if escape == 0 else escape)), _u(_EACH * escape)
    total = _u(0)
    for j in range(_QUADS):
        distance = (load(data, j) >> shift & mask) + offset ^ _u(_EACH * 256)
        flag = distance + beyond >> _u(15) & _u(_EACH)
        code = distance & kept | (flag << _u(4)) - flag & escaped
        store(out, j, code | flag << _u(4))
        total += flag
    return int(np.int64(total * _u(_EACH) >> _u(48)))


@compiled
def codes_of_table(
    fields: int, mantissa_bits: int, exponent_mask: int, table: NDArray[np.uint8], codes: int
) -> int:
    """Write codes as a table of `BOOK` says, `NO_CODE` for an escape; returns the escapes."""
    data, out = pointer(fields, np.uint16), pointer(codes, np.uint16)
    total = 0
    for j in range(4 * _QUADS):
        code = table[load(data, j) >> mantissa_bits & exponent_mask]
        store(out, j, np.uint16(code))
        total += code >> 4
    return total


@compiled
def rests_of(fields: int, mantissa_bits: int, exponent_bits: int, rests: int) -> None:
    """Write the rests, sign above mantissa."""
    data, out = pointer(fields, np.uint64), pointer(rests, np.uint64)
    down, sign = _u(exponent_bits), _u(_EACH << mantissa_bits)
    mantissa = _u(_EACH * ((1 << mantissa_bits) - 1))
    for j in range(_QUADS):
        value = load(data, j)
        store(out, j, value & mantissa | value >> down & sign)


@compiled
def exponents_of_table(codes: int, exponents: NDArray[np.uint8]) -> None:
    """Replace codes of fewer than five bits by the exponents that they mean."""
    data = pointer(codes, np.uint16)
    for j in range(4 * _QUADS):
        store(data, j, np.uint16(exponents[load(data, j)]))


@compiled
def high_rests_of(rests: int, high: int) -> None:
    """Write what is above the eight bits of the rests' first stream."""
    data, out = pointer(rests, np.uint64), pointer(high, np.uint64)
    for j in range(_QUADS):
        store(out, j, load(data, j) >> _u(8) & _u(_EACH * 0xFF))


@compiled
def add_high_rests(high: int, rests: int) -> None:
    """The inverse of `high_rests_of`."""
    data, out = pointer(high, np.uint64), pointer(rests, np.uint64)
    for j in range(_QUADS):
        store(out, j, load(out, j) | load(data, j) << _u(8))


@compiled
def join(
    codes: int, lowest: int, rests: int, mantissa_bits: int, exponent_bits: int, fields: int
) -> None:
    """Write the elements of rests and of exponents, each a code and `lowest`."""
    data, more, out = (
        pointer(codes, np.uint64),
        pointer(rests, np.uint64),
        pointer(fields, np.uint64),
    )
    up, exponent_up = _u(exponent_bits), _u(mantissa_bits)
    offset, mask = _u(_EACH * lowest), _u(_EACH * ((1 << exponent_bits) - 1))
    sign, mantissa = _u(_EACH << mantissa_bits), _u(_EACH * ((1 << mantissa_bits) - 1))
    for j in range(_QUADS):
        exponent, rest = load(data, j) + offset & mask, load(more, j)
        store(out, j, exponent << exponent_up | rest & mantissa | (rest & sign) << up)
