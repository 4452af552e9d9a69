"""The wire format: where every byte of a segment lies, and what its header says. Pure Python.

A segment is a header, one block for each plane, and a spill area for what does not fit the blocks.
All but the spill area's length follows from the geometry, before anything is encoded. `README.md`
draws the bytes; this module is the only one that knows where they are. Integers are little-endian.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from codec.errors import FormatError, TruncatedPayload
from codec.mix import mix64

WIRE_VERSION: int = 2
MAGIC = b"HRSZ"
CHUNK = 1024
"""Elements of a full chunk: positions in a chunk fit 10 bits."""
WORD = 4
"""Elements of a word; a run's last word is padded with zero elements."""
WORDS = CHUNK // WORD
"""Words of a full chunk."""
WORD_BYTES, CODE_BYTES, SIGN_BYTES = 8, 2, 4
"""Of one word: in a raw block, in the stream of codes, in that of signs."""
ALIGNMENT = 16
"""Blocks and streams start at multiples of this, in bytes from the segment's start."""
ESCAPE_BYTES = 3
"""One escape: u16 position in the chunk, u8 exponent."""
SLOT_SIZES = (8, 16, 32)
"""Bytes that a chunk may have for its escapes within its block."""
SPILL_UNIT = 8
"""Spill ranges start at multiples of this, in bytes from the spill area's start."""
LISTED, FULL = 254, 255
"""A slot's first byte, if its escapes are listed in the spill area, or the chunk stored in full."""

_SEGMENT = struct.Struct("<4sHBBIIIIQQQQQ")
_PLANE = struct.Struct("<B7sQ")
_CRC, _CRC_AT = struct.Struct("<I"), 20
_DYNAMIC, _DYNAMIC_AT = struct.Struct("<QQQ"), 40
SEGMENT_HEADER_BYTES = _SEGMENT.size
PLANE_HEADER_BYTES = _PLANE.size


class Mode(IntEnum):
    """How a plane is stored. Every other value is refused."""

    RAW = 0
    TOP16 = 1


class ElementType(IntEnum):
    """What the elements are. fp16 and fp8 have their numbers to come."""

    BF16 = 1


