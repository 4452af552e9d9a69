"""Planes with codes: encode elements to words and entries, decode them, compute the checksum."""

from dataclasses import dataclass

import torch
from torch import Tensor

from codec import checksum
from codec.codebook import SECOND_CODES, Codebook
from codec.errors import FormatError
from codec.format import CHUNK, COLUMN, MAX_LISTED, MAX_NIBBLES, Mode, overflow_words, stream_widths
from codec.reference.packing import (
    Columns,
    index_in_group,
    join_remainder,
    pack,
    split_remainder,
    starts_of,
    unpack,
)

_NO_CODE = 16
"""Bit of `Codebook.code_table` that marks an exponent without a code."""
_NIBBLES = 8
"""Second-level codes per word."""


@dataclass(frozen=True)
class CodedPlane:
    """Content of the block of a plane with codes, and its entries. All tensors are int64.

    Attributes:
        words: `[columns, words]`, words of each column, in the order of the streams.
        entry_words: `[chunks]`, number of entry words of each chunk.
        entries: `[sum of entry_words]`, entry words of all chunks.
    """

    words: Tensor
    entry_words: Tensor
    entries: Tensor


@dataclass(frozen=True)
class _Escapes:
    """Elements without a code, by chunk and position. All tensors are int64.

    Attributes:
        chunk, position, exponent: `[escapes]`.
        nibble: `[escapes]`, second-level code; 15 for listed escapes.
        nibbles: `[chunks]`, number of second-level codes.
        words: `[chunks]`, number of listed escapes.
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
        exponent = exponents[escaped]
        chunks = len(columns.widths)
        nibble = _table(codebook.second_table, exponent)[exponent]
        # TOP16 has no second level: all its escapes are listed.
        nibbles = _count_per_chunk(chunk, chunks) * codebook.mode.has_escape_code
        words = _count_per_chunk(chunk[nibble == SECOND_CODES], chunks)
        return cls(chunk, position, exponent, nibble, nibbles, words)

    @property
    def nibble_words(self) -> Tensor:
        return (self.nibbles + _NIBBLES - 1) // _NIBBLES

    def write(self, entries: Tensor, start: Tensor, coded: Tensor) -> None:
        """Write the entries of the chunks where `coded` is true, at the chunks' `start` indices."""
        if bool(self.nibbles.any()):
            rank = index_in_group(self.chunk, self.nibbles)
            at, shift = start[self.chunk] + rank // _NIBBLES, 4 * (rank % _NIBBLES)
            listed = coded[self.chunk]
            entries.index_add_(0, at[listed], (self.nibble << shift)[listed])
        word = self.nibble == SECOND_CODES
        chunk = self.chunk[word]
        at, listed = (
            (start + self.nibble_words)[chunk] + index_in_group(chunk, self.words),
            coded[chunk],
        )
        entries[at[listed]] = (self.exponent << 16 | self.position)[word][listed]


def encode_plane(patterns: Tensor, columns: Columns, codebook: Codebook) -> tuple[CodedPlane, int]:
    """Encode padded elements, int64 bit patterns `[columns, 32]`.

    Returns:
        The encoded plane, and the number of elements whose exponent has no code.
    """
    element, mode = codebook.element, codebook.mode
    exponents = patterns >> element.mantissa_bits & element.exponents - 1
    codes = _table(codebook.code_table, patterns)[exponents]
    escaped = codes >= _NO_CODE
    codes = codes.masked_fill(escaped, mode.codes) if mode.has_escape_code else codes & 0xF
    values = [codes, *split_remainder(_remainders_of(patterns, codebook), element)]
    widths = stream_widths(element, mode)
    coded = torch.cat([pack(v, bits) for v, bits in zip(values, widths, strict=True)], dim=1)

    overflow = overflow_words(element, mode)
    escapes = _Escapes.of(exponents, escaped, columns, codebook)
    entry_words, max_words = escapes.nibble_words + escapes.words, overflow * columns.widths
    uncoded = entry_words >= max_words
    if mode.has_escape_code:
        uncoded |= (escapes.nibbles > MAX_NIBBLES) | (escapes.words > MAX_LISTED)
    entry_words = torch.where(uncoded, max_words, entry_words)
    entries = entry_words.new_zeros(int(entry_words.sum()))
    start = starts_of(entry_words)
    escapes.write(entries, start, ~uncoded)
    raw = pack(patterns, 8 * element.size, raw=True)
    column_uncoded = uncoded[columns.chunk]
    at = _overflow_at(columns, start, overflow)[column_uncoded]
    entries[at] = raw[column_uncoded, -overflow:]
    words = torch.where(column_uncoded[:, None], raw[:, :-overflow], coded)
    return CodedPlane(words, entry_words, entries), len(escapes.chunk)


