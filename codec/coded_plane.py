"""The reference's `TOP16` block: how it is written, and what it says when it is read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from codec.checksum import HIGH_TAG, SLOT_KEY, mix64_of, nh
from codec.codebook import CODES, Codebook
from codec.errors import FormatError
from codec.format import (
    CODE_BYTES,
    ESCAPE_BYTES,
    FULL,
    LISTED,
    SIGN_BYTES,
    SPILL_UNIT,
    WORDS,
    Layout,
    slot_capacity,
    slot_high_words,
)
from codec.packing import (
    get,
    inside,
    integers,
    join_words,
    put,
    read_values,
    split_words,
    starts_of,
    words_of,
    write_values,
)


@dataclass(frozen=True)
class Place:
    """Where a plane's `TOP16` block starts, and what else says where its parts lie."""

    block: int
    layout: Layout
    slot_bytes: int

    @property
    def codes(self) -> int:
        return self.block + self.layout.streams.codes

    @property
    def signs(self) -> int:
        return self.block + self.layout.streams.signs

    def slots(self, chunks: int, device: torch.device) -> Tensor:
        """Where each chunk's slot lies in the segment, int64 `[chunks]`."""
        return self.block + self.slot_bytes * torch.arange(chunks, device=device)

    def spilled(self, units: Tensor) -> Tensor:
        """Where each chunk's range of the spill area lies in the segment, from its offset."""
        return self.layout.spill + SPILL_UNIT * units

    def high(self, units: Tensor) -> Tensor:
        """Where the high nibbles of each word of each chunk stored in full lie, `[chunks, WORDS]`.

        Those of the first words lie in the slot, the others in the spill area.
        """
        word, room = torch.arange(WORDS, device=units.device), slot_high_words(self.slot_bytes)
        in_slot = self.slots(len(units), units.device)[:, None] + 8 + CODE_BYTES * word
        in_spill = self.spilled(units)[:, None] + CODE_BYTES * (word - room)
        return torch.where(word < room, in_slot, in_spill)


def encode_plane(
    chunks: Tensor, lengths: Tensor, codebook: Codebook, place: Place, units: int, out: Tensor
) -> tuple[int, int]:
    """Write a plane's block and its part of the spill area, which starts `units` into it.

    A chunk with more escapes than its slot holds lists them in the spill area, unless that takes
    more than two bytes for each word; then it stores its exponents in full instead, the low nibbles
    in the place of the codes, the high ones in the slot and the spill area.

    Returns the units that it spilled, and its escapes.
    """
    table = torch.tensor(list(codebook.code_table), device=chunks.device)
    words, valid, exponents = words_of(lengths), inside(lengths), chunks >> 7 & 0xFF
    escaped = (table[exponents] == CODES) & valid
    count = escaped.sum(dim=1)
    outside = count > slot_capacity(place.slot_bytes)
    full = outside & (ESCAPE_BYTES * count > CODE_BYTES * words)
    listed = outside & ~full
    spilled_words = (words - slot_high_words(place.slot_bytes)).clamp(min=0)
    sizes = CODE_BYTES * spilled_words * full + ESCAPE_BYTES * count * listed
    sizes = (sizes + SPILL_UNIT - 1) // SPILL_UNIT
    offsets = units + starts_of(sizes)
    total = int(sizes.sum())
    out[place.layout.length(units) : place.layout.length(units + total)] = 0

    slots = place.slots(len(lengths), chunks.device)
    kind = count.masked_fill(listed, LISTED).masked_fill(full, FULL)
    put(out, slots, kind, 1)
    put(out, slots[listed] + 2, count[listed], 2)
    put(out, slots[outside] + 4, offsets[outside], 4)

    entry = escaped & ~full[:, None]
    chunk, position = entry.nonzero(as_tuple=True)
    rank = entry.cumsum(dim=1)[entry] - 1
    start = torch.where(listed, place.spilled(offsets), slots + 1)
    put(out, start[chunk] + ESCAPE_BYTES * rank, position | exponents[entry] << 16, ESCAPE_BYTES)

    codes = table[exponents].masked_fill(escaped | ~valid, 0)
    codes = torch.where(full[:, None], exponents & 0xF, codes)
    used = inside(words, WORDS)
    put(
        out,
        place.high(offsets)[full][used[full]],
        join_words(exponents >> 4, 4)[full][used[full]],
        2,
    )
    write_values(out, place.codes, used, join_words(codes, 4), CODE_BYTES)
    write_values(
        out, place.signs, used, join_words(chunks >> 8 & 0x80 | chunks & 0x7F, 8), SIGN_BYTES
    )
    return total, int(count.sum())


