"""The CPU backend's compiled loops over segments. Loops only: `cpu.py` prepares their tables.

They take addresses and do not check: shapes, strides, pages and room were checked in `ops.py`, and
`scan_segment` goes over a payload's slots before `decode_segment` follows them. `words.py` has the
loops over one chunk's words. Arguments that recur:

    segment: address of the segment's first byte; so are `slot`, `codes`, `signs` of a chunk's parts
        and `spill` of the spill area.
    planes: int64 `[planes, 5]`: address of the first element, strides of pages and heads in
        elements, mode, where the block starts in the segment.
    books: u8 `[planes, 16]`, each plane's exponents.
    chunks: int64 `[chunks, 4]`, see `chunks.chunk_table`.
    layout: int64 `[5]`: bytes of a slot; where a block's codes and signs start and it ends, from
        its start; where the spill area starts, from the segment's.
    keys_lo, keys_hi: u32 `[260]`, the checksum's keys.
"""

import numpy as np
from numpy.typing import NDArray

from codec.checksum import LENGTH_BITS
from codec.codebook import CODES
from codec.format import (
    ALIGNMENT,
    CODE_BYTES,
    ESCAPE_BYTES,
    SIGN_BYTES,
    SPILL_UNIT,
    WORD,
    WORD_BYTES,
    WORDS,
)
from codec.slots import NO_WINDOW, decode_chunk, digest_chunk, scan_chunk, spill_chunk
from codec.words import (
    Books,
    Keys,
    Word,
    clear,
    compiled,
    copy,
    digest_raw_words,
    list_escapes,
    mix64,
    pack_table,
    pack_window,
    pointer,
    store,
)

Integers = NDArray[np.int64]


@compiled
def _element(planes: Integers, plane: int, chunk: Integers) -> int:
    """The address of a chunk's first element."""
    element = chunk[0] * planes[plane, 1] + chunk[1] * planes[plane, 2] + chunk[2]
    return int(planes[plane, 0] + 2 * element)


@compiled
def _term(digest: Word, number: int, length: int) -> Word:
    """What chunk `number` of the segment adds to the checksum."""
    return mix64(digest + mix64(np.uint64(number << LENGTH_BITS | length)))


@compiled
def _window(book: Books) -> int:
    """The lowest of sixteen consecutive exponents; `NO_WINDOW` if they are not."""
    return int(book[0]) if book[CODES - 1] - book[0] == CODES - 1 else NO_WINDOW


