"""The CPU backend's compiled loops over one chunk, a word of four elements at a time.

A word is a u64 with the elements e0, e1, e2, e3 in fields of 16 bits, the first one lowest. Its
streams' orders were chosen so that the fields fold together with a shift and a mask, which a
compiler turns into vectors of words. Addresses need no alignment. Arguments that recur:

    source, target: address of the chunk's first element, readable and writable by whole words.
    codes, signs: addresses of the chunk's parts of these streams.
    flags: address of a u64 for each word: 1 in the fields of its escapes.
    high: address of a u16 for each word, the exponents' high nibbles.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from codec.checksum import MASK32
from codec.format import ESCAPE_BYTES, WORD
from codec.mix import MIX_1, MIX_2

_Function = TypeVar("_Function", bound=Callable[..., Any])
Books = NDArray[np.uint8]
Keys = NDArray[np.uint32]
Word = np.uint64

_u = np.uint64
_MASK32 = _u(MASK32)
_MIX_1, _MIX_2 = _u(MIX_1), _u(MIX_2)
_FIELDS = 0x0001_0001_0001_0001
"""Times a number: that number in each field."""


def _stamp_of(package: Path) -> str:
    """Changes with any of a package's sources."""
    sources = (source.read_bytes() for source in sorted(package.glob("*.py")))
    return "_" + hashlib.blake2b(b"".join(sources), digest_size=8).hexdigest()


_STAMP = _stamp_of(Path(__file__).parent)


def compiled(function: _Function) -> _Function:
    """Compile on first use, without the interpreter's lock, cached on disk where that is possible.

    numba looks for a writable directory beside the source, then in the user's cache. Where neither
    is, every process compiles for itself. It knows a cached function by its name and its own file;
    the stamp in the name makes it know what that calls and imports from other files, too.
    """
    function.__qualname__ += _STAMP
    try:
        made: _Function = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        made = numba.njit(nogil=True, error_model="numpy")(function)
    return made


def _pointer_type(_typing_context: Any, _address: Any, element: Any) -> Any:
    """How `pointer(address, np.uint16)` is typed and compiled: as a cast, without any code."""

    def convert(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element.dtype)(types.int64, element), convert


def _load_type(_typing_context: Any, pointer: Any, _index: Any) -> Any:
    """How `load(pointer, index)` is typed and compiled: from any address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        loaded = builder.load(builder.gep(arguments[0], [arguments[1]]))
        loaded.align = 1
        return loaded

    return pointer.dtype(pointer, types.int64), generate


def _store_type(_typing_context: Any, pointer: Any, _index: Any, _value: Any) -> Any:
    """How `store(pointer, index, value)` is typed and compiled: to any address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        builder.store(arguments[2], place).align = 1
        return context.get_dummy_value()

    return types.void(pointer, types.int64, pointer.dtype), generate


pointer = intrinsic(_pointer_type)
load = intrinsic(_load_type)
store = intrinsic(_store_type)


@compiled
def clear(address: int, size: int) -> None:
    """Zero so many bytes."""
    data = pointer(address, np.uint8)
    for i in range(size):
        store(data, i, np.uint8(0))


@compiled
def copy(source: int, target: int, size: int) -> None:
    """So many bytes, which do not overlap."""
    data, out = pointer(source, np.uint8), pointer(target, np.uint8)
    for i in range(size):
        store(out, i, load(data, i))


@compiled
def mix64(value: Word) -> Word:
    value = (value ^ (value >> _u(30))) * _MIX_1
    value = (value ^ (value >> _u(27))) * _MIX_2
    return value ^ (value >> _u(31))


@compiled
def nh(low: Word, high: Word, key_lo: np.uint32, key_hi: np.uint32) -> Word:
    """`checksum.nh` of one word; only the low halves of `low` and `high` count."""
    a, b = (low + _u(key_lo)) & _MASK32, (high + _u(key_hi)) & _MASK32
    return a * b + a + b