@dataclass(frozen=True)
class CodedPlane:
    """A `TOP16` plane as a segment says it, all int64 or bool.

    Attributes:
        slots: bytes `[chunks, slot_bytes]`.
        codes, signs, high: words `[chunks, WORDS]`; `high` of the chunks stored in full.
        used: which words there are; `spilled`: which `high` ones lie in the spill area.
        chunk, rank, position, exponent, listed: `[escapes]`, of each one in a slot or a list.
    """

    slots: Tensor
    codes: Tensor
    signs: Tensor
    high: Tensor
    used: Tensor
    spilled: Tensor
    full: Tensor
    chunk: Tensor
    rank: Tensor
    position: Tensor
    exponent: Tensor
    listed: Tensor

    @classmethod
    def read(cls, data: Tensor, lengths: Tensor, place: Place) -> "CodedPlane":
        """Take a plane of the segment `data` apart. Raises `FormatError`."""
        at, words = place.slots(len(lengths), data.device), words_of(lengths)
        capacity, room = slot_capacity(place.slot_bytes), slot_high_words(place.slot_bytes)
        kind, offsets = get(data, at, 1), get(data, at + 4, 4)
        full, listed = kind == FULL, kind == LISTED
        outside = full | listed
        count = torch.where(listed, get(data, at + 2, 2), kind).masked_fill(full, 0)
        most = torch.where(listed, CODE_BYTES * words // ESCAPE_BYTES, capacity)
        if bool(((count > most) | listed & (count <= capacity)).any()):
            raise FormatError("a chunk has more escapes than it may, or lists too few")
        size = ESCAPE_BYTES * count + CODE_BYTES * (words - room).clamp(min=0) * full
        if bool((outside & (place.spilled(offsets) + size > len(data))).any()):
            raise FormatError("a chunk's spilled bytes lie outside the segment")

        chunk = torch.arange(len(lengths), device=data.device).repeat_interleave(count)
        rank = torch.arange(len(chunk), device=data.device) - starts_of(count)[chunk]
        start = torch.where(listed, place.spilled(offsets), at + 1)[chunk]
        position = get(data, start + ESCAPE_BYTES * rank, 2)
        ascending = (position[1:] > position[:-1]) | (chunk[1:] != chunk[:-1])
        if bool((position >= lengths[chunk]).any()) or not bool(ascending.all()):
            raise FormatError("the positions of a chunk's escapes do not ascend within it")

        used = inside(words, WORDS)
        high = torch.zeros(used.shape, dtype=torch.int64, device=data.device)
        high[used & full[:, None]] = get(data, place.high(offsets)[used & full[:, None]], 2)
        return cls(
            slots=get(data, at[:, None] + torch.arange(place.slot_bytes, device=data.device), 1),
            codes=read_values(data, place.codes, used, CODE_BYTES),
            signs=read_values(data, place.signs, used, SIGN_BYTES),
            high=high,
            used=used,
            spilled=used & full[:, None] & (torch.arange(WORDS, device=data.device) >= room),
            full=full,
            chunk=chunk,
            rank=rank,
            position=position,
            exponent=get(data, start + ESCAPE_BYTES * rank + 2, 1),
            listed=listed[chunk],
        )

    def patterns(self, codebook: Codebook) -> Tensor:
        """The elements, `[chunks, CHUNK]`."""
        codes, signs = split_words(self.codes, 4), split_words(self.signs, 8)
        exponents = torch.tensor(codebook.exponents, device=codes.device)[codes]
        exponents = torch.where(
            self.full[:, None], codes | split_words(self.high, 4) << 4, exponents
        )
        exponents[self.chunk, self.position] = self.exponent
        return (signs & 0x80) << 8 | exponents << 7 | signs & 0x7F

    def digests(self, lengths: Tensor) -> Tensor:
        """int64 `[chunks]`, see `checksum.py`."""
        digests = (nh(self.signs, self.codes) * self.used).sum(dim=1)
        halves = integers(self.slots.view(len(lengths), self.slots.shape[1] // 8, 2, 4))
        digests += nh(halves[..., 0], halves[..., 1], SLOT_KEY).sum(dim=1)
        word = torch.arange(WORDS, device=lengths.device)
        digests += (mix64_of(HIGH_TAG | word << 16 | self.high) * self.spilled).sum(dim=1)
        entries = mix64_of(self.rank << 24 | self.exponent << 16 | self.position)
        return digests.index_add(0, self.chunk, entries * self.listed)