@compiled
def _as_words(source: int, length: int, scratch: int) -> int:
    """Where a chunk's elements are padded to whole words: in place, or else in the scratch."""
    rest = length % WORD
    if rest == 0:
        return source
    store(pointer(scratch, np.uint64), length // WORD, np.uint64(0))
    copy(source, scratch, 2 * length)
    return scratch


@compiled
def _encode_block(
    segment: int, planes: Integers, plane: int, book: Books, chunks: Integers, layout: Integers,
    unit: int, scratch: int, keys_lo: Keys, keys_hi: Keys,
) -> tuple[int, int, Word]:  # fmt: skip
    """Write a `TOP16` plane; returns the units that it spills, its escapes, its checksum."""
    slot_bytes, block, spill = layout[0], segment + planes[plane, 4], segment + layout[4]
    slot, codes, signs = block, block + layout[1], block + layout[2]
    padded, flags, high = scratch, scratch + WORD_BYTES * WORDS, scratch + 2 * WORD_BYTES * WORDS
    window = _window(book)
    table = np.full(256, CODES, dtype=np.uint8)
    for code in range(CODES):
        table[book[code]] = code
    units, escapes, checksum = 0, 0, np.uint64(0)
    for number in range(len(chunks)):
        length = chunks[number, 3]
        words = (length + WORD - 1) // WORD
        source = _as_words(_element(planes, plane, chunks[number]), length, padded)
        if window == NO_WINDOW:
            count = pack_table(source, words, length, table, codes, signs, flags)
        else:
            count = pack_window(source, words, length, window, codes, signs, flags)
        clear(slot, slot_bytes)
        if ESCAPE_BYTES * count < slot_bytes:
            store(pointer(slot, np.uint8), 0, np.uint8(count))
            if count:
                list_escapes(source, flags, words, slot + 1)
        else:
            units += spill_chunk(
                source, flags, words, count, slot, slot_bytes, codes, spill, unit + units, high
            )
        digest = digest_chunk(slot, codes, signs, spill, words, slot_bytes, keys_lo, keys_hi)
        checksum += _term(digest, plane * len(chunks) + number, length)
        escapes += count
        slot, codes, signs = (
            slot + slot_bytes,
            codes + CODE_BYTES * words,
            signs + SIGN_BYTES * words,
        )
    clear(slot, block + layout[1] - slot)
    clear(codes, block + layout[2] - codes)
    clear(signs, block + layout[3] - signs)
    return units, escapes, checksum


@compiled
def _encode_raw(
    segment: int, planes: Integers, plane: int, chunks: Integers, scratch: int,
    keys_lo: Keys, keys_hi: Keys,
) -> Word:  # fmt: skip
    """Write a raw plane; returns its checksum."""
    at, checksum = segment + planes[plane, 4], np.uint64(0)
    end = at
    for number in range(len(chunks)):
        length = chunks[number, 3]
        words = (length + WORD - 1) // WORD
        source = _as_words(_element(planes, plane, chunks[number]), length, scratch)
        copy(source, end, WORD_BYTES * words)
        digest = digest_raw_words(source, words, keys_lo, keys_hi)
        checksum += _term(digest, plane * len(chunks) + number, length)
        end += WORD_BYTES * words
    clear(end, -(end - at) % ALIGNMENT)
    return checksum


@compiled
def encode_segment(
    segment: int, planes: Integers, books: Books, chunks: Integers, layout: Integers,
    keys_lo: Keys, keys_hi: Keys,
) -> tuple[int, int, Word]:  # fmt: skip
    """Write all blocks and the spill area; returns its units, the escapes and the checksum."""
    buffer = np.empty(3 * WORDS, dtype=np.uint64)
    scratch = int(np.int64(buffer.ctypes.data))
    units, escapes, checksum = 0, 0, np.uint64(0)
    for plane in range(len(planes)):
        if planes[plane, 3]:
            spilled, escaped, terms = _encode_block(
                segment, planes, plane, books[plane], chunks, layout, units, scratch,
                keys_lo, keys_hi,
            )  # fmt: skip
            units, escapes, checksum = units + spilled, escapes + escaped, checksum + terms
        else:
            checksum += _encode_raw(segment, planes, plane, chunks, scratch, keys_lo, keys_hi)
    size = SPILL_UNIT * units
    clear(segment + layout[4] + size, -size % ALIGNMENT)
    _keep(buffer)
    return units, escapes, checksum


@compiled
def _keep(_buffer: NDArray[np.uint64]) -> None:
    """Its caller's last use of a buffer whose address is in use until then."""


@compiled
def scan_segment(
    segment: int, segment_bytes: int, planes: Integers, chunks: Integers, layout: Integers
) -> int:
    """The first plane's error times the number of planes, plus its number; or 0."""
    spill_bytes = segment_bytes - layout[4]
    for plane in range(len(planes)):
        if not planes[plane, 3]:
            continue
        slot = segment + planes[plane, 4]
        for number in range(len(chunks)):
            error = scan_chunk(slot, segment + layout[4], spill_bytes, layout[0], chunks[number, 3])
            if error:
                return error * len(planes) + plane
            slot += layout[0]
    return 0


@compiled
def _decode_block(
    segment: int, planes: Integers, plane: int, book: Books, chunks: Integers, layout: Integers,
    scratch: int, keys_lo: Keys, keys_hi: Keys,
) -> Word:  # fmt: skip
    """Write a `TOP16` plane; returns the checksum of what its block and spilled ranges say."""
    slot_bytes, block, spill = layout[0], segment + planes[plane, 4], segment + layout[4]
    slot, codes, signs = block, block + layout[1], block + layout[2]
    high = scratch + WORD_BYTES * WORDS
    window, checksum = _window(book), np.uint64(0)
    pairs = np.empty(256, dtype=np.uint64)
    for byte in range(256):
        pairs[byte] = np.uint64(book[byte & 0xF]) << np.uint64(7)
        pairs[byte] |= np.uint64(book[byte >> 4]) << np.uint64(39)
    for number in range(len(chunks)):
        length = chunks[number, 3]
        words = (length + WORD - 1) // WORD
        target = _element(planes, plane, chunks[number])
        ragged = length % WORD > 0
        decode_chunk(
            scratch if ragged else target, words, slot, codes, signs, spill, slot_bytes,
            window, pairs, high,
        )  # fmt: skip
        if ragged:
            copy(scratch, target, 2 * length)
        digest = digest_chunk(slot, codes, signs, spill, words, slot_bytes, keys_lo, keys_hi)
        checksum += _term(digest, plane * len(chunks) + number, length)
        slot, codes, signs = (
            slot + slot_bytes,
            codes + CODE_BYTES * words,
            signs + SIGN_BYTES * words,
        )
    return checksum


@compiled
def decode_segment(
    segment: int, planes: Integers, books: Books, chunks: Integers, layout: Integers,
    keys_lo: Keys, keys_hi: Keys,
) -> Word:  # fmt: skip
    """Write all planes of a scanned payload; returns the checksum of what it says."""
    buffer = np.empty(2 * WORDS, dtype=np.uint64)
    scratch, checksum = int(np.int64(buffer.ctypes.data)), np.uint64(0)
    for plane in range(len(planes)):
        if planes[plane, 3]:
            checksum += _decode_block(
                segment, planes, plane, books[plane], chunks, layout, scratch, keys_lo, keys_hi
            )
            continue
        source = segment + planes[plane, 4]
        for number in range(len(chunks)):
            length = chunks[number, 3]
            words = (length + WORD - 1) // WORD
            copy(source, _element(planes, plane, chunks[number]), 2 * length)
            digest = digest_raw_words(source, words, keys_lo, keys_hi)
            checksum += _term(digest, plane * len(chunks) + number, length)
            source += WORD_BYTES * words
    _keep(buffer)
    return checksum


@compiled
def checksum_segment(planes: Integers, chunks: Integers, keys_lo: Keys, keys_hi: Keys) -> Word:
    buffer = np.empty(WORDS, dtype=np.uint64)
    scratch, checksum = int(np.int64(buffer.ctypes.data)), np.uint64(0)
    for plane in range(len(planes)):
        for number in range(len(chunks)):
            length = chunks[number, 3]
            source = _as_words(_element(planes, plane, chunks[number]), length, scratch)
            words = (length + WORD - 1) // WORD
            digest = digest_raw_words(source, words, keys_lo, keys_hi)
            checksum += _term(digest, plane * len(chunks) + number, length)
    _keep(buffer)
    return checksum
