"""How the reference cuts a plane into columns, and where in a segment their words lie."""

from dataclasses import dataclass

import torch
from torch import Tensor

from codec.elements import ElementType
from codec.format import COLUMN, WORD_BYTES, Block, Geometry, Mode, stream_widths

_WORDS_TOGETHER = {8: 4, 4: 4, 3: 1}
"""Of each stream's width: how many words of a column lie one after another."""


@dataclass(frozen=True)
class Columns:
    """The columns of a plane, chunk by chunk. All int64.

    A plane's elements come as `[columns, 32]`, each at its place; flattened, the elements of a
    chunk are in the order of their positions.

    Attributes:
        lengths: `[chunks]`, elements of each chunk.
        widths: `[chunks]`, columns of each chunk.
        chunk: `[columns]`, the chunk of each column.
        column: `[columns]`, its number in this chunk.
    """

    lengths: Tensor
    widths: Tensor
    chunk: Tensor
    column: Tensor

    @classmethod
    def of(cls, geometry: Geometry, device: torch.device) -> "Columns":
        lengths = torch.tensor(geometry.chunk_lengths(), dtype=torch.int64, device=device)
        widths = (lengths + COLUMN - 1) // COLUMN
        chunk = torch.arange(len(lengths), device=device).repeat_interleave(widths)
        return cls(lengths, widths, chunk, ranks(chunk, widths))

    def numbers(self, element: ElementType) -> Tensor:
        """Which element of its chunk each one is, `[columns, 32]`."""
        place = torch.arange(COLUMN, device=self.chunk.device)
        side, row, pair = place >> 4, place >> 2 & 3, place & 3
        in_row = 2 * pair + side if element.size == 2 else 4 * (pair >> 1) + (pair & 1) + 2 * side
        return 8 * (row * self.widths[self.chunk, None] + self.column[:, None]) + in_row

    def valid(self, element: ElementType) -> Tensor:
        """bool `[columns, 32]`: which elements are no padding."""
        return self.numbers(element) < self.lengths[self.chunk, None]

    def cut(self, content: Tensor, element: ElementType, padding: int) -> Tensor:
        """Patterns `[elements]` → `[columns, 32]`."""
        valid = self.valid(element)
        patterns = torch.full(valid.shape, padding, device=content.device)
        patterns[valid] = content[self._in_plane(element)[valid]]
        return patterns

    def joined(self, patterns: Tensor, element: ElementType) -> Tensor:
        """The inverse of `cut`."""
        valid = self.valid(element)
        content = patterns.new_empty(int(valid.sum()))
        content[self._in_plane(element)[valid]] = patterns[valid]
        return content

    def _in_plane(self, element: ElementType) -> Tensor:
        return starts_of(self.lengths)[self.chunk, None] + self.numbers(element)

    def addresses(self, block: Block, element: ElementType, mode: Mode) -> Tensor:
        """Where each word of each column lies, in its streams' order: `[columns, words]`, bytes."""
        first, widths = starts_of(self.widths)[self.chunk, None], self.widths[self.chunk, None]
        parts = []
        for start, bits in zip(block.streams, stream_widths(element, mode), strict=True):
            together = _WORDS_TOGETHER[bits] if mode else 2 * element.size
            word = torch.arange(bits, device=self.chunk.device)
            ahead = together * (word // together * widths + self.column[:, None])
            parts.append(start + WORD_BYTES * (bits * first + ahead + word % together))
        return torch.cat(parts, dim=1)


def pack(values: Tensor, bits: int, *, raw: bool = False) -> Tensor:
    """Values of so many bits, `[columns, 32]` → the words of a stream, `[columns, bits]`; `raw`:
    as elements lie in memory."""
    words = values.new_zeros(len(values), bits)
    for k, (word, shift) in enumerate(_places(bits, values.device, raw)):
        words.index_add_(1, word, (values >> k & 1) << shift)
    return words


def unpack(words: Tensor, *, raw: bool = False) -> Tensor:
    """The inverse of `pack`."""
    values = words.new_zeros(len(words), COLUMN)
    for k, (word, shift) in enumerate(_places(words.shape[1], words.device, raw)):
        values |= (words[:, word] >> shift & 1) << k
    return values


def _places(bits: int, device: torch.device, raw: bool) -> list[tuple[Tensor, Tensor]]:
    """For each bit of an element: the word and the bit of it that hold it, int64 `[32]`.

    A pair has one side in each half of a word. Pairs go to the words in turn, or if raw, as many
    as a word holds to each. What is left over, of 3 bits the last pair, takes the highest bit of
    the halves of all words.
    """
    place = torch.arange(COLUMN, device=device)
    half, h = 16 * (place >> 4), place & 15
    together = 16 // bits
    word, turn = (h // together, h % together) if raw else (h % bits, h // bits)
    fits = turn < together
    return [
        (torch.where(fits, word, k), half + torch.where(fits, bits * turn + k, 15))
        for k in range(bits)
    ]


def split_rest(rests: Tensor, element: ElementType) -> list[Tensor]:
    """The parts of the rests that each stream holds."""
    parts = []
    for bits in element.remainder_widths:
        parts.append(rests & (1 << bits) - 1)
        rests = rests >> bits
    return parts


def join_rest(parts: list[Tensor], element: ElementType) -> Tensor:
    """The inverse of `split_rest`."""
    rests, shift = torch.zeros_like(parts[0]), 0
    for part, bits in zip(parts, element.remainder_widths, strict=True):
        rests |= part << shift
        shift += bits
    return rests


def starts_of(sizes: Tensor) -> Tensor:
    """Where each of consecutive parts of these sizes starts."""
    return sizes.cumsum(0) - sizes


def ranks(owner: Tensor, counts: Tensor) -> Tensor:
    """Of things sorted by their owner, who has so many: the number of each among its owner's."""
    return torch.arange(len(owner), device=owner.device) - starts_of(counts)[owner]


def put_words(out: Tensor, at: Tensor, words: Tensor) -> None:
    """Write each word at its address."""
    for byte in range(WORD_BYTES):
        out[at + byte] = (words >> 8 * byte & 0xFF).to(torch.uint8)


def get_words(data: Tensor, at: Tensor) -> Tensor:
    """The inverse of `put_words`; int64."""
    parts = [data[at + byte].to(torch.int64) << 8 * byte for byte in range(WORD_BYTES)]
    return torch.stack(parts).sum(0)


def consecutive(start: int, count: int, device: torch.device) -> Tensor:
    """The addresses of so many words one after another."""
    return start + WORD_BYTES * torch.arange(count, device=device)
