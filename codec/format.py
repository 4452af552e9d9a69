"""The wire format: where every byte of a segment lies, and what its header says. Pure Python.

A segment is a header, a table of where each chunk's entries start, one block for each plane, and
the entries. All but the entries' length follows from the geometry, before anything is encoded.
`README.md` draws the bytes; this module is the only one that knows where they are. Integers are
little-endian.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from codec.elements import BF16, BY_NUMBER, ElementType
from codec.errors import FormatError, TruncatedPayload
from codec.mix import mix64

WIRE_VERSION: int = 3
MAGIC = b"HRSZ"
CHUNK = 1024
"""Elements of a full chunk: positions in a chunk fit 10 bits."""
COLUMN = 32
"""Elements of a column; a run's last column is padded. A stream of b bits takes b words of each."""
COLUMNS = CHUNK // COLUMN
"""Columns of a full chunk."""
WORD_BYTES = 4
"""Of the words that all streams and entries consist of."""
ALIGNMENT = 16
"""Blocks, streams and entries start at multiples of this, in bytes from the segment's start."""
MAX_ENTRY_WORDS = (1 << 32) - 1
"""Of a segment: starts are u32. Sixteen GiB of random bf16 fill a quarter of it."""
MAX_NIBBLES, MAX_SECOND = 256, 64
"""Escapes that a chunk may list by their second-level codes, and those that have none of these."""

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
    INBAND = 2
    THREE_BIT = 3

    @property
    def code_bits(self) -> int:
        """Bits of a code; 0 if there are none."""
        return (0, 4, 4, 3)[self]

    @property
    def has_escape_code(self) -> bool:
        """Whether the highest code says that the exponent has none."""
        return self in (Mode.INBAND, Mode.THREE_BIT)

    @property
    def codes(self) -> int:
        """Number of exponents with a code."""
        return (1 << self.code_bits) - self.has_escape_code if self else 0

    def supports(self, element: ElementType) -> bool:
        """Whether planes of this element type have this mode: raw, or codes that save bits."""
        return self is Mode.RAW or self.code_bits < element.exponent_bits


