"""Columns of a plane, and the byte offsets of their words in a segment."""

from dataclasses import dataclass

import torch
from torch import Tensor

from codec.elements import ElementType
from codec.format import COLUMN, WORD_BYTES, Block, Geometry, Mode, stream_widths

_CONTIGUOUS_WORDS = {8: 4, 4: 4, 3: 1}
"""Number of contiguous words of a column in a stream, by the stream's bits per element."""


@dataclass(frozen=True)
class Columns:
    """Columns of a plane, in the order of the segment. All tensors are int64.

    Elements of a plane are held as `[columns, 32]`, indexed by column and place. The flattened
    elements of a chunk are in the order of their positions.

    Attributes:
        lengths: `[chunks]`, elements of each chunk.
        widths: `[chunks]`, columns of each chunk.
        chunk: `[columns]`, chunk of each column.
        column: `[columns]`, index of each column in its chunk.
    """

    lengths: Tensor
    widths: Tensor
    chunk: Tensor
    column: Tensor

    @classmethod
    def of(cls, geometry: Geometry, device: torch.device) -> "Columns":
        """Build the columns of a geometry."""
        lengths = torch.tensor(geometry.chunk_lengths(), dtype=torch.int64, device=device)
        widths = (lengths + COLUMN - 1) // COLUMN
        chunk = torch.arange(len(lengths), device=device).repeat_interleave(widths)
        return cls(lengths, widths, chunk, index_in_group(chunk, widths))

    def indices(self, element: ElementType) -> Tensor:
        """Return the index of each element within its chunk, `[columns, 32]`."""
        place = torch.arange(COLUMN, device=self.chunk.device)
        side, row, pair = place >> 4, place >> 2 & 3, place & 3
        in_row = 2 * pair + side if element.size == 2 else 4 * (pair >> 1) + (pair & 1) + 2 * side
        return 8 * (row * self.widths[self.chunk, None] + self.column[:, None]) + in_row

    def valid(self, element: ElementType) -> Tensor:
        """Return a mask of the elements that are not padding, bool `[columns, 32]`."""
        return self.indices(element) < self.lengths[self.chunk, None]

    def split(self, content: Tensor, element: ElementType, padding: int) -> Tensor:
        """Arrange bit patterns `[elements]` as `[columns, 32]`, with padding."""
        valid = self.valid(element)
        patterns = torch.full(valid.shape, padding, device=content.device)
        patterns[valid] = content[self._in_plane(element)[valid]]
        return patterns

    def join(self, patterns: Tensor, element: ElementType) -> Tensor:
        """Return the elements of `[columns, 32]` without padding; inverse of `split`."""
        valid = self.valid(element)
        content = patterns.new_empty(int(valid.sum()))
        content[self._in_plane(element)[valid]] = patterns[valid]
        return content

    def _in_plane(self, element: ElementType) -> Tensor:
        return starts_of(self.lengths)[self.chunk, None] + self.indices(element)

    def addresses(self, block: Block, element: ElementType, mode: Mode) -> Tensor:
        """Return the byte offset in the segment of each word of each column, `[columns, words]`."""
        first, widths = starts_of(self.widths)[self.chunk, None], self.widths[self.chunk, None]
        parts = []
        for start, bits in zip(block.streams, stream_widths(element, mode), strict=True):
            together = _CONTIGUOUS_WORDS[bits] if mode else 2 * element.size
            word = torch.arange(bits, device=self.chunk.device)
            ahead = together * (word // together * widths + self.column[:, None])
            parts.append(start + WORD_BYTES * (bits * first + ahead + word % together))
        return torch.cat(parts, dim=1)


def pack(values: Tensor, bits: int, *, raw: bool = False) -> Tensor:
    """Pack values of `bits` bits, `[columns, 32]`, into the words of a stream, `[columns, bits]`.

    With `raw`, the words are the elements in memory order.
    """
    words = values.new_zeros(len(values), bits)
    for k, (word, shift) in enumerate(_bit_positions(bits, values.device, raw)):
        words.index_add_(1, word, (values >> k & 1) << shift)
    return words


def unpack(words: Tensor, *, raw: bool = False) -> Tensor:
    """Unpack the words of a stream; inverse of `pack`."""
    values = words.new_zeros(len(words), COLUMN)
    for k, (word, shift) in enumerate(_bit_positions(words.shape[1], words.device, raw)):
        values |= (words[:, word] >> shift & 1) << k
    return values


def _bit_positions(bits: int, device: torch.device, raw: bool) -> list[tuple[Tensor, Tensor]]:
    """Return, for each bit of a value, the indices of the word and of the bit that hold it.

    Both indices are int64 `[32]`, one for each place of a column.

    Places h and h + 16 of a column form pair h, 0 <= h < 16. Its two values have the same bit
    offset in the lower and the upper half of one word: word h mod `bits`, or with `raw`, words are
    filled one after another. With three bits, pair 15 does not fit: its bit k is the highest bit of
    each half of word k. See `codec/FORMAT.md`, Streams.
    """
    place = torch.arange(COLUMN, device=device)
    half, h = 16 * (place >> 4), place & 15
    together = 16 // bits
    word, step = (h // together, h % together) if raw else (h % bits, h // bits)
    fits = step < together
    return [
        (torch.where(fits, word, k), half + torch.where(fits, bits * step + k, 15))
        for k in range(bits)
    ]


def split_remainder(remainders: Tensor, element: ElementType) -> list[Tensor]:
    """Split remainders into one tensor per stream, starting with the lowest bits."""
    parts = []
    for bits in element.remainder_widths:
        parts.append(remainders & (1 << bits) - 1)
        remainders = remainders >> bits
    return parts


def join_remainder(parts: list[Tensor], element: ElementType) -> Tensor:
    """Join the tensors of the streams; inverse of `split_remainder`."""
    remainders = torch.zeros_like(parts[0])
    shift = 0
    for part, bits in zip(parts, element.remainder_widths, strict=True):
        remainders |= part << shift
        shift += bits
    return remainders


def starts_of(sizes: Tensor) -> Tensor:
    """Return the exclusive prefix sum of sizes: the start of each part."""
    return sizes.cumsum(0) - sizes


def index_in_group(owner: Tensor, counts: Tensor) -> Tensor:
    """Return the index of each item within its group, for items sorted by group."""
    return torch.arange(len(owner), device=owner.device) - starts_of(counts)[owner]


def put_words(out: Tensor, at: Tensor, words: Tensor) -> None:
    """Write 32-bit words, int64, to `out`, uint8, at byte offsets `at`."""
    for byte in range(WORD_BYTES):
        out[at + byte] = (words >> 8 * byte & 0xFF).to(torch.uint8)


def get_words(data: Tensor, at: Tensor) -> Tensor:
    """Read 32-bit words from uint8 `data` at byte offsets `at`; inverse of `put_words`."""
    parts = [data[at + byte].to(torch.int64) << 8 * byte for byte in range(WORD_BYTES)]
    return torch.stack(parts).sum(0)


def consecutive(start: int, count: int, device: torch.device) -> Tensor:
    """Return the byte offsets of `count` consecutive words, the first at byte `start`."""
    return start + WORD_BYTES * torch.arange(count, device=device)
