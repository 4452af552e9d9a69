"""Compiled loops over one chunk of a plane with codes. Common arguments:

source, target: address of the chunk's first element; the chunk is padded to whole columns.
columns: number of columns of the chunk.
book: record of `BOOK`; see `tables.py`.
parts: see `Parts`.
entry_words: number of entry words of the chunk.
scratch: address of `SCRATCH_BYTES` bytes, which are zero before the first chunk of a segment.
"""

from typing import NamedTuple

import numpy as np

from codec.cpu.entries import (
    MAX_CHUNK_WORDS,
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
    add_high_remainders,
    codes_of_table,
    codes_of_window,
    exponents_of_table,
    fill,
    high_remainders_of,
    join,
    read_bytes,
    read_pairs,
    remainders_of,
    write_bytes,
    write_pairs,
)
from codec.cpu.jit import clear, compiled, copy, load, pointer, store
from codec.cpu.streams import (
    count_escapes3,
    count_escapes4,
    escape_masks,
    pack3,
    pack4,
    pack8,
    unpack3,
    unpack4,
    unpack8,
)
from codec.cpu.sums import (
    Keys,
    Sum,
    add_quads,
    add_triples,
    sum_columns,
    sum_elements,
    sum_entries,
    tag_columns,
)
from codec.cpu.tables import Element, Record
from codec.format import COLUMNS, WORD_BYTES

_STREAMS = 3
"""Streams of a block: codes, low bits and high bits of the remainders."""
_CODES = FIELD_BYTES
_REMAINDERS = 2 * FIELD_BYTES
_HIGH = 3 * FIELD_BYTES
_MASKS = 4 * FIELD_BYTES
DIGESTS = _MASKS + WORD_BYTES * COLUMNS
_ENTRIES = DIGESTS + 8 * COLUMNS
_POSITIONS = _ENTRIES + WORD_BYTES * MAX_CHUNK_WORDS
SCRATCH_BYTES = _POSITIONS + 2 * POSITIONS
"""Size of the scratch memory for one chunk, in bytes. At the offsets above it holds 16-bit fields
(elements, codes, remainders, high remainder bits), then escape masks, column digests, entries and
escape positions.
"""


class Parts(NamedTuple):
    """Addresses of a chunk's uint32 words: those in each stream, and its entries.

    Attributes:
        codes, low, high: words of the codes, and of the low and high bits of the remainders.
        entries: first entry word.
    """

    codes: int
    low: int
    high: int
    entries: int


@compiled
def encode_chunk(
    source: int, columns: int, element: Element, book: Record, parts: Parts, scratch: int
) -> tuple[int, int]:
    """Encode a chunk into its streams and entries.

    Args:
        source: address of the chunk's first element, padded to whole columns.
        columns: number of columns.
        parts: addresses to write to.
        scratch: address of `SCRATCH_BYTES` bytes.

    Returns:
        The number of entry words, and the number of elements whose exponent has no code.
    """
    fields, codes, remainders = scratch, scratch + _CODES, scratch + _REMAINDERS
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
    entry_words, max_words = 0, book.overflow * columns
    if escapes:
        entry_words = _list_escapes(escapes, max_words, element, book, parts.entries, scratch)
    if entry_words == max_words:
        _copy_uncoded(source, columns, element, book, parts, True)
        return entry_words, escapes
    remainders_of(fields, mantissa, element.exponent_bits, remainders)
    if element.high_bits:
        high_remainders_of(remainders, scratch + _HIGH)
    for stream in range(_STREAMS):
        bits = _bits(stream, element, book)
        _pack(codes + FIELD_BYTES * stream, bits, columns, parts[stream])
    return entry_words, escapes


@compiled
def _list_escapes(
    escapes: int, max_words: int, element: Element, book: Record, entries: int, scratch: int
) -> int:
    """Write the entries of a chunk's escapes.

    Returns:
        The number of entry words, or `max_words` if the chunk must be stored uncoded.
    """
    if escapes >= max_words and not book.escape:
        return max_words
    masks, listed, positions = scratch + _MASKS, scratch + _ENTRIES, scratch + _POSITIONS
    escape_masks(scratch + _CODES, 0, 4, masks)
    list_positions(masks, positions)
    if not book.escape:
        write_list(scratch, element, positions, escapes, entries)
        return escapes
    entry_words = write_levels(scratch, element, positions, escapes, book, listed)
    if entry_words > MAX_CHUNK_WORDS or entry_words >= max_words:
        return max_words
    copy(listed, entries, WORD_BYTES * entry_words)
    return entry_words


@compiled
def decode_chunk(
    target: int, columns: int, element: Element, book: Record, parts: Parts, entry_words: int,
    scratch: int,
) -> None:  # fmt: skip
    """Decode a validated chunk.

    Args:
        target: address of the decoded elements, padded to whole columns.
        parts: addresses to read from.
        entry_words: number of entry words of the chunk.
        scratch: address of `SCRATCH_BYTES` bytes.
    """
    if entry_words == book.overflow * columns:
        _copy_uncoded(target, columns, element, book, parts, False)
        return
    fields, codes, remainders = scratch, scratch + _CODES, scratch + _REMAINDERS
    for stream in range(_STREAMS):
        bits = _bits(stream, element, book)
        _unpack(parts[stream], bits, columns, codes + FIELD_BYTES * stream)
    if element.high_bits:
        add_high_remainders(scratch + _HIGH, remainders)
    positions, escapes = scratch + _POSITIONS, 0
    if entry_words and book.escape:
        escapes = _find_escapes(columns, book, scratch)
    lowest = book.lowest
    if not book.window:
        exponents_of_table(codes, book.exponents)
        lowest = 0
    join(codes, lowest, remainders, element.mantissa_bits, element.exponent_bits, fields)
    if escapes:
        read_levels(fields, element, positions, escapes, book, parts.entries)
    else:
        read_list(fields, element, parts.entries, entry_words)
    if element.size == 2:
        write_pairs(fields, columns, target)
    else:
        write_bytes(fields, columns, target)


