"""Compiled loops that convert between the elements of a chunk and 16-bit fields.

A uint32 holds two elements in 16-bit fields. For every element type, a chunk is `[16, 32]` such
words, indexed by h = 4 r + i (see `FORMAT.md`) and by column. Operations on exponents and
remainders are then the same for all fields, and are vectorized. A short chunk does not use the last
columns. Common arguments:

    source, target: address of the chunk's first element; the chunk is padded to whole columns.
    fields, codes, remainders: addresses of uint32 `[16, 32]`.
    columns: number of columns.
"""

import numpy as np
from numpy.typing import NDArray

from codec.cpu.jit import compiled, load, pointer, store
from codec.format import COLUMNS

ROWS = 16
FIELD_BYTES = 4 * ROWS * COLUMNS
"""Size of a chunk's fields, uint32 `[16, 32]`, in bytes."""
NO_CODE = 16
"""Bit that is set in a field of `codes` if the exponent has no code."""

_u = np.uint64
_EACH = 0x0001_0001_0001_0001
"""Multiplier that copies a number into each of the four fields of a uint64."""
_QUADS = ROWS * COLUMNS // 2
_BYTES = 0x00FF_00FF


@compiled
def fill(fields: int, value: int) -> None:
    """Set all fields of the chunk at address `fields` to the same number."""
    out = pointer(fields, np.uint64)
    for j in range(_QUADS):
        store(out, j, _u(_EACH * value))


@compiled
def read_pairs(source: int, columns: int, fields: int) -> None:
    """Convert elements of two bytes at `source` to fields. Each word of a column holds one pair."""
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
    """Convert elements of one byte at `source` to fields.

    A word holds two pairs: its even bytes, and its odd bytes.
    """
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
    """Convert fields to elements of two bytes at `target`; inverse of `read_pairs`."""
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
    """Convert fields to elements of one byte at `target`; inverse of `read_bytes`."""
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
    """Write codes for a codebook of `count` consecutive exponents, of which `lowest` is the first.

    256 is added to the distance from the lowest exponent, to prevent a borrow from the next field.
    Bit 8 is then flipped. This restores distances of 0 or more and makes negative ones exceed 255,
    so an exponent has a code if and only if the result is less than `count`.

    Args:
        fields: address of the elements, uint32 `[16, 32]`.
        exponent_mask: mask of the bits of an exponent, after a shift by `mantissa_bits`.
        escape: escape code. If it is 0, as in `TOP16`, an escape gets the low four bits of its
            distance instead.
        codes: address of the codes, uint32 `[16, 32]`, written. Bit 4 of a field marks an escape.

    Returns:
        The number of escapes.
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
    """Write codes by table lookup; return the number of escapes.

    Args:
        fields, codes: as for `codes_of_window`.
        table: code of each exponent; see `codes` of `tables.BOOK`.
    """
    data, out = pointer(fields, np.uint16), pointer(codes, np.uint16)
    total = 0
    for j in range(4 * _QUADS):
        code = table[load(data, j) >> mantissa_bits & exponent_mask]
        store(out, j, np.uint16(code))
        total += code >> 4
    return total


@compiled
def remainders_of(fields: int, mantissa_bits: int, exponent_bits: int, remainders: int) -> None:
    """Write the remainders of the elements in `fields`: sign above mantissa."""
    data, out = pointer(fields, np.uint64), pointer(remainders, np.uint64)
    down, sign = _u(exponent_bits), _u(_EACH << mantissa_bits)
    mantissa = _u(_EACH * ((1 << mantissa_bits) - 1))
    for j in range(_QUADS):
        value = load(data, j)
        store(out, j, value & mantissa | value >> down & sign)


@compiled
def exponents_of_table(codes: int, exponents: NDArray[np.uint8]) -> None:
    """Replace each field of `codes`, a code, by `exponents[code]`."""
    data = pointer(codes, np.uint16)
    for j in range(4 * _QUADS):
        store(data, j, np.uint16(exponents[load(data, j)]))


@compiled
def high_remainders_of(remainders: int, high: int) -> None:
    """Write to `high` the bits of the remainders above the low eight bits.

    Both arguments are addresses of uint32 `[16, 32]`.
    """
    data, out = pointer(remainders, np.uint64), pointer(high, np.uint64)
    for j in range(_QUADS):
        store(out, j, load(data, j) >> _u(8) & _u(_EACH * 0xFF))


@compiled
def add_high_remainders(high: int, remainders: int) -> None:
    """Add the high bits to the remainders; inverse of `high_remainders_of`."""
    data, out = pointer(high, np.uint64), pointer(remainders, np.uint64)
    for j in range(_QUADS):
        store(out, j, load(out, j) | load(data, j) << _u(8))


@compiled
def join(
    codes: int, lowest: int, remainders: int, mantissa_bits: int, exponent_bits: int, fields: int
) -> None:
    """Combine remainders and exponents into elements, written to `fields`.

    An exponent is a field of `codes` plus `lowest`.
    """
    data, more, out = (
        pointer(codes, np.uint64),
        pointer(remainders, np.uint64),
        pointer(fields, np.uint64),
    )
    up, exponent_up = _u(exponent_bits), _u(mantissa_bits)
    offset, mask = _u(_EACH * lowest), _u(_EACH * ((1 << exponent_bits) - 1))
    sign, mantissa = _u(_EACH << mantissa_bits), _u(_EACH * ((1 << mantissa_bits) - 1))
    for j in range(_QUADS):
        exponent, rest = load(data, j) + offset & mask, load(more, j)
        store(out, j, exponent << exponent_up | rest & mantissa | (rest & sign) << up)