@compiled
def digest_raw_words(source: int, words: int, keys_lo: Keys, keys_hi: Keys) -> Word:
    data, total = pointer(source, np.uint64), _u(0)
    for w in range(words):
        value = load(data, w)
        total += nh(value, value >> _u(32), keys_lo[w], keys_hi[w])
    return total


@compiled
def digest_coded_words(signs: int, codes: int, words: int, keys_lo: Keys, keys_hi: Keys) -> Word:
    low, high, total = pointer(signs, np.uint32), pointer(codes, np.uint16), _u(0)
    for w in range(words):
        total += nh(_u(load(low, w)), _u(load(high, w)), keys_lo[w], keys_hi[w])
    return total


@compiled
def _fold_signs(value: Word) -> np.uint32:
    """Signs and mantissas of a word of elements, as the stream has them."""
    fields = value & _u(0x7F * _FIELDS) | value >> _u(8) & _u(0x80 * _FIELDS)
    return np.uint32((fields | fields >> _u(24)) & _MASK32)


@compiled
def _fold_codes(nibbles: Word) -> np.uint16:
    """A nibble in each field, as the stream of codes has them."""
    pairs = nibbles | nibbles >> _u(28)
    return np.uint16((pairs | pairs >> _u(8)) & _u(0xFFFF))


@compiled
def _spread_signs(word: np.uint32) -> Word:
    """The inverse of `_fold_signs`, the fields' exponents zero."""
    fields = (_u(word) | _u(word) << _u(24)) & _u(0xFF * _FIELDS)
    return fields & _u(0x7F * _FIELDS) | (fields & _u(0x80 * _FIELDS)) << _u(8)


@compiled
def _spread_codes(word: np.uint16) -> Word:
    """The inverse of `_fold_codes`."""
    pairs = (_u(word) | _u(word) << _u(28)) & _u(0x0000_0F0F_0000_0F0F)
    return (pairs | pairs << _u(8)) & _u(0xF * _FIELDS)


@compiled
def _sum_fields(sums: Word) -> int:
    return int(np.int64((sums * _u(_FIELDS)) >> _u(48)))


@compiled
def _unflag_padding(words: int, length: int, flags: int) -> int:
    """Take the padding of a chunk's last word for no escapes; returns how many it took for some.

    Its codes are right as they are: if exponent 0 has a code, it is the lowest, and so 0.
    """
    padding = WORD * words - length
    if padding == 0:
        return 0
    place = pointer(flags, np.uint64)
    before = load(place, words - 1)
    after = before & _u(_FIELDS) >> _u(16 * padding)
    store(place, words - 1, after)
    return _sum_fields(before) - _sum_fields(after)


@compiled
def pack_window(
    source: int, words: int, length: int, lowest: int, codes: int, signs: int, flags: int
) -> int:
    """Write codes, signs and flags for sixteen consecutive exponents; returns the escapes.

    A field holds 256 more than the exponent's distance from the lowest, so that nothing is borrowed
    from its neighbour; the exponent has a code if all above the low four bits is 256.
    """
    data, out_flags = pointer(source, np.uint64), pointer(flags, np.uint64)
    out_codes, out_signs = pointer(codes, np.uint16), pointer(signs, np.uint32)
    offset = _u(_FIELDS) * _u(256 - lowest)
    sums = _u(0)
    for w in range(words):
        value = load(data, w)
        distance = (value >> _u(7) & _u(0xFF * _FIELDS)) + offset
        escaped = distance & _u(0x1F0 * _FIELDS) ^ _u(0x100 * _FIELDS)
        escaped = escaped + _u(0x1FF * _FIELDS) >> _u(9) & _u(_FIELDS)
        store(out_codes, w, _fold_codes(distance & ~(escaped * _u(15)) & _u(0xF * _FIELDS)))
        store(out_signs, w, _fold_signs(value))
        store(out_flags, w, escaped)
        sums += escaped
    return _sum_fields(sums) - _unflag_padding(words, length, flags)


