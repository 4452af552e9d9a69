"""The reference's planes with codes: from elements to words and entries, and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from codec import checksum
from codec.codebook import SECOND_CODES, Codebook
from codec.errors import FormatError
from codec.format import CHUNK, COLUMN, MAX_NIBBLES, MAX_SECOND, Mode, spilled_words, stream_widths
from codec.reference.packing import Columns, join_rest, pack, ranks, split_rest, starts_of, unpack

_NO_CODE = 16
"""The bit of `Codebook.code_table` that says that an exponent has no code."""
_NIBBLES = 8
"""Second-level codes in a word."""


@dataclass(frozen=True)
class CodedPlane:
    """What the block of a plane with codes says, and its part of the entries. All int64.

    Attributes:
        words: `[columns, words]`, of each column, in its streams' order.
        units: `[chunks]`, how many entries each chunk has.
        entries: `[sum of units]`, the words of all of them.
    """

    words: Tensor
    units: Tensor
    entries: Tensor


@dataclass(frozen=True)
class _Escapes:
    """The elements without a code, chunk by chunk in the order of their positions. All int64.

    Attributes:
        chunk, position, exponent, nibble: `[escapes]`; the nibble is the code at the second level.
        nibbles, words: `[chunks]`, how many second-level codes and how many words list them.
    """

    chunk: Tensor
    position: Tensor
    exponent: Tensor
    nibble: Tensor
    nibbles: Tensor
    words: Tensor

    @classmethod
    def of(
        cls, exponents: Tensor, escaped: Tensor, columns: Columns, codebook: Codebook
    ) -> "_Escapes":
        chunk, position = _positions(escaped, columns)
        exponent, chunks = exponents[escaped], len(columns.widths)
        nibble = _table(codebook.second_table, exponent)[exponent]
        # In top16, which has no second level, all are words and none a nibble.
        nibbles = _per_chunk(chunk, chunks) * codebook.mode.has_escape_code
        words = _per_chunk(chunk[nibble == SECOND_CODES], chunks)
        return cls(chunk, position, exponent, nibble, nibbles, words)

    @property
    def nibble_words(self) -> Tensor:
        return (self.nibbles + _NIBBLES - 1) // _NIBBLES

    def write(self, entries: Tensor, start: Tensor, lists: Tensor) -> None:
        """Into `entries`, zeros, from each chunk's start on; only of the chunks that have lists."""
        if bool(self.nibbles.any()):
            rank = ranks(self.chunk, self.nibbles)
            at, shift = start[self.chunk] + rank // _NIBBLES, 4 * (rank % _NIBBLES)
            listed = lists[self.chunk]
            entries.index_add_(0, at[listed], (self.nibble << shift)[listed])
        word = self.nibble == SECOND_CODES
        chunk = self.chunk[word]
        at, listed = (start + self.nibble_words)[chunk] + ranks(chunk, self.words), lists[chunk]
        entries[at[listed]] = (self.exponent << 16 | self.position)[word][listed]


def encode_plane(patterns: Tensor, columns: Columns, codebook: Codebook) -> tuple[CodedPlane, int]:
    """Encode elements `[columns, 32]`, padded; returns how many exponents had no code, too."""
    element, mode = codebook.element, codebook.mode
    exponents = patterns >> element.mantissa_bits & element.exponents - 1
    codes = _table(codebook.code_table, patterns)[exponents]
    escaped = codes >= _NO_CODE
    codes = codes.masked_fill(escaped, mode.codes) if mode.has_escape_code else codes & 0xF
    values = [codes, *split_rest(_rests_of(patterns, codebook), element)]
    widths = stream_widths(element, mode)
    coded = torch.cat([pack(v, bits) for v, bits in zip(values, widths, strict=True)], dim=1)

    spilled = spilled_words(element, mode)
    escapes = _Escapes.of(exponents, escaped, columns, codebook)
    units, most = escapes.nibble_words + escapes.words, spilled * columns.widths
    full = units >= most
    if mode.has_escape_code:
        full |= (escapes.nibbles > MAX_NIBBLES) | (escapes.words > MAX_SECOND)
    units = torch.where(full, most, units)
    entries, start = units.new_zeros(int(units.sum())), starts_of(units)
    escapes.write(entries, start, ~full)
    in_full, column_full = pack(patterns, 8 * element.size, raw=True), full[columns.chunk]
    entries[_spilled_at(columns, start, spilled)[column_full]] = in_full[column_full, -spilled:]
    words = torch.where(column_full[:, None], in_full[:, :-spilled], coded)
    return CodedPlane(words, units, entries), len(escapes.chunk)


def checksum_of(plane: CodedPlane, number: int, columns: Columns, codebook: Codebook) -> int:
    """What a plane adds to the checksum, as the segment's plane of this number."""
    spilled = spilled_words(codebook.element, codebook.mode)
    full, first = plane.units == spilled * columns.widths, number * len(columns.widths)
    at = _spilled_at(columns, starts_of(plane.units), spilled)
    beyond = plane.words.new_zeros(at.shape)
    beyond[full[columns.chunk]] = plane.entries[at[full[columns.chunk]]]
    words = torch.cat([plane.words, beyond], dim=1)
    units = plane.units[columns.chunk]
    total = int(checksum.columns(words, first + columns.chunk, columns.column, units))
    owner = _owners(plane.units)
    listed, rank = ~full[owner], ranks(owner, plane.units)
    entries = checksum.entries(plane.entries[listed], first + owner[listed], rank[listed])
    return total + int(entries)


