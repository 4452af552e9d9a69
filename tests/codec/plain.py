"""Decoder of wire version 3 in plain Python, written from `codec/FORMAT.md` and `checksum.py`."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
TYPES = {1: (8, 7, [8]), 2: (5, 10, [8, 3]), 3: (5, 2, [3]), 4: (4, 3, [4])}
"""Bits of the exponent, of the mantissa and of each remainder stream, by element type number."""
INTEGERS = {16: 1, 17: 1, 18: 2, 19: 2, 20: 2}
"""Bytes of a stored unit, by element type number of an integer type."""
CODE_BITS = {1: 4, 2: 4, 3: 3}
ESCAPE = {2: 15, 3: 7}

Book = tuple[Sequence[int], Sequence[int]]
"""Exponents with a first-level code, and exponents with a second-level code, of a codebook."""


def mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


KEYS = [mix64((k + 1) * GOLDEN & MASK) >> 32 | 1 for k in range(16)]


def fold(z: int) -> int:
    z &= MASK
    y = (z ^ z >> 32) * GOLDEN & MASK
    return y ^ y >> 32


def column_term(words: Sequence[int], chunk: int, column: int, entry_words: int) -> int:
    digest = sum(word * key for word, key in zip(words, KEYS, strict=False))
    return fold(digest + ((32 * chunk + column) << 8 | entry_words) * GOLDEN)


def entry_term(word: int, chunk: int, number: int) -> int:
    return word * (fold((chunk << 8 | number) * GOLDEN) | 1)


def padded(size: int) -> int:
    return -(-size // 16) * 16


def location(number: int, columns: int, size: int) -> tuple[int, int, int, int]:
    """Return column, row, pair and side of element `number` of a chunk."""
    row, column = divmod(number // 8, columns)
    if size == 2:
        return column, row, number % 8 // 2, number % 2
    return column, row, number % 8 // 4 * 2 + number % 2, number % 4 // 2


def bits_at(words: Sequence[int], width: int, row: int, pair: int, side: int) -> int:
    """Return an element's value in a stream of `width` bits per element, given a column's words."""
    h, half = 4 * row + pair, 16 * side
    if width != 3 or h < 15:
        return words[h % width] >> (width * (h // width) + half) & (1 << width) - 1
    return sum((words[k] >> (15 + half) & 1) << k for k in range(3))


def raw_bits_at(words: Sequence[int], size: int, row: int, pair: int, side: int) -> int:
    """Return an element of a raw column, given the column's words in memory order."""
    h, half = 4 * row + pair, 16 * side
    if size == 2:
        return words[h] >> half & 0xFFFF
    return words[h // 2] >> (8 * (h % 2) + half) & 0xFF


@dataclass
class Segment:
    """Decoded content of a segment.

    Attributes:
        planes: bit patterns of each plane, `[kv_head, token, dim]`.
        entry_words: number of entry words of each chunk, for each plane with codes.
    """

    data: bytes
    books: Sequence[Book | None]
    planes: list[list[int]] = field(default_factory=list)
    entry_words: list[list[int]] = field(default_factory=list)
    checksum: int = 0

    def __post_init__(self) -> None:
        data = self.data
        magic, version, element, zero, count, heads, dim, crc = struct.unpack_from(
            "<4sHBBIIII", data
        )
        tokens, slots, length, checksum, seal = struct.unpack_from("<5Q", data, 24)
        assert (magic, version, zero, length) == (b"HRSZ", 3, 0, len(data))
        assert crc == zlib.crc32(data[:20] + data[24:40] + data[64 : 64 + 16 * count])
        assert seal == mix64(length ^ mix64(checksum ^ crc))
        self.exponent_bits, self.mantissa_bits, self.remainder_widths = TYPES.get(
            element, (0, 0, [])
        )
        self.size = INTEGERS.get(element) or (1 + self.exponent_bits + self.mantissa_bits) // 8
        runs = [min(slots, tokens - first) * dim for first in range(0, tokens, slots)] * heads
        self.lengths = [min(1024, run - at) for run in runs for at in range(0, run, 1024)]
        modes = [data[64 + 16 * plane] for plane in range(count)]
        widths = [
            [CODE_BITS[mode], *self.remainder_widths] if mode else [8 * self.size] for mode in modes
        ]
        columns = sum(-(-length // 32) for length in self.lengths)

        table = at = 64 + 16 * count
        coded = len(self.lengths) * sum(mode > 0 for mode in modes)
        at += padded(4 * (coded + 1)) if coded else 0
        blocks = []
        for streams in widths:
            blocks.append(
                [at := at + padded(size) for size in [0, *(4 * b * columns for b in streams)]]
            )
            at = blocks[-1][-1]
        starts = list(struct.unpack_from(f"<{coded + 1}I", data, table)) if coded else [0]
        assert starts[0] == 0
        assert starts == sorted(starts)
        assert len(data) == at + padded(4 * starts[-1])
        self.entries = struct.unpack_from(f"<{starts[-1]}I", data, at)
        self.checksum = 0
        for plane, mode in enumerate(modes):
            own = [0] * (len(self.lengths) + 1)
            if mode:
                own, starts = starts[: len(own)], starts[len(own) - 1 :]
                self.entry_words.append([end - start for start, end in pairwise(own)])
            self._plane(plane, mode, blocks[plane], widths[plane], own)
        assert self.checksum & MASK == checksum

    def _plane(
        self, plane: int, mode: int, streams: list[int], widths: list[int], starts: list[int]
    ) -> None:
        self.planes.append([])
        before = 0
        for chunk, length in enumerate(self.lengths):
            columns = -(-length // 32)
            words = [
                [
                    self._word(stream + 4 * width * before, w, width, column, columns, mode)
                    for stream, width in zip(streams, widths, strict=False)
                    for w in range(width)
                ]
                for column in range(columns)
            ]
            entries = self.entries[starts[chunk] : starts[chunk + 1]]
            number = plane * len(self.lengths) + chunk
            self.checksum += self._term(words, entries, number, 8 * self.size - sum(widths))
            self.planes[plane] += self._elements(length, words, widths, mode, entries, plane)
            before += columns

    def _term(
        self, words: list[list[int]], entries: Sequence[int], chunk: int, overflow: int
    ) -> int:
        """Return the sum of the checksum terms of a chunk."""
        columns, entry_words = len(words), len(entries)
        uncoded = overflow > 0 and entry_words == overflow * columns
        total = 0 if uncoded else sum(entry_term(w, chunk, j) for j, w in enumerate(entries))
        for column, own in enumerate(words):
            last_words = [entries[j * columns + column] for j in range(overflow)] if uncoded else []
            total += column_term([*own, *last_words], chunk, column, entry_words)
        return total

    def _word(self, at: int, w: int, width: int, column: int, columns: int, mode: int) -> int:
        """Return word `w` of a column of the chunk that starts at byte `at`."""
        together = {8: 4, 4: 4, 3: 1}[width] if mode else 2 * self.size
        index = together * columns * (w // together) + together * column + w % together
        return int.from_bytes(self.data[at + 4 * index : at + 4 * index + 4], "little")

    def _elements(
        self,
        length: int,
        words: list[list[int]],
        widths: list[int],
        mode: int,
        entries: Sequence[int],
        plane: int,
    ) -> list[int]:
        columns = len(words)
        overflow = 8 * self.size - sum(widths)
        assert len(entries) <= overflow * columns
        locations = [location(number, columns, self.size) for number in range(length)]
        if len(entries) == overflow * columns:
            uncoded = [own + list(entries[column::columns]) for column, own in enumerate(words)]
            return [raw_bits_at(uncoded[column], self.size, *rest) for column, *rest in locations]
        book = self.books[plane]
        assert book is not None
        codes, remainders = [], []
        for column, *where in locations:
            own = words[column]
            values = []
            for width in widths:
                values.append(bits_at(own, width, *where))
                own = own[width:]
            codes.append(values[0])
            remainders.append(values[1] | (values[2] << 8 if len(values) > 2 else 0))
        positions = [
            32 * column + 16 * side + 4 * row + pair for column, row, pair, side in locations
        ]
        escapes = sorted(
            p for p, code in zip(positions, codes, strict=True) if code == ESCAPE.get(mode)
        )
        found = self._escapes(entries, escapes, book[1]) if mode > 1 else self._listed(entries)
        assert set(found) <= set(positions)
        exponents = [
            found[p] if p in found else book[0][code]
            for p, code in zip(positions, codes, strict=True)
        ]
        return [
            (rest >> self.mantissa_bits << self.exponent_bits | exponent) << self.mantissa_bits
            | rest & (1 << self.mantissa_bits) - 1
            for exponent, rest in zip(exponents, remainders, strict=True)
        ]

    def _listed(self, entries: Sequence[int]) -> dict[int, int]:
        """Return the exponents of listed escapes by position."""
        found = {word % 2**16: word >> 16 for word in entries}
        assert list(found) == sorted(found)
        assert len(found) == len(entries)
        return found

    def _escapes(
        self, entries: Sequence[int], positions: list[int], second: Sequence[int]
    ) -> dict[int, int]:
        packed = -(-len(positions) // 8)
        nibbles = [entries[i // 8] >> 4 * (i % 8) & 15 for i in range(8 * packed)]
        assert not any(nibbles[len(positions) :])
        named = dict(zip(positions, nibbles, strict=False))
        listed = self._listed(entries[packed:])
        assert list(listed) == [position for position, nibble in named.items() if nibble == 15]
        assert len(positions) <= 256
        assert len(listed) <= 64
        return {p: listed[p] if nibble == 15 else second[nibble] for p, nibble in named.items()}