@compiled
def _find_escapes(columns: int, book: Record, scratch: int) -> int:
    """Write the positions of a chunk's escape codes to `scratch`; return their number."""
    masks = scratch + _MASKS
    escape_masks(scratch + _CODES, 1, book.code_bits, masks)
    clear(masks + WORD_BYTES * columns, WORD_BYTES * (COLUMNS - columns))
    return list_positions(masks, scratch + _POSITIONS)


@compiled
def scan_chunk(
    length: int, columns: int, element: Element, book: Record, parts: Parts, entry_words: int,
    scratch: int,
) -> int:  # fmt: skip
    """Validate a chunk's entries; return 0 or an error code of `entries.py`.

    Args:
        length: number of elements of the chunk, without padding.
        columns: number of columns, with padding.
    """
    max_words = book.overflow * columns
    if entry_words >= max_words:
        return TOO_MANY if entry_words > max_words else 0
    if not book.escape:
        return scan_list(element, length, columns, parts.entries, entry_words)
    if book.code_bits == 4:
        escapes = count_escapes4(parts.codes, columns)
    else:
        escapes = count_escapes3(parts.codes, columns)
    error, second = scan_nibbles(escapes, book, parts.entries, entry_words)
    if error or not second:
        return error
    _unpack(parts.codes, book.code_bits, columns, scratch + _CODES)
    _find_escapes(columns, book, scratch)
    return scan_words(element, scratch + _POSITIONS, escapes, parts.entries)


@compiled
def sum_chunk(
    chunk: int, elements: int, columns: int, element: Element, book: Record, parts: Parts,
    entry_words: int, scratch: int, keys: Keys,
) -> Sum:  # fmt: skip
    """Return the sum of a chunk's checksum terms, modulo 2**64.

    Args:
        chunk: index of the chunk in the segment.
        elements: address of the chunk's elements, read only if it is uncoded. `parts` is read
            otherwise.
    """
    digests = scratch + DIGESTS
    if entry_words == book.overflow * columns:
        return sum_elements(chunk, elements, columns, element, entry_words, digests, keys)
    tag_columns(chunk, entry_words, columns, digests)
    key = 0
    for stream in range(_STREAMS):
        bits, words = _bits(stream, element, book), parts[stream]
        if bits == 3:
            add_triples(words, columns, keys, key, digests)
        else:
            for word in range(0, bits, 4):
                add_quads(words + WORD_BYTES * columns * word, columns, keys, key + word, digests)
        key += bits
    return sum_columns(digests, columns) + sum_entries(chunk, parts.entries, entry_words)


@compiled
def _bits(stream: int, element: Element, book: Record) -> int:
    """Return the bits per element of a stream; 0 if the block has no such stream."""
    if stream == 0:
        return int(book.code_bits)
    return element.low_bits if stream == 1 else element.high_bits


@compiled
def _pack(fields: int, bits: int, columns: int, stream: int) -> None:
    """Pack a chunk's fields into a stream of `bits` bits per element; 0 bits: do nothing.

    Args:
        fields: address of uint32 `[16, 32]`; see `fields.py`.
        stream: address of the chunk's words in the stream.
    """
    if bits == 8:
        pack8(fields, columns, stream)
    elif bits == 4:
        pack4(fields, columns, stream)
    elif bits == 3:
        pack3(fields, columns, stream)


@compiled
def _unpack(stream: int, bits: int, columns: int, fields: int) -> None:
    """Unpack a chunk's fields from a stream of `bits` bits per element; inverse of `_pack`."""
    if bits == 8:
        unpack8(stream, columns, fields)
    elif bits == 4:
        unpack4(stream, columns, fields)
    elif bits == 3:
        unpack3(stream, columns, fields)


@compiled
def _copy_uncoded(
    elements: int, columns: int, element: Element, book: Record, parts: Parts, to_streams: bool
) -> None:
    """Copy the words of an uncoded chunk between its elements and its streams and entries.

    Args:
        elements: address of the chunk's first element.
        to_streams: whether `elements` is the source; otherwise it is the target.
    """
    in_row = 2 * element.size
    for word in range(4 * in_row):
        raw = elements + WORD_BYTES * (word // in_row * in_row * columns + word % in_row)
        place, step = _word_address(word, columns, element, book, parts)
        if to_streams:
            _copy_words(raw, in_row, place, step, columns)
        else:
            _copy_words(place, step, raw, in_row, columns)


@compiled
def _word_address(
    word: int, columns: int, element: Element, book: Record, parts: Parts
) -> tuple[int, int]:
    """Locate word `word` of each column of an uncoded chunk in its streams or entries.

    Returns:
        The word's address in the first column, and its distance between columns in words.
    """
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
def _copy_words(source: int, step: int, target: int, out_step: int, columns: int) -> None:
    """Copy one word of each column.

    Args:
        source, target: addresses of the word of the first column.
        step, out_step: distances between columns in words, in the source and in the target.
    """
    data, out = pointer(source, np.uint32), pointer(target, np.uint32)
    for c in range(columns):
        store(out, out_step * c, load(data, step * c))