def align(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Geometry:
    """The content of one plane of a segment: `[kv_head, token, dim]`, cut into chunks.

    The tokens of one head in one page are a *run*; they lie together in memory. A run is cut every
    `CHUNK` elements into chunks, so that no chunk crosses a head or a page; the last chunk of a run
    may be short. A chunk has as many columns as its elements need, the last one padded. Columns and
    chunks are numbered head by head, within a head page by page.
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
    def head_runs(self) -> list[int]:
        """Lengths of one head's runs, page by page, in elements."""
        rest = [self.rest_slots * self.dim] if self.rest_slots else []
        return [self.page_slots * self.dim] * self.full_pages + rest

    def chunk_lengths(self) -> list[int]:
        """Lengths of all chunks, in their order, in elements."""
        head = [min(CHUNK, run - start) for run in self.head_runs for start in range(0, run, CHUNK)]
        return head * self.kv_heads

    @cached_property
    def num_chunks(self) -> int:
        return self._sum(lambda run: -(-run // CHUNK))

    @cached_property
    def num_columns(self) -> int:
        return self._sum(lambda run: -(-run // COLUMN))

    def _sum(self, of_run: Callable[[int], int]) -> int:
        """Over all runs, of a function of their length."""
        full = self.full_pages * of_run(self.page_slots * self.dim)
        return self.kv_heads * (full + of_run(self.rest_slots * self.dim))


def stream_widths(element: ElementType, mode: Mode) -> tuple[int, ...]:
    """The streams of a block, in their order: bits of an element in each."""
    return (mode.code_bits, *element.remainder_widths) if mode else (8 * element.size,)


def spilled_words(element: ElementType, mode: Mode) -> int:
    """Words of a column that find no place in the streams, if its chunk is stored in full."""
    return element.words - sum(stream_widths(element, mode))


@dataclass(frozen=True)
class Block:
    """Where a plane's block starts, and where its streams do, in bytes from the segment's start."""

    start: int
    streams: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, start: int, geometry: Geometry, element: ElementType, mode: Mode) -> "Block":
        streams, end = [], start
        for width in stream_widths(element, mode):
            streams.append(end)
            end = align(end + WORD_BYTES * width * geometry.num_columns)
        return cls(start, tuple(streams), end)


@dataclass(frozen=True)
class Layout:
    """Where everything in a segment lies, in bytes from its start.

    Attributes:
        starts: the table of starts, u32, one for each chunk of a plane with codes and one more.
        coded_chunks: how many chunks those are, of all planes together.
        blocks: one for each plane.
        entries: where the entries start, and the last block ends.
        bound: the most that the segment can take, whatever the data.
    """

    starts: int
    coded_chunks: int
    blocks: tuple[Block, ...]
    entries: int
    bound: int

    @classmethod
    def of(cls, geometry: Geometry, element: ElementType, modes: Sequence[Mode]) -> "Layout":
        """Of a segment whose planes are stored in these modes."""
        starts = header_bytes(len(modes))
        coded = geometry.num_chunks * sum(mode is not Mode.RAW for mode in modes)
        end = starts + (align(WORD_BYTES * (coded + 1)) if coded else 0)
        blocks = []
        for mode in modes:
            blocks.append(Block.of(end, geometry, element, mode))
            end = blocks[-1].end
        spilled = sum(spilled_words(element, mode) for mode in modes) * geometry.num_columns
        return cls(starts, coded, tuple(blocks), end, align(end + WORD_BYTES * spilled))

    def length(self, units: int) -> int:
        """Of a segment whose entries take so many words."""
        return align(self.entries + WORD_BYTES * units)


@dataclass(frozen=True)
class PlaneHeader:
    """One plane of a segment: its mode and its codebook's number (0: none)."""

    mode: Mode
    codebook: int


@dataclass(frozen=True)
class SegmentHeader:
    """The whole header. `length` is the whole segment's, in bytes."""

    element: ElementType
    geometry: Geometry
    planes: tuple[PlaneHeader, ...]
    length: int
    checksum: int

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.geometry, self.element, [plane.mode for plane in self.planes])


def header_bytes(num_planes: int) -> int:
    """Bytes of the header of a segment of `num_planes` planes; a multiple of `ALIGNMENT`."""
    return SEGMENT_HEADER_BYTES + num_planes * PLANE_HEADER_BYTES


def pack_static(geometry: Geometry, element: ElementType, planes: Sequence[PlaneHeader]) -> bytes:
    """What of the header is known before encoding; zeros where `seal` writes."""
    shape = (geometry.kv_heads, geometry.dim)
    tokens = (geometry.num_tokens, geometry.page_slots)
    fixed = _SEGMENT.pack(
        MAGIC, WIRE_VERSION, element.number, 0, len(planes), *shape, 0, *tokens, 0, 0, 0
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
    the table of starts and the entries say. Raises `TruncatedPayload` or `FormatError`.
    """
    fields = _SEGMENT.unpack_from(header)
    _, _, element_number, reserved, num_planes, kv_heads, dim, crc = fields[:8]
    num_tokens, page_slots, length, checksum, announced = fields[8:]
    if crc != static_crc(header):
        raise FormatError("the header's CRC-32 does not match")
    if announced != seal_of(crc, length, checksum):
        raise FormatError("the header's seal does not match")
    if length > payload_bytes:
        raise TruncatedPayload(f"the segment has {length} bytes, the payload {payload_bytes}")
    if length < payload_bytes:
        raise FormatError(f"{payload_bytes - length} bytes follow the segment's {length}")
    if element_number not in BY_NUMBER:
        raise FormatError(f"unknown element type {element_number}")
    if reserved:
        raise FormatError("the header's reserved byte is not zero")
    if not (num_planes and kv_heads and dim and page_slots):
        raise FormatError("a segment has at least one plane, head, dimension and slot")
    element = BY_NUMBER[element_number]
    planes = _parse_planes(header[SEGMENT_HEADER_BYTES:], element)
    geometry = Geometry(kv_heads, dim, num_tokens, page_slots)
    parsed = SegmentHeader(element, geometry, planes, length, checksum)
    layout = parsed.layout
    if not layout.entries <= length <= layout.bound or length % ALIGNMENT:
        raise FormatError(f"{length} bytes, not {layout.entries} to {layout.bound}, or unaligned")
    return parsed


def _parse_planes(table: bytes, element: ElementType) -> tuple[PlaneHeader, ...]:
    planes = []
    for number, (mode, reserved, codebook) in enumerate(_PLANE.iter_unpack(table)):
        if mode not in Mode.__members__.values():
            raise FormatError(f"plane {number}: unknown mode {mode}")
        if not Mode(mode).supports(element):
            raise FormatError(f"plane {number}: mode {mode} saves nothing of {element.name}")
        if any(reserved):
            raise FormatError(f"plane {number}: reserved bytes are not zero")
        if mode == Mode.RAW and codebook:
            raise FormatError(f"plane {number}: raw, with a codebook")
        planes.append(PlaneHeader(Mode(mode), codebook))
    return tuple(planes)


def max_payload_bytes(num_elements: int, element: ElementType = BF16) -> int:
    """The largest payload of `codec.encode` for a tensor of `num_elements` elements, in bytes."""
    return max_segment_bytes(1, 1, 1, num_elements, max(num_elements, 1), element)


def max_segment_bytes(
    num_planes: int,
    kv_heads: int,
    dim: int,
    num_tokens: int,
    page_slots: int,
    element: ElementType = BF16,
) -> int:
    """The largest segment of `codec.encode_pages`, in bytes, whatever the data and the modes."""
    geometry = Geometry(kv_heads, dim * element.units, num_tokens, page_slots)
    modes = (mode for mode in Mode if mode.supports(element))
    return max(Layout.of(geometry, element, [mode] * num_planes).bound for mode in modes)