@compiled
def pack_table(
    source: int, words: int, length: int, table: NDArray[np.uint8], codes: int, signs: int,
    flags: int,
) -> int:  # fmt: skip
    """Write codes, signs and flags for any exponents; `table` has 16 where there is no code."""
    data, out_flags = pointer(source, np.uint64), pointer(flags, np.uint64)
    out_codes, out_signs = pointer(codes, np.uint16), pointer(signs, np.uint32)
    sums = _u(0)
    for w in range(words):
        value = load(data, w)
        found = _u(table[value >> _u(7) & _u(0xFF)])
        found |= _u(table[value >> _u(23) & _u(0xFF)]) << _u(16)
        found |= _u(table[value >> _u(39) & _u(0xFF)]) << _u(32)
        found |= _u(table[value >> _u(55) & _u(0xFF)]) << _u(48)
        escaped = found >> _u(4) & _u(_FIELDS)
        store(out_codes, w, _fold_codes(found & _u(0xF * _FIELDS)))
        store(out_signs, w, _fold_signs(value))
        store(out_flags, w, escaped)
        sums += escaped
    return _sum_fields(sums) - _unflag_padding(words, length, flags)


@compiled
def pack_full(source: int, words: int, codes: int, high: int) -> None:
    """Write the exponents' low nibbles as codes, and their high nibbles."""
    data = pointer(source, np.uint64)
    out_codes, out_high = pointer(codes, np.uint16), pointer(high, np.uint16)
    for w in range(words):
        value = load(data, w)
        store(out_codes, w, _fold_codes(value >> _u(7) & _u(0xF * _FIELDS)))
        store(out_high, w, _fold_codes(value >> _u(11) & _u(0xF * _FIELDS)))


@compiled
def list_escapes(source: int, flags: int, words: int, entry: int) -> None:
    """Write the entries of the flagged elements, from address `entry` on."""
    data, flagged = pointer(source, np.uint64), pointer(flags, np.uint64)
    for w in range(words):
        escaped = load(flagged, w)
        if escaped == _u(0):
            continue
        value = load(data, w)
        for k in range(WORD):
            if escaped >> _u(16 * k) & _u(1):
                exponent = value >> _u(16 * k + 7) & _u(0xFF)
                store(pointer(entry, np.uint16), 0, np.uint16(WORD * w + k))
                store(pointer(entry + 2, np.uint8), 0, np.uint8(exponent))
                entry += ESCAPE_BYTES


@compiled
def unpack_window(target: int, words: int, codes: int, signs: int, lowest: int) -> None:
    out, offset = pointer(target, np.uint64), _u(_FIELDS) * _u(lowest)
    in_codes, in_signs = pointer(codes, np.uint16), pointer(signs, np.uint32)
    for w in range(words):
        exponents = _spread_codes(load(in_codes, w)) + offset
        store(out, w, exponents << _u(7) | _spread_signs(load(in_signs, w)))


@compiled
def unpack_table(
    target: int, words: int, codes: int, signs: int, pairs: NDArray[np.uint64]
) -> None:
    """`pairs`: of a byte of two codes, the exponents where elements 0 and 2 have them."""
    out = pointer(target, np.uint64)
    in_codes, in_signs = pointer(codes, np.uint16), pointer(signs, np.uint32)
    for w in range(words):
        both = _u(load(in_codes, w))
        exponents = pairs[both & _u(0xFF)] | pairs[both >> _u(8)] << _u(16)
        store(out, w, exponents | _spread_signs(load(in_signs, w)))


@compiled
def unpack_full(target: int, words: int, codes: int, signs: int, high: int) -> None:
    out, in_high = pointer(target, np.uint64), pointer(high, np.uint16)
    in_codes, in_signs = pointer(codes, np.uint16), pointer(signs, np.uint32)
    for w in range(words):
        exponents = _spread_codes(load(in_codes, w)) | _spread_codes(load(in_high, w)) << _u(4)
        store(out, w, exponents << _u(7) | _spread_signs(load(in_signs, w)))
