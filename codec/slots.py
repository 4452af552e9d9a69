"""The CPU backend's compiled loops over one chunk with a slot: its escapes and its digest.

Arguments that recur: addresses of the chunk's `slot`, of its parts of the streams `codes` and
`signs`, and of the segment's `spill` area; `high` is scratch, a u16 for each word.
"""

import numpy as np
from numpy.typing import NDArray

from codec.checksum import HIGH_TAG, SLOT_KEY
from codec.format import CODE_BYTES, ESCAPE_BYTES, FULL, LISTED, SPILL_UNIT, WORD
from codec.words import (
    Keys,
    Word,
    compiled,
    copy,
    digest_coded_words,
    list_escapes,
    load,
    mix64,
    nh,
    pack_full,
    pointer,
    store,
    unpack_full,
    unpack_table,
    unpack_window,
)

WRONG_COUNT, OUTSIDE, DISORDERED = 1, 2, 3
NO_WINDOW = -1
"""In the place of the lowest of sixteen consecutive exponents, if they are not consecutive."""


@compiled
def _u8(address: int) -> int:
    return int(load(pointer(address, np.uint8), 0))


@compiled
def _u16(address: int) -> int:
    return int(load(pointer(address, np.uint16), 0))


@compiled
def _u32(address: int) -> int:
    return int(load(pointer(address, np.uint32), 0))


@compiled
def digest_chunk(
    slot: int, codes: int, signs: int, spill: int, words: int, slot_bytes: int,
    keys_lo: Keys, keys_hi: Keys,
) -> Word:  # fmt: skip
    """The digest of a chunk as the segment says it."""
    digest = digest_coded_words(signs, codes, words, keys_lo, keys_hi)
    for j in range(slot_bytes // 8):
        value = load(pointer(slot, np.uint64), j)
        digest += nh(value, value >> np.uint64(32), keys_lo[SLOT_KEY + j], keys_hi[SLOT_KEY + j])
    kind = _u8(slot)
    spilled = spill + SPILL_UNIT * _u32(slot + 4)
    if kind == LISTED:
        for i in range(_u16(slot + 2)):
            entry = spilled + ESCAPE_BYTES * i
            digest += mix64(np.uint64(i << 24 | _u8(entry + 2) << 16 | _u16(entry)))
    elif kind == FULL:
        room = (slot_bytes - 8) // CODE_BYTES
        for word in range(room, words):
            high = _u16(spilled + CODE_BYTES * (word - room))
            digest += mix64(np.uint64(HIGH_TAG | word << 16 | high))
    return digest


@compiled
def spill_chunk(
    source: int, flags: int, words: int, escapes: int, slot: int, slot_bytes: int,
    codes: int, spill: int, unit: int, high: int,
) -> int:  # fmt: skip
    """Write a chunk of more escapes than its slot holds; returns the units that it spills."""
    spilled = spill + SPILL_UNIT * unit
    store(pointer(slot + 4, np.uint32), 0, np.uint32(unit))
    if ESCAPE_BYTES * escapes <= CODE_BYTES * words:
        units = (ESCAPE_BYTES * escapes + SPILL_UNIT - 1) // SPILL_UNIT
        store(pointer(slot, np.uint8), 0, np.uint8(LISTED))
        store(pointer(slot + 2, np.uint16), 0, np.uint16(escapes))
        store(pointer(spilled, np.uint64), units - 1, np.uint64(0))
        list_escapes(source, flags, words, spilled)
        return units
    store(pointer(slot, np.uint8), 0, np.uint8(FULL))
    pack_full(source, words, codes, high)
    in_slot = min(words, (slot_bytes - 8) // CODE_BYTES)
    copy(high, slot + 8, CODE_BYTES * in_slot)
    units = (CODE_BYTES * (words - in_slot) + SPILL_UNIT - 1) // SPILL_UNIT
    if units:
        store(pointer(spilled, np.uint64), units - 1, np.uint64(0))
        copy(high + CODE_BYTES * in_slot, spilled, CODE_BYTES * (words - in_slot))
    return units


@compiled
def scan_chunk(slot: int, spill: int, spill_bytes: int, slot_bytes: int, length: int) -> int:
    """Whether a chunk's slot, and what it points to, may be followed; 0 or a slot error."""
    kind, words = _u8(slot), (length + WORD - 1) // WORD
    offset = SPILL_UNIT * _u32(slot + 4)
    if kind == FULL:
        size = CODE_BYTES * max(0, words - (slot_bytes - 8) // CODE_BYTES)
        return OUTSIDE if offset + size > spill_bytes else 0
    count, entry = kind, slot + 1
    if kind == LISTED:
        count, entry = _u16(slot + 2), spill + offset
        if ESCAPE_BYTES * count < slot_bytes or ESCAPE_BYTES * count > CODE_BYTES * words:
            return WRONG_COUNT
        if offset + ESCAPE_BYTES * count > spill_bytes:
            return OUTSIDE
    elif ESCAPE_BYTES * count >= slot_bytes:
        return WRONG_COUNT
    last = -1
    for _ in range(count):
        position = _u16(entry)
        if position <= last or position >= length:
            return DISORDERED
        last = position
        entry += ESCAPE_BYTES
    return 0


@compiled
def decode_chunk(
    target: int, words: int, slot: int, codes: int, signs: int, spill: int, slot_bytes: int,
    window: int, pairs: NDArray[np.uint64], high: int,
) -> None:  # fmt: skip
    """Write the words of a scanned chunk."""
    kind = _u8(slot)
    spilled = spill + SPILL_UNIT * _u32(slot + 4)
    if kind == FULL:
        in_slot = min(words, (slot_bytes - 8) // CODE_BYTES)
        copy(slot + 8, high, CODE_BYTES * in_slot)
        copy(spilled, high + CODE_BYTES * in_slot, CODE_BYTES * (words - in_slot))
        unpack_full(target, words, codes, signs, high)
        return
    if window == NO_WINDOW:
        unpack_table(target, words, codes, signs, pairs)
    else:
        unpack_window(target, words, codes, signs, window)
    count, entry = kind, slot + 1
    if kind == LISTED:
        count, entry = _u16(slot + 2), spilled
    for _ in range(count):
        place = pointer(target + 2 * _u16(entry), np.uint16)
        store(place, 0, np.uint16(load(place, 0) & 0x807F | _u8(entry + 2) << 7))
        entry += ESCAPE_BYTES
