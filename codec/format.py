"""Wire format: byte offsets in a segment, and its header. Pure Python, little-endian.

A segment is a header, a table of entry starts (the index of each chunk's first entry word), one
block for each plane, and the entries. All sizes except that of the entries are known before
encoding. `FORMAT.md` specifies the bytes and defines the terms.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from codec.elements import BY_NUMBER, ElementType
from codec.errors import FormatError, TruncatedPayload
from codec.mix import mix64

WIRE_VERSION: int = 3
MAGIC = b"HRSZ"
CHUNK = 1024
"""Number of elements in a full chunk. Positions in a chunk have 10 bits."""
COLUMN = 32
"""Number of elements in a column. A stream of b bits per element has b 32-bit words per column."""
COLUMNS = CHUNK // COLUMN
"""Number of columns in a full chunk."""
WORD_BYTES = 4
"""Size of a word of a stream or of the entries, in bytes."""
ALIGNMENT = 16
"""Alignment of blocks, streams and entries in a segment, in bytes."""
MAX_ENTRY_WORDS = (1 << 32) - 1
"""Maximum entry words of a segment, as starts are uint32. 16 GiB of random bf16 need 1/4 of it."""
MAX_NIBBLES, MAX_LISTED = 256, 64
"""Maximum escapes, and maximum listed escapes (those without a second-level code), of a chunk in a
mode with an escape code. A chunk that exceeds one of them is stored uncoded.
"""

_SEGMENT = struct.Struct("<4sHBBIIIIQQQQQ")
_PLANE = struct.Struct("<B7sQ")
_CRC, _CRC_AT = struct.Struct("<I"), 20
_DYNAMIC, _DYNAMIC_AT = struct.Struct("<QQQ"), 40
SEGMENT_HEADER_BYTES = _SEGMENT.size
PLANE_HEADER_BYTES = _PLANE.size


class Mode(IntEnum):
    """Storage mode of a plane; see `FORMAT.md`. TOP16 is SplitZip's (arXiv 2605.01708)."""

    RAW = 0
    TOP16 = 1
    INBAND = 2
    THREE_BIT = 3

    @property
    def code_bits(self) -> int:
        """Bits of a code; 0 for `RAW`."""
        return (0, 4, 4, 3)[self]

    @property
    def has_escape_code(self) -> bool:
        """Whether the highest code marks an exponent without a code."""
        return self in (Mode.INBAND, Mode.THREE_BIT)

    @property
    def codes(self) -> int:
        """Number of exponents with a code."""
        return (1 << self.code_bits) - self.has_escape_code if self else 0

    def supports(self, element: ElementType) -> bool:
        """Return whether the mode is `RAW` or has codes shorter than the type's exponents."""
        return self is Mode.RAW or self.code_bits < element.exponent_bits