def checksum_of(plane: CodedPlane, number: int, columns: Columns, codebook: Codebook) -> int:
    """Return the checksum of a plane with codes; `number` is its index in the segment."""
    overflow = overflow_words(codebook.element, codebook.mode)
    uncoded = plane.entry_words == overflow * columns.widths
    first = number * len(columns.widths)
    at = _overflow_at(columns, starts_of(plane.entry_words), overflow)
    last_words = plane.words.new_zeros(at.shape)
    last_words[uncoded[columns.chunk]] = plane.entries[at[uncoded[columns.chunk]]]
    words = torch.cat([plane.words, last_words], dim=1)
    entry_words = plane.entry_words[columns.chunk]
    total = int(checksum.columns(words, first + columns.chunk, columns.column, entry_words))
    owner = _owners(plane.entry_words)
    listed = ~uncoded[owner]
    rank = index_in_group(owner, plane.entry_words)
    entries = checksum.entries(plane.entries[listed], first + owner[listed], rank[listed])
    return total + int(entries)


def decode_plane(plane: CodedPlane, columns: Columns, codebook: Codebook) -> Tensor:
    """Return the bit patterns of a plane, int64 `[columns, 32]`, padding included.

    Raises:
        FormatError: an entry is invalid.
    """
    element, mode = codebook.element, codebook.mode
    overflow = overflow_words(element, mode)
    max_words = overflow * columns.widths
    if bool((plane.entry_words > max_words).any()):
        raise FormatError("a chunk has too many entries")
    uncoded = plane.entry_words == max_words

    first = 0
    parts = []
    for bits in stream_widths(element, mode):
        parts.append(unpack(plane.words[:, first : first + bits]))
        first += bits
    codes = parts[0]
    remainders = join_remainder(parts[1:], element)
    exponents = torch.tensor([*codebook.exponents, 0], device=codes.device)[codes]
    if mode is Mode.TOP16:
        _read_list(exponents, plane, columns, codebook, uncoded)
    else:
        _read_levels(exponents, codes == mode.codes, plane, columns, codebook, uncoded)
    sign = remainders >> element.mantissa_bits
    mantissa = remainders & (1 << element.mantissa_bits) - 1
    coded = (sign << element.exponent_bits | exponents) << element.mantissa_bits | mantissa

    column_uncoded = uncoded[columns.chunk]
    at = _overflow_at(columns, starts_of(plane.entry_words), overflow)[column_uncoded]
    uncoded_words = torch.cat([plane.words[column_uncoded], plane.entries[at]], dim=1)
    coded[column_uncoded] = unpack(uncoded_words, raw=True)
    return coded


def _read_list(
    exponents: Tensor, plane: CodedPlane, columns: Columns, codebook: Codebook, uncoded: Tensor
) -> None:
    """Write the exponents of `TOP16` entries to their positions in `exponents`, `[columns, 32]`.

    Args:
        uncoded: bool `[chunks]`, whether a chunk is stored uncoded.
    """
    chunk = _owners(plane.entry_words)
    coded = ~uncoded[chunk]
    chunk, entry = chunk[coded], plane.entries[coded]
    position, exponent = _parsed(entry, codebook)
    column, place = position // COLUMN, position % COLUMN
    inside = column < columns.widths[chunk]
    row = (starts_of(columns.widths)[chunk] + column)[inside]
    if not bool(inside.all()) or not bool(columns.valid(codebook.element)[row, place].all()):
        raise FormatError("an entry's position is outside its chunk")
    if not bool(((position[1:] > position[:-1]) | (chunk[1:] != chunk[:-1])).all()):
        raise FormatError("the entry positions of a chunk are not ascending")
    exponents[row, place] = exponent