def align(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def slot_capacity(slot_bytes: int) -> int:
    """How many escapes a slot holds."""
    return (slot_bytes - 1) // ESCAPE_BYTES


def slot_high_words(slot_bytes: int) -> int:
    """How many words' high nibbles lie in the slot of a chunk that is stored in full."""
    return (slot_bytes - 8) // CODE_BYTES


def largest_list(words: int) -> int:
    """The most escapes that a chunk of so many words lists; with more it is stored in full."""
    return CODE_BYTES * words // ESCAPE_BYTES


@dataclass(frozen=True)
class Geometry:
    """The content of one plane of a segment: `[kv_head, token, dim]`, cut into chunks.

    The tokens of one head in one page are a *run*; they lie together in memory. A run is cut into
    words of `WORD` elements, the last one padded, and every `CHUNK` elements into chunks, so that
    no chunk crosses a head or a page; the last chunk of a run may be short. Words and chunks are
    numbered head by head, within a head page by page.
    """

    kv_heads: int
    dim: int
    num_tokens: int
    page_slots: int

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // self.page_slots)

    @property
    def full_pages(self) -> int:
        return self.num_tokens // self.page_slots

    @property
    def rest_slots(self) -> int:
        """Valid slots of the last page, if not all of them are; else 0."""
        return self.num_tokens % self.page_slots

    @property
    def elements(self) -> int:
        return self.kv_heads * self.num_tokens * self.dim

    @property
    def raw_bytes(self) -> int:
        return 2 * self.elements

    @property
    def head_runs(self) -> list[int]:
        """Lengths of one head's runs, page by page, in elements."""
        rest = [self.rest_slots * self.dim] if self.rest_slots else []
        return [self.page_slots * self.dim] * self.full_pages + rest

    def chunk_lengths(self) -> list[int]:
        """Lengths of all chunks, in their order, in elements."""
        head = [min(CHUNK, run - start) for run in self.head_runs for start in range(0, run, CHUNK)]
        return head * self.kv_heads

    @property
    def num_chunks(self) -> int:
        return self._sum(lambda run: -(-run // CHUNK))

    @property
    def num_words(self) -> int:
        return self._sum(lambda run: -(-run // WORD))

    def max_spill_units(self, slot_bytes: int) -> int:
        """The most that the chunks of a plane can spill, in units of `SPILL_UNIT` bytes."""

        def of_run(run: int) -> int:
            full, rest = divmod(run, CHUNK)
            return full * _max_spill(CHUNK, slot_bytes) + _max_spill(rest, slot_bytes)

        return self._sum(of_run)

    def _sum(self, of_run: Callable[[int], int]) -> int:
        """Over all runs, of a function of their length."""
        full = self.full_pages * of_run(self.page_slots * self.dim)
        return self.kv_heads * (full + of_run(self.rest_slots * self.dim))


def _max_spill(length: int, slot_bytes: int) -> int:
    """The most units that a chunk of `length` elements spills."""
    words = -(-length // WORD)
    listed = min(length, largest_list(words))
    size = ESCAPE_BYTES * listed if listed > slot_capacity(slot_bytes) else 0
    if length > max(slot_capacity(slot_bytes), largest_list(words)):
        size = max(size, CODE_BYTES * (words - slot_high_words(slot_bytes)))
    return -(-size // SPILL_UNIT)


@dataclass(frozen=True)
class Streams:
    """Where the streams of a `TOP16` block start and the block ends, from the block's start."""

    slots: int
    codes: int
    signs: int
    end: int

    @classmethod
    def of(cls, geometry: Geometry, slot_bytes: int) -> "Streams":
        codes = align(slot_bytes * geometry.num_chunks)
        signs = align(codes + CODE_BYTES * geometry.num_words)
        return cls(0, codes, signs, align(signs + SIGN_BYTES * geometry.num_words))


@dataclass(frozen=True)
class Layout:
    """Where everything in a segment lies, in bytes.

    Attributes:
        blocks: where each plane's block starts.
        streams: of every `TOP16` block, from the block's start.
        spill: where the spill area starts, and the last block ends.
        bound: the most that the segment can take, whatever the data.
    """

    blocks: tuple[int, ...]
    streams: Streams
    spill: int
    bound: int

    @classmethod
    def of(cls, geometry: Geometry, modes: Sequence[Mode], slot_bytes: int) -> "Layout":
        """Of a segment whose planes are stored in these modes."""
        streams = Streams.of(geometry, slot_bytes)
        raw = align(WORD_BYTES * geometry.num_words)
        blocks, end = [], header_bytes(len(modes))
        for mode in modes:
            blocks.append(end)
            end += streams.end if mode is Mode.TOP16 else raw
        coded = sum(mode is Mode.TOP16 for mode in modes)
        units = coded * geometry.max_spill_units(slot_bytes)
        return cls(tuple(blocks), streams, end, align(end + SPILL_UNIT * units))

    def length(self, spill_units: int) -> int:
        """Of a segment that has spilled so many units."""
        return align(self.spill + SPILL_UNIT * spill_units)


@dataclass(frozen=True)
class PlaneHeader:
    """One plane of a segment: its mode and its codebook's number (0: none)."""

    mode: Mode
    codebook: int


@dataclass(frozen=True)
class SegmentHeader:
    """The whole header. `length` is the whole segment's, in bytes."""

    element_type: ElementType
    slot_bytes: int
    geometry: Geometry
    planes: tuple[PlaneHeader, ...]
    length: int
    checksum: int

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.geometry, [plane.mode for plane in self.planes], self.slot_bytes)


def header_bytes(num_planes: int) -> int:
    """Bytes of the header of a segment of `num_planes` planes; a multiple of `ALIGNMENT`."""
    return SEGMENT_HEADER_BYTES + num_planes * PLANE_HEADER_BYTES


def pack_static(geometry: Geometry, planes: Sequence[PlaneHeader], slot_bytes: int) -> bytes:
    """What of the header is known before encoding; zeros where `seal` writes."""
    shape = (geometry.kv_heads, geometry.dim)
    tokens = (geometry.num_tokens, geometry.page_slots)
    fixed = _SEGMENT.pack(
        MAGIC, WIRE_VERSION, ElementType.BF16, slot_bytes, len(planes), *shape, 0, *tokens, 0, 0, 0
    )
    table = b"".join(_PLANE.pack(plane.mode, bytes(7), plane.codebook) for plane in planes)
    header = bytearray(fixed + table)
    _CRC.pack_into(header, _CRC_AT, static_crc(header))
    return bytes(header)


def static_crc(header: bytes | bytearray) -> int:
    """The CRC-32 of the static bytes: all but its own and those that `seal` writes."""
    crc = zlib.crc32(header[:_CRC_AT])
    crc = zlib.crc32(header[_CRC_AT + _CRC.size : _DYNAMIC_AT], crc)
    return zlib.crc32(header[SEGMENT_HEADER_BYTES:], crc)


def seal(static: bytes, length: int, checksum: int) -> bytes:
    """The whole header, from its static bytes, the segment's length in bytes and its checksum."""
    (crc,) = _CRC.unpack_from(static, _CRC_AT)
    header = bytearray(static)
    _DYNAMIC.pack_into(header, _DYNAMIC_AT, length, checksum, seal_of(crc, length, checksum))
    return bytes(header)


def seal_of(crc: int, length: int, checksum: int) -> int:
    """What ties a segment's length and checksum to its static header."""
    return mix64(length ^ mix64(checksum ^ crc))


def peek_header_bytes(start: bytes, payload_bytes: int) -> int:
    """How long the header is, from its first `SEGMENT_HEADER_BYTES`, after a first look at it.

    Raises `TruncatedPayload` or `FormatError`.
    """
    if len(start) < SEGMENT_HEADER_BYTES:
        raise TruncatedPayload(
            f"{payload_bytes} bytes are no segment: a header has {SEGMENT_HEADER_BYTES}"
        )
    magic, version, _, _, num_planes, *_ = _SEGMENT.unpack_from(start)
    if magic != MAGIC:
        raise FormatError(f"magic is {magic!r}, not {MAGIC!r}")
    if version != WIRE_VERSION:
        raise FormatError(f"wire version {version}, this codec reads {WIRE_VERSION}")
    length = header_bytes(num_planes)
    if length > payload_bytes:
        raise TruncatedPayload(f"the header has {length} bytes, the payload {payload_bytes}")
    return length


def parse_header(header: bytes, payload_bytes: int) -> SegmentHeader:
    """Read and validate the header of a payload of `payload_bytes` bytes.

    `header` is its first `peek_header_bytes(...)` bytes. Every field is checked, and the length
    against the geometry: what is returned can be indexed without further checks, except for what
    the slots say. Raises `TruncatedPayload` or `FormatError`.
    """
    fields = _SEGMENT.unpack_from(header)
    _, _, element_type, slot_bytes, num_planes, kv_heads, dim, crc = fields[:8]
    num_tokens, page_slots, length, checksum, announced = fields[8:]
    if crc != static_crc(header):
        raise FormatError("the header's CRC-32 does not match")
    if announced != seal_of(crc, length, checksum):
        raise FormatError("the header's seal does not match")
    if length > payload_bytes:
        raise TruncatedPayload(f"the segment has {length} bytes, the payload {payload_bytes}")
    if length < payload_bytes:
        raise FormatError(f"{payload_bytes - length} bytes follow the segment's {length}")
    if element_type not in ElementType.__members__.values():
        raise FormatError(f"unknown element type {element_type}")
    if not (num_planes and kv_heads and dim and page_slots):
        raise FormatError("a segment has at least one plane, head, dimension and slot")
    planes = _parse_planes(header[SEGMENT_HEADER_BYTES:])
    coded = any(plane.mode is Mode.TOP16 for plane in planes)
    if slot_bytes not in (SLOT_SIZES if coded else SLOT_SIZES[:1]):
        raise FormatError(f"slots of {slot_bytes} bytes")
    geometry = Geometry(kv_heads, dim, num_tokens, page_slots)
    parsed = SegmentHeader(
        ElementType(element_type), slot_bytes, geometry, planes, length, checksum
    )
    layout = parsed.layout
    if not layout.spill <= length <= layout.bound or length % ALIGNMENT:
        raise FormatError(f"{length} bytes, not {layout.spill} to {layout.bound}, or unaligned")
    return parsed


def _parse_planes(table: bytes) -> tuple[PlaneHeader, ...]:
    planes = []
    for number, (mode, reserved, codebook) in enumerate(_PLANE.iter_unpack(table)):
        if mode not in Mode.__members__.values():
            raise FormatError(f"plane {number}: unknown mode {mode}")
        if any(reserved):
            raise FormatError(f"plane {number}: reserved bytes are not zero")
        if mode == Mode.RAW and codebook:
            raise FormatError(f"plane {number}: raw, with a codebook")
        planes.append(PlaneHeader(Mode(mode), codebook))
    return tuple(planes)


def max_payload_bytes(num_elements: int, slot_bytes: int | None = None) -> int:
    """The largest payload of `codec.encode` for a tensor of `num_elements` elements, in bytes."""
    return max_segment_bytes(1, 1, 1, num_elements, max(num_elements, 1), slot_bytes)


def max_segment_bytes(
    num_planes: int,
    kv_heads: int,
    dim: int,
    num_tokens: int,
    page_slots: int,
    slot_bytes: int | None = None,
) -> int:
    """The largest segment of `codec.encode_pages`, in bytes, whatever the data and the modes.

    Args:
        slot_bytes: of the codebooks; the default bounds those of any size.
    """
    geometry = Geometry(kv_heads, dim, num_tokens, page_slots)
    return max(
        Layout.of(geometry, [mode] * num_planes, size).bound
        for mode in Mode
        for size in ([slot_bytes] if slot_bytes else SLOT_SIZES)
    )