def decode_plane(plane: CodedPlane, columns: Columns, codebook: Codebook) -> Tensor:
    """The elements, patterns `[columns, 32]`. Raises `FormatError` if an entry is invalid."""
    element, mode = codebook.element, codebook.mode
    spilled = spilled_words(element, mode)
    most = spilled * columns.widths
    if bool((plane.units > most).any()):
        raise FormatError("a chunk has more entries than it may")
    full = plane.units == most

    first, parts = 0, []
    for bits in stream_widths(element, mode):
        parts.append(unpack(plane.words[:, first : first + bits]))
        first += bits
    codes, rests = parts[0], join_rest(parts[1:], element)
    exponents = torch.tensor([*codebook.exponents, 0], device=codes.device)[codes]
    if mode is Mode.TOP16:
        _read_list(exponents, plane, columns, codebook, full)
    else:
        _read_levels(exponents, codes == mode.codes, plane, columns, codebook, full)
    sign, mantissa = rests >> element.mantissa_bits, rests & (1 << element.mantissa_bits) - 1
    coded = (sign << element.exponent_bits | exponents) << element.mantissa_bits | mantissa

    column_full = full[columns.chunk]
    at = _spilled_at(columns, starts_of(plane.units), spilled)[column_full]
    in_full = torch.cat([plane.words[column_full], plane.entries[at]], dim=1)
    coded[column_full] = unpack(in_full, raw=True)
    return coded


def _read_list(
    exponents: Tensor, plane: CodedPlane, columns: Columns, codebook: Codebook, full: Tensor
) -> None:
    """Put the exponents that `TOP16` lists, words of position and exponent, at their places."""
    chunk = _owners(plane.units)
    short = ~full[chunk]
    chunk, entry = chunk[short], plane.entries[short]
    position, exponent = _parsed(entry, codebook)
    column, place = position // COLUMN, position % COLUMN
    inside = column < columns.widths[chunk]
    row = (starts_of(columns.widths)[chunk] + column)[inside]
    if not bool(inside.all()) or not bool(columns.valid(codebook.element)[row, place].all()):
        raise FormatError("an entry's position lies outside its chunk")
    if not bool(((position[1:] > position[:-1]) | (chunk[1:] != chunk[:-1])).all()):
        raise FormatError("the positions of a chunk's entries do not ascend")
    exponents[row, place] = exponent


def _read_levels(
    exponents: Tensor,
    escaped: Tensor,
    plane: CodedPlane,
    columns: Columns,
    codebook: Codebook,
    full: Tensor,
) -> None:
    """Put exponents at the places of the escape codes: by second-level codes, or from words."""
    escaped = escaped & ~full[columns.chunk, None]
    chunk, position = _positions(escaped, columns)
    count = _per_chunk(chunk, len(full))
    nibble_words = (count + _NIBBLES - 1) // _NIBBLES
    units = plane.units.masked_fill(full, 0)
    if bool((count > MAX_NIBBLES).any()) or bool((nibble_words > units).any()):
        raise FormatError("a chunk has more escapes than it may")

    start, owner = starts_of(plane.units), _owners(nibble_words)
    number, in_word = ranks(owner, nibble_words), torch.arange(_NIBBLES, device=owner.device)
    nibbles = plane.entries[start[owner] + number, None] >> 4 * in_word & 0xF
    used = _NIBBLES * number[:, None] + in_word < count[owner, None]
    if bool(nibbles[~used].any()):
        raise FormatError("unused second-level codes are not zero")
    nibble = nibbles[used]
    listed = nibble == SECOND_CODES
    if bool((nibble[~listed] >= len(codebook.second)).any()):
        raise FormatError("the codebook has no such second-level code")
    second = _per_chunk(chunk[listed], len(full))
    if bool((second > MAX_SECOND).any()) or bool((nibble_words + second != units).any()):
        raise FormatError("a chunk's entries are not as many as its escapes need")

    at = (start + nibble_words)[chunk[listed]] + ranks(chunk[listed], second)
    announced, exponent = _parsed(plane.entries[at], codebook)
    if not torch.equal(announced, position[listed]):
        raise FormatError("an entry's position is not its escape's")
    found = torch.tensor([*codebook.second, *[0] * 16], device=nibble.device)[nibble]
    found[listed] = exponent
    exponents[escaped] = found


def _parsed(entry: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Positions and exponents of entries that are words."""
    position, exponent = entry & CHUNK - 1, entry >> 16
    if bool((exponent >= codebook.element.exponents).any()):
        raise FormatError(f"an entry's exponent is none of {codebook.element.name}")
    if not torch.equal(exponent << 16 | position, entry):
        raise FormatError("an entry's unused bits are not zero")
    return position, exponent


def _rests_of(patterns: Tensor, codebook: Codebook) -> Tensor:
    """Sign above mantissa."""
    element = codebook.element
    sign = patterns >> element.exponent_bits + element.mantissa_bits
    return sign << element.mantissa_bits | patterns & (1 << element.mantissa_bits) - 1


def _spilled_at(columns: Columns, start: Tensor, spilled: int) -> Tensor:
    """Which entries a column's last words are, if its chunk is full: `[columns, spilled]`."""
    word = torch.arange(spilled, device=start.device) * columns.widths[columns.chunk, None]
    return start[columns.chunk, None] + word + columns.column[:, None]


def _positions(marked: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """Chunk and position of each marked element of `[columns, 32]`, in their order."""
    row, place = marked.nonzero(as_tuple=True)
    return columns.chunk[row], COLUMN * columns.column[row] + place


def _per_chunk(chunk: Tensor, chunks: int) -> Tensor:
    return torch.bincount(chunk, minlength=chunks)


def _owners(sizes: Tensor) -> Tensor:
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)


def _table(table: bytes, like: Tensor) -> Tensor:
    return torch.tensor(list(table), device=like.device)