def _read_levels(
    exponents: Tensor,
    escaped: Tensor,
    plane: CodedPlane,
    columns: Columns,
    codebook: Codebook,
    uncoded: Tensor,
) -> None:
    """Write the exponents of escape codes to `exponents`, `[columns, 32]`.

    Args:
        escaped: bool `[columns, 32]`, whether an element has the escape code.
        uncoded: bool `[chunks]`, whether a chunk is stored uncoded.
    """
    escaped = escaped & ~uncoded[columns.chunk, None]
    chunk, position = _positions(escaped, columns)
    count = _count_per_chunk(chunk, len(uncoded))
    nibble_words = (count + _NIBBLES - 1) // _NIBBLES
    entry_words = plane.entry_words.masked_fill(uncoded, 0)
    if bool((count > MAX_NIBBLES).any()) or bool((nibble_words > entry_words).any()):
        raise FormatError("a chunk has too many escapes")

    start = starts_of(plane.entry_words)
    owner = _owners(nibble_words)
    number = index_in_group(owner, nibble_words)
    in_word = torch.arange(_NIBBLES, device=owner.device)
    nibbles = plane.entries[start[owner] + number, None] >> 4 * in_word & 0xF
    used = _NIBBLES * number[:, None] + in_word < count[owner, None]
    if bool(nibbles[~used].any()):
        raise FormatError("unused second-level codes are not zero")
    nibble = nibbles[used]
    listed = nibble == SECOND_CODES
    if bool((nibble[~listed] >= len(codebook.second)).any()):
        raise FormatError("a second-level code is not in the codebook")
    second = _count_per_chunk(chunk[listed], len(uncoded))
    if bool((second > MAX_LISTED).any()) or bool((nibble_words + second != entry_words).any()):
        raise FormatError("the number of entries does not match the number of escapes")

    at = (start + nibble_words)[chunk[listed]] + index_in_group(chunk[listed], second)
    stated, exponent = _parsed(plane.entries[at], codebook)
    if not torch.equal(stated, position[listed]):
        raise FormatError("an entry's position does not match its escape")
    found = torch.tensor([*codebook.second, *[0] * 16], device=nibble.device)[nibble]
    found[listed] = exponent
    exponents[escaped] = found


def _parsed(entry: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Return the positions and exponents stored in the entry words of listed escapes."""
    position, exponent = entry & CHUNK - 1, entry >> 16
    if bool((exponent >= codebook.element.exponents).any()):
        raise FormatError(f"an entry's exponent is out of range for {codebook.element.name}")
    if not torch.equal(exponent << 16 | position, entry):
        raise FormatError("unused bits of an entry are not zero")
    return position, exponent


def _remainders_of(patterns: Tensor, codebook: Codebook) -> Tensor:
    """Return the remainder of each bit pattern: sign above mantissa."""
    element = codebook.element
    sign = patterns >> element.exponent_bits + element.mantissa_bits
    return sign << element.mantissa_bits | patterns & (1 << element.mantissa_bits) - 1


def _overflow_at(columns: Columns, start: Tensor, overflow: int) -> Tensor:
    """Return, for each column, the indices of the entries with its last words if it is uncoded.

    Args:
        start: int64 `[chunks]`, index of each chunk's first entry.
        overflow: number of words of a column that are stored as entries.

    Returns:
        int64 `[columns, overflow]`.
    """
    word = torch.arange(overflow, device=start.device) * columns.widths[columns.chunk, None]
    return start[columns.chunk, None] + word + columns.column[:, None]


def _positions(marked: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """Return chunk and position of each marked element of `[columns, 32]`, in order."""
    row, place = marked.nonzero(as_tuple=True)
    return columns.chunk[row], COLUMN * columns.column[row] + place


def _count_per_chunk(chunk: Tensor, chunks: int) -> Tensor:
    """Return the number of items in each of `chunks` chunks, given the chunk of each item."""
    return torch.bincount(chunk, minlength=chunks)


def _owners(sizes: Tensor) -> Tensor:
    """Return the chunk of each item, given the number of items of each chunk."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)


def _table(table: bytes, like: Tensor) -> Tensor:
    """Convert a byte table to a tensor on the device of `like`."""
    return torch.tensor(list(table), device=like.device)