def align(offset: int) -> int:
    """Round an offset up to a multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Geometry:
    """Shape of one plane of a segment, `[kv_head, token, dim]`, and its division into chunks.

    A *run* consists of the tokens of one head in one page. They are contiguous in memory. A run is
    divided into chunks of `CHUNK` elements; its last chunk may be shorter. Each chunk is padded to
    whole columns. Chunks and columns are numbered by head, then by page.

    Attributes:
        dim: elements per token and head: head dimension times `ElementType.units`.
        num_tokens: tokens of the segment.
        page_slots: token slots of a page.
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
        """Number of valid slots in the last page if it is partly filled; 0 if it is full."""
        return self.num_tokens % self.page_slots

    @property
    def elements(self) -> int:
        return self.kv_heads * self.num_tokens * self.dim

    @property
    def head_runs(self) -> list[int]:
        """Lengths of the runs of one head, in elements."""
        rest = [self.rest_slots * self.dim] if self.rest_slots else []
        return [self.page_slots * self.dim] * self.full_pages + rest

    def chunk_lengths(self) -> list[int]:
        """Return the lengths of all chunks, in elements."""
        head = [min(CHUNK, run - start) for run in self.head_runs for start in range(0, run, CHUNK)]
        return head * self.kv_heads

    @cached_property
    def num_chunks(self) -> int:
        return self._sum(lambda run: -(-run // CHUNK))

    @cached_property
    def num_columns(self) -> int:
        return self._sum(lambda run: -(-run // COLUMN))

    def _sum(self, of_run: Callable[[int], int]) -> int:
        """Sum a function of the run length over all runs."""
        full = self.full_pages * of_run(self.page_slots * self.dim)
        return self.kv_heads * (full + of_run(self.rest_slots * self.dim))


def stream_widths(element: ElementType, mode: Mode) -> tuple[int, ...]:
    """Return the bits per element of each stream of a block."""
    return (mode.code_bits, *element.remainder_widths) if mode else (8 * element.size,)


def overflow_words(element: ElementType, mode: Mode) -> int:
    """Return how many words of each column of an uncoded chunk are stored as entries."""
    return element.words - sum(stream_widths(element, mode))


@dataclass(frozen=True)
class Block:
    """Byte offsets of the streams of a plane's block, and of its end, in the segment."""

    streams: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, start: int, geometry: Geometry, element: ElementType, mode: Mode) -> "Block":
        streams = []
        end = start
        for width in stream_widths(element, mode):
            streams.append(end)
            end = align(end + WORD_BYTES * width * geometry.num_columns)
        return cls(tuple(streams), end)


@dataclass(frozen=True)
class Layout:
    """Byte offsets of the parts of a segment.

    Attributes:
        starts: offset of the table of entry starts: one uint32 for each chunk of the planes with
            codes, then the total number of entry words.
        coded_chunks: total number of chunks in the planes with codes.
        blocks: offsets of the block of each plane.
        entries: offset of the entries, which is the end of the last block.
        bound: maximum length of the segment in bytes, for any data.
    """

    starts: int
    coded_chunks: int
    blocks: tuple[Block, ...]
    entries: int
    bound: int

    @classmethod
    def of(cls, geometry: Geometry, element: ElementType, modes: Sequence[Mode]) -> "Layout":
        """Return the layout of a segment whose planes have these modes."""
        starts = header_bytes(len(modes))
        coded = geometry.num_chunks * sum(mode is not Mode.RAW for mode in modes)
        end = starts + (align(WORD_BYTES * (coded + 1)) if coded else 0)
        blocks = []
        for mode in modes:
            blocks.append(Block.of(end, geometry, element, mode))
            end = blocks[-1].end
        overflow = sum(overflow_words(element, mode) for mode in modes) * geometry.num_columns
        return cls(starts, coded, tuple(blocks), end, align(end + WORD_BYTES * overflow))

    def length(self, entry_words: int) -> int:
        """Return the length in bytes of a segment that has `entry_words` entry words."""
        return align(self.entries + WORD_BYTES * entry_words)


@dataclass(frozen=True)
class PlaneHeader:
    """Header of one plane: its mode, and `Codebook.number` of its codebook (0 if raw)."""

    mode: Mode
    codebook: int


@dataclass(frozen=True)
class SegmentHeader:
    """Header of a segment; `length` is the length of the segment in bytes."""

    element: ElementType
    geometry: Geometry
    planes: tuple[PlaneHeader, ...]
    length: int
    checksum: int

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.geometry, self.element, [plane.mode for plane in self.planes])


def header_bytes(num_planes: int) -> int:
    """Return the length of the header of a segment, a multiple of `ALIGNMENT`."""
    return SEGMENT_HEADER_BYTES + num_planes * PLANE_HEADER_BYTES


def pack_static(geometry: Geometry, element: ElementType, planes: Sequence[PlaneHeader]) -> bytes:
    """Return the header with zeros in the fields that `seal` writes."""
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
    """Return the CRC-32 of the header without the CRC field and the fields that `seal` writes."""
    crc = zlib.crc32(header[:_CRC_AT])
    crc = zlib.crc32(header[_CRC_AT + _CRC.size : _DYNAMIC_AT], crc)
    return zlib.crc32(header[SEGMENT_HEADER_BYTES:], crc)


def seal(static: bytes, length: int, checksum: int) -> bytes:
    """Complete a static header with the segment's length in bytes and its checksum."""
    (crc,) = _CRC.unpack_from(static, _CRC_AT)
    header = bytearray(static)
    _DYNAMIC.pack_into(header, _DYNAMIC_AT, length, checksum, seal_of(crc, length, checksum))
    return bytes(header)


def seal_of(crc: int, length: int, checksum: int) -> int:
    """Return a hash of a segment's length in bytes, its checksum and the CRC of its header."""
    return mix64(length ^ mix64(checksum ^ crc))


def peek_header_bytes(start: bytes, payload_bytes: int) -> int:
    """Return the length of the whole header in bytes, given its first `SEGMENT_HEADER_BYTES` bytes.

    Raises `TruncatedPayload` or `FormatError`.
    """
    if len(start) < SEGMENT_HEADER_BYTES:
        raise TruncatedPayload(
            f"the payload has {payload_bytes} bytes, a header at least {SEGMENT_HEADER_BYTES}"
        )
    magic, version, _, _, num_planes, *_ = _SEGMENT.unpack_from(start)
    if magic != MAGIC:
        raise FormatError(f"the magic number is {magic!r}, not {MAGIC!r}")
    if version != WIRE_VERSION:
        raise FormatError(f"wire version {version} is not supported, only {WIRE_VERSION}")
    length = header_bytes(num_planes)
    if length > payload_bytes:
        raise TruncatedPayload(f"the header has {length} bytes, the payload {payload_bytes}")
    return length


def parse_header(header: bytes, payload_bytes: int) -> SegmentHeader:
    """Parse and validate a header, the first `peek_header_bytes(...)` bytes of a payload.

    Entry starts and entries are not validated. Raises `TruncatedPayload` or `FormatError`.
    """
    fields = _SEGMENT.unpack_from(header)
    _, _, element_number, reserved, num_planes, kv_heads, dim, crc = fields[:8]
    num_tokens, page_slots, length, checksum, found = fields[8:]
    if crc != static_crc(header):
        raise FormatError("the header's CRC-32 does not match")
    if found != seal_of(crc, length, checksum):
        raise FormatError("the header's seal does not match")
    if length > payload_bytes:
        raise TruncatedPayload(f"the segment has {length} bytes, the payload {payload_bytes}")
    if length < payload_bytes:
        raise FormatError(f"the segment has {length} bytes, the payload {payload_bytes}")
    if element_number not in BY_NUMBER:
        raise FormatError(f"unknown element type {element_number}")
    if reserved:
        raise FormatError("the header's reserved byte is not zero")
    if not (num_planes and kv_heads and dim and page_slots):
        raise FormatError("the numbers of planes, heads, dimensions and slots must be positive")
    element = BY_NUMBER[element_number]
    planes = _parse_planes(header[SEGMENT_HEADER_BYTES:], element)
    geometry = Geometry(kv_heads, dim, num_tokens, page_slots)
    parsed = SegmentHeader(element, geometry, planes, length, checksum)
    layout = parsed.layout
    if not layout.entries <= length <= layout.bound or length % ALIGNMENT:
        raise FormatError(
            f"invalid length of {length} bytes, expected {layout.entries} to {layout.bound}"
        )
    return parsed


def _parse_planes(table: bytes, element: ElementType) -> tuple[PlaneHeader, ...]:
    planes = []
    for number, (mode, reserved, codebook) in enumerate(_PLANE.iter_unpack(table)):
        if mode not in Mode.__members__.values():
            raise FormatError(f"plane {number}: unknown mode {mode}")
        if not Mode(mode).supports(element):
            raise FormatError(f"plane {number}: {element.name} does not support mode {mode}")
        if any(reserved):
            raise FormatError(f"plane {number}: reserved bytes are not zero")
        if mode == Mode.RAW and codebook:
            raise FormatError(f"plane {number}: a raw plane must not have a codebook")
        planes.append(PlaneHeader(Mode(mode), codebook))
    return tuple(planes)
