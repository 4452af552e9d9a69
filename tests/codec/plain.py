"""A decoder of wire version 2 in plain Python, written from `codec/README.md` and nothing else."""

import struct
import zlib
from dataclasses import dataclass, field

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def nh(x: int, y: int, k: int) -> int:
    key = mix64((k + 1) * GOLDEN & MASK)
    return ((x + key) % 2**32 + 1) * ((y + (key >> 32)) % 2**32 + 1) - 1


def term(digest: int, number: int, length: int) -> int:
    return mix64((digest + mix64(number << 11 | length)) & MASK)


def raw_digest(elements: list[int]) -> int:
    """Of a chunk stored raw, its elements padded to whole words."""
    return sum(
        nh(e0 | e1 << 16, e2 | e3 << 16, w)
        for w, (e0, e1, e2, e3) in enumerate(zip(*[iter(elements)] * 4, strict=True))
    )


def padded(size: int) -> int:
    return -(-size // 16) * 16


def nibbles(word: int) -> list[int]:
    """Of e0, e1, e2, e3."""
    return [word >> shift & 0xF for shift in (0, 8, 4, 12)]


@dataclass
class Segment:
    """What a segment says: its chunks' lengths and, of each plane, its elements and slot kinds."""

    data: bytes
    exponents: list[int]
    lengths: list[int] = field(default_factory=list)
    planes: list[list[int]] = field(default_factory=list)
    kinds: list[list[int]] = field(default_factory=list)
    checksum: int = 0

    def __post_init__(self) -> None:
        data = self.data
        magic, version, element, self.slot, count, heads, dim, crc = struct.unpack_from(
            "<4sHBBIIII", data
        )
        tokens, slots, length, checksum, seal = struct.unpack_from("<5Q", data, 24)
        assert (magic, version, element, length) == (b"HRSZ", 2, 1, len(data))
        assert crc == zlib.crc32(data[:20] + data[24:40] + data[64 : 64 + 16 * count])
        assert seal == mix64(length ^ mix64(checksum ^ crc))
        runs = [min(slots, tokens - first) * dim for first in range(0, tokens, slots)] * heads
        self.lengths = [min(1024, run - at) for run in runs for at in range(0, run, 1024)]
        self.words = [-(-length // 4) for length in self.lengths]
        modes = [data[64 + 16 * plane] for plane in range(count)]
        coded = padded(self.slot * len(self.lengths)) + padded(2 * sum(self.words))
        sizes = [coded + padded(4 * sum(self.words)), padded(8 * sum(self.words))]
        self.spill = 64 + 16 * count + sum(sizes[mode == 0] for mode in modes)
        block = 64 + 16 * count
        for plane, mode in enumerate(modes):
            (self._coded if mode else self._raw)(plane, block)
            block += sizes[mode == 0]
        assert self.checksum & MASK == checksum

    def _raw(self, plane: int, at: int) -> None:
        self.planes.append([])
        self.kinds.append([])
        for chunk, (length, words) in enumerate(zip(self.lengths, self.words, strict=True)):
            elements = list(struct.unpack_from(f"<{4 * words}H", self.data, at))
            self.planes[plane] += elements[:length]
            number = plane * len(self.lengths) + chunk
            self.checksum += term(raw_digest(elements), number, length)
            at += 8 * words

    def _coded(self, plane: int, at: int) -> None:
        codes = at + padded(self.slot * len(self.lengths))
        signs = codes + padded(2 * sum(self.words))
        self.planes.append([])
        self.kinds.append([])
        for chunk, (length, words) in enumerate(zip(self.lengths, self.words, strict=True)):
            c = struct.unpack_from(f"<{words}H", self.data, codes)
            s = struct.unpack_from(f"<{words}I", self.data, signs)
            slot = self.data[at : at + self.slot]
            exponents, extra = self._exponents(slot, list(c))
            tops = [word >> shift & 0xFF for word in s for shift in (0, 16, 8, 24)]
            elements = [
                (top & 0x80) << 8 | exponent << 7 | top & 0x7F
                for top, exponent in zip(tops, exponents, strict=True)
            ]
            self.planes[plane] += elements[:length]
            self.kinds[plane].append(slot[0])
            digest = extra + sum(nh(s[w], c[w], w) for w in range(words))
            halves = struct.unpack(f"<{self.slot // 4}I", slot)
            digest += sum(
                nh(halves[2 * j], halves[2 * j + 1], 256 + j) for j in range(self.slot // 8)
            )
            self.checksum += term(digest, plane * len(self.lengths) + chunk, length)
            at, codes, signs = at + self.slot, codes + 2 * words, signs + 4 * words

    def _exponents(self, slot: bytes, codes: list[int]) -> tuple[list[int], int]:
        """A chunk's exponents, and what its spilled bytes add to the digest."""
        spilled = self.spill + 8 * struct.unpack_from("<I", slot, 4)[0]
        if slot[0] == 255:
            room = (self.slot - 8) // 2
            high = list(struct.unpack_from(f"<{min(room, len(codes))}H", slot, 8))
            high += struct.unpack_from(f"<{len(codes) - len(high)}H", self.data, spilled)
            low = [nibble for word in codes for nibble in nibbles(word)]
            top = [nibble for word in high for nibble in nibbles(word)]
            extra = sum(mix64(1 << 40 | w << 16 | high[w]) for w in range(room, len(high)))
            return [h << 4 | n for h, n in zip(top, low, strict=True)], extra
        exponents = [self.exponents[code] for word in codes for code in nibbles(word)]
        count, entries = slot[0], slot[1:]
        if slot[0] == 254:
            count, entries = int.from_bytes(slot[2:4], "little"), self.data[spilled:]
        extra = 0
        for i in range(count):
            position, exponent = struct.unpack_from("<HB", entries, 3 * i)
            exponents[position] = exponent
            extra += mix64(i << 24 | exponent << 16 | position) if slot[0] == 254 else 0
        return exponents, extra
