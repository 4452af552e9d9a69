"""The CPU backend's compiled loops. Loops only: `cpu.py` prepares their tables and calls them.

They take addresses and do not check: shapes, strides, pages and room were checked in `ops.py`, and
`scan_segment` goes over a payload's counts and positions before `decode_segment` follows them.

Arguments that recur:
    addresses: u64 `[planes]`, of each plane's first element.
    strides: int64 `[planes, 2]`, of pages and heads, in elements.
    chunks: int64 `[chunks, 4]`, see `chunks.chunk_table`.
    streams: int64 `[4]`, the fields of `format.Streams`.
    entries: int64 `[planes, 3]`, of each plane: mode, offset of its block, bytes.
    keys_lo, keys_hi: u32, the checksum's keys.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from codec.checksum import LENGTH_BITS, MASK32, MIX_1, MIX_2
from codec.codebook import CODES
from codec.format import ALIGNMENT, ESCAPE_BYTES, RAW_CHUNK

_Function = TypeVar("_Function", bound=Callable[..., Any])
Bytes = NDArray[np.uint8]
Patterns = NDArray[np.uint16]
Integers = NDArray[np.int64]
Word = np.uint64

_MASK32 = np.uint64(MASK32)
_MIX_1, _MIX_2 = np.uint64(MIX_1), np.uint64(MIX_2)
COUNT_TOO_LARGE, LENGTHS_DISAGREE, POSITIONS_DISORDERED = 1, 2, 3


def _compiled(function: _Function) -> _Function:
    """Compile on first use, without the interpreter's lock, cached on disk where that is possible.

    numba looks for a writable directory beside the source, then in the user's cache. Where neither
    is, every process compiles for itself. The cache goes by this file's date alone: touch the file
    after changing a constant that it imports.
    """
    try:
        compiled: _Function = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True)(function)
    return compiled


def _pointer_type(_typing_context: Any, _address: Any, element: Any) -> Any:
    """How `_pointer(address, np.uint16)` is typed and compiled: as a cast, without any code."""

    def convert(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element.dtype)(types.uint64, element), convert


_pointer = intrinsic(_pointer_type)


@_compiled
def _mix64(value: Word) -> Word:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


@_compiled
def _digest(chunk: Patterns, keys_lo: NDArray[np.uint32], keys_hi: NDArray[np.uint32]) -> Word:
    """`checksum.digest_chunks` of one chunk."""
    total = np.uint64(0)
    words = len(chunk) // 4
    for word in range(words):
        low = np.uint64(chunk[4 * word]) | np.uint64(chunk[4 * word + 1]) << np.uint64(16)
        high = np.uint64(chunk[4 * word + 2]) | np.uint64(chunk[4 * word + 3]) << np.uint64(16)
        a = (low + np.uint64(keys_lo[word])) & _MASK32
        b = (high + np.uint64(keys_hi[word])) & _MASK32
        total += a * b + a + b
    rest = len(chunk) - 4 * words
    if rest:
        low, high = np.uint64(chunk[4 * words]), np.uint64(0)
        if rest > 1:
            low |= np.uint64(chunk[4 * words + 1]) << np.uint64(16)
        if rest > 2:
            high = np.uint64(chunk[4 * words + 2])
        a = (low + np.uint64(keys_lo[words])) & _MASK32
        b = (high + np.uint64(keys_hi[words])) & _MASK32
        total += a * b + a + b
    return total


@_compiled
def _term(
    chunk: Patterns, number: int, keys_lo: NDArray[np.uint32], keys_hi: NDArray[np.uint32]
) -> Word:
    """What chunk `number` of the segment adds to the checksum."""
    tag = np.uint64(number) << np.uint64(LENGTH_BITS) | np.uint64(len(chunk))
    return _mix64(_digest(chunk, keys_lo, keys_hi) + _mix64(tag))


@_compiled
def _aligned(offset: int) -> int:
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@_compiled
def _clear(data: Bytes) -> None:
    for i in range(len(data)):
        data[i] = 0


@_compiled
def _copy(source: Bytes, target: Bytes) -> None:
    for i in range(len(target)):
        target[i] = source[i]


@_compiled
def _read_u16(data: Bytes, at: int) -> int:
    return int(data[at]) | int(data[at + 1]) << 8


@_compiled
def _encode_dense(chunk: Patterns, table: Bytes, codes: Bytes, signs: Bytes) -> int:
    """Fill a chunk's codes and signs; returns its number of escapes, which have code 0."""
    length = len(chunk)
    for i in range(length):
        signs[i] = ((chunk[i] >> 8) & 0x80) | (chunk[i] & 0x7F)
    escapes = 0
    for i in range(length // 2):
        even = table[(chunk[2 * i] >> 7) & 0xFF]
        odd = table[(chunk[2 * i + 1] >> 7) & 0xFF]
        escapes += (even >> 4) + (odd >> 4)
        codes[i] = (even & 0xF) | ((odd & 0xF) << 4)
    if length % 2:
        last = table[(chunk[length - 1] >> 7) & 0xFF]
        escapes += last >> 4
        codes[length // 2] = last & 0xF
    return escapes


@_compiled
def _encode_escapes(chunk: Patterns, table: Bytes, tail: Bytes) -> None:
    at = 0
    for i in range(len(chunk)):
        exponent = (chunk[i] >> 7) & 0xFF
        if table[exponent] == CODES:
            tail[at] = i & 0xFF
            tail[at + 1] = i >> 8
            tail[at + 2] = exponent
            at += ESCAPE_BYTES


@_compiled
def _encode_full(chunk: Patterns, codes: Bytes, tail: Bytes) -> None:
    """Store a chunk's exponents in full: low nibbles as codes, high nibbles as tail."""
    length = len(chunk)
    for i in range((length + 1) // 2):
        even = (chunk[2 * i] >> 7) & 0xFF
        odd = (chunk[2 * i + 1] >> 7) & 0xFF if 2 * i + 1 < length else 0
        codes[i] = (even & 0xF) | ((odd & 0xF) << 4)
        tail[i] = (even >> 4) | (odd & 0xF0)


@_compiled
def _source(address: Word, strides: Integers, chunk: Integers) -> Word:
    """The address of a chunk's first element; strides are (page, head), in elements."""
    return address + np.uint64(2 * (chunk[0] * strides[0] + chunk[1] * strides[1] + chunk[2]))


@_compiled
def _encode_block(
    address: Word,
    strides: Integers,
    table: Bytes,
    chunks: Integers,
    streams: Integers,
    first: int,
    block: Bytes,
    keys_lo: NDArray[np.uint32],
    keys_hi: NDArray[np.uint32],
) -> tuple[int, int, Word]:
    """Try a plane as `TOP16`; returns its length (0: not smaller than raw), escapes, checksum."""
    at_codes, at_signs, tail = streams[1], streams[2], streams[3]
    escapes, checksum, fits = 0, np.uint64(0), tail < len(block)
    if fits:
        _clear(block[:tail])
    for number in range(len(chunks)):
        length = chunks[number, 3]
        chunk = numba.carray(_pointer(_source(address, strides, chunks[number]), np.uint16), length)
        checksum += _term(chunk, first + number, keys_lo, keys_hi)
        if streams[3] >= len(block):
            continue
        half = (length + 1) // 2
        codes = block[at_codes : at_codes + half]
        count = _encode_dense(chunk, table, codes, block[at_signs : at_signs + length])
        escapes += count
        full = ESCAPE_BYTES * count > half
        size = half if full else ESCAPE_BYTES * count
        fits = fits and tail + size < len(block)
        if fits:
            if full:
                _encode_full(chunk, codes, block[tail : tail + size])
                count = RAW_CHUNK
            elif count:
                _encode_escapes(chunk, table, block[tail : tail + size])
            block[2 * number] = count & 0xFF
            block[2 * number + 1] = count >> 8
        at_codes, at_signs, tail = at_codes + half, at_signs + length, tail + size
    return tail if fits else 0, escapes, checksum


@_compiled
def _copy_raw(address: Word, strides: Integers, chunks: Integers, block: Bytes) -> None:
    at = 0
    for number in range(len(chunks)):
        size = 2 * chunks[number, 3]
        source = _pointer(_source(address, strides, chunks[number]), np.uint8)
        _copy(numba.carray(source, size), block[at : at + size])
        at += size


@_compiled
def encode_segment(
    addresses: NDArray[np.uint64],
    strides: Integers,
    tables: Bytes,
    coded: NDArray[np.bool_],
    chunks: Integers,
    streams: Integers,
    raw_bytes: int,
    offset: int,
    out: Bytes,
    entries: Integers,
    keys_lo: NDArray[np.uint32],
    keys_hi: NDArray[np.uint32],
) -> tuple[int, Word]:
    """Write all blocks from `offset` on and the planes' (coded, offset, length) into `entries`."""
    escapes, checksum = 0, np.uint64(0)
    for plane in range(len(addresses)):
        first = plane * len(chunks)
        block = out[offset : offset + (raw_bytes if coded[plane] else 0)]
        length, escaped, terms = _encode_block(
            addresses[plane], strides[plane], tables[plane], chunks, streams, first, block,
            keys_lo, keys_hi,
        )  # fmt: skip
        escapes += escaped
        checksum += terms
        entries[plane, 0] = length > 0
        if not length:
            length = raw_bytes
            _copy_raw(addresses[plane], strides[plane], chunks, out[offset : offset + length])
        entries[plane, 1] = offset
        entries[plane, 2] = length
        end = _aligned(offset + length)
        _clear(out[offset + length : end])
        offset = end
    return escapes, checksum


@_compiled
def _scan_block(block: Bytes, chunks: Integers, streams: Integers) -> int:
    """Whether a `TOP16` block's counts and positions may be followed; 0 or a stream error."""
    tail = streams[3]
    for number in range(len(chunks)):
        length = chunks[number, 3]
        half = (length + 1) // 2
        count = _read_u16(block, 2 * number)
        if count == RAW_CHUNK:
            tail += half
            continue
        if ESCAPE_BYTES * count > half:
            return COUNT_TOO_LARGE
        if tail + ESCAPE_BYTES * count > len(block):
            return LENGTHS_DISAGREE
        last = -1
        for _ in range(count):
            position = _read_u16(block, tail)
            if position <= last or position >= length:
                return POSITIONS_DISORDERED
            last = position
            tail += ESCAPE_BYTES
    return 0 if tail == len(block) else LENGTHS_DISAGREE


@_compiled
def scan_segment(payload: Bytes, entries: Integers, chunks: Integers, streams: Integers) -> int:
    """The first plane's error times the number of planes, plus its number; or 0."""
    for plane in range(len(entries)):
        if entries[plane, 0]:
            start, length = entries[plane, 1], entries[plane, 2]
            error = _scan_block(payload[start : start + length], chunks, streams)
            if error:
                return error * len(entries) + plane
    return 0


@_compiled
def _decode_chunk(
    block: Bytes, at_codes: int, at_signs: int, tail: int, count: int,
    exponents: NDArray[np.uint16], pairs: NDArray[np.uint32], chunk: Patterns,
) -> int:  # fmt: skip
    """Write one chunk; returns the bytes of its tail."""
    length = len(chunk)
    half = (length + 1) // 2
    codes, signs = block[at_codes : at_codes + half], block[at_signs : at_signs + length]
    if count == RAW_CHUNK:
        for i in range(length):
            shift = 4 * (i & 1)
            low, high = codes[i >> 1] >> shift & 0xF, block[tail + (i >> 1)] >> shift & 0xF
            sign = np.int64(signs[i])
            chunk[i] = (sign & 0x80) << 8 | (high << 4 | low) << 7 | (sign & 0x7F)
        return half
    for i in range(length // 2):
        pair = pairs[codes[i]]
        even, odd = np.int64(signs[2 * i]), np.int64(signs[2 * i + 1])
        chunk[2 * i] = (pair & 0xFFFF) | (even & 0x80) << 8 | (even & 0x7F)
        chunk[2 * i + 1] = (pair >> 16) | (odd & 0x80) << 8 | (odd & 0x7F)
    if length % 2:
        last = np.int64(signs[length - 1])
        chunk[length - 1] = exponents[codes[half - 1] & 0xF] | (last & 0x80) << 8 | (last & 0x7F)
    for escape in range(count):
        entry = tail + ESCAPE_BYTES * escape
        position = _read_u16(block, entry)
        chunk[position] = (chunk[position] & 0x807F) | np.int64(block[entry + 2]) << 7
    return ESCAPE_BYTES * count


@_compiled
def decode_segment(
    payload: Bytes,
    entries: Integers,
    addresses: NDArray[np.uint64],
    strides: Integers,
    books: NDArray[np.uint16],
    chunks: Integers,
    streams: Integers,
    keys_lo: NDArray[np.uint32],
    keys_hi: NDArray[np.uint32],
) -> Word:
    """Write all planes of a scanned payload; returns the checksum of what was written."""
    checksum = np.uint64(0)
    pairs = np.empty(256, dtype=np.uint32)
    for plane in range(len(entries)):
        block = payload[entries[plane, 1] : entries[plane, 1] + entries[plane, 2]]
        exponents = books[plane]
        for byte in range(256):
            pairs[byte] = np.uint32(exponents[byte & 0xF]) | np.uint32(exponents[byte >> 4]) << 16
        at_codes, at_signs, tail, at_raw = streams[1], streams[2], streams[3], 0
        for number in range(len(chunks)):
            length = chunks[number, 3]
            target = _source(addresses[plane], strides[plane], chunks[number])
            chunk = numba.carray(_pointer(target, np.uint16), length)
            if entries[plane, 0]:
                count = _read_u16(block, 2 * number)
                tail += _decode_chunk(
                    block, at_codes, at_signs, tail, count, exponents, pairs, chunk
                )
                at_codes, at_signs = at_codes + (length + 1) // 2, at_signs + length
            else:
                raw = numba.carray(_pointer(target, np.uint8), 2 * length)
                _copy(block[at_raw : at_raw + 2 * length], raw)
                at_raw += 2 * length
            checksum += _term(chunk, plane * len(chunks) + number, keys_lo, keys_hi)
    return checksum


@_compiled
def checksum_segment(
    addresses: NDArray[np.uint64],
    strides: Integers,
    chunks: Integers,
    keys_lo: NDArray[np.uint32],
    keys_hi: NDArray[np.uint32],
) -> Word:
    checksum = np.uint64(0)
    for plane in range(len(addresses)):
        for number in range(len(chunks)):
            source = _source(addresses[plane], strides[plane], chunks[number])
            chunk = numba.carray(_pointer(source, np.uint16), chunks[number, 3])
            checksum += _term(chunk, plane * len(chunks) + number, keys_lo, keys_hi)
    return checksum
