"""The wire format: header layout, stream layout and their validation. Pure Python.

A segment is a header and one block for each plane. `README.md` draws the bytes; this module is
the only one that knows where they are. All integers are little-endian.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from codec.errors import FormatError, TruncatedPayload

WIRE_VERSION: int = 1
MAGIC = b"HRSZ"
CHUNK = 1024
"""Elements of a full chunk: positions in a chunk fit 10 bits, a count of escapes 16."""
ALIGNMENT = 16
"""Blocks and streams start at multiples of this, in bytes from the segment's start."""
ESCAPE_BYTES = 3
"""One escape: u16 position in the chunk, u8 exponent."""
RAW_CHUNK = 0xFFFF
"""The count of a chunk whose exponents are stored in full."""

_SEGMENT = struct.Struct("<4sHBBIIIIQQQQI")
_PLANE = struct.Struct("<B7sQQQ")
_CRC = struct.Struct("<I")
SEGMENT_HEADER_BYTES = _SEGMENT.size + _CRC.size
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


@dataclass(frozen=True)
class Geometry:
    """The content of one plane of a segment: `[kv_head, token, dim]`, cut into chunks.

    The tokens of one head in one page are a *run*; they lie together in memory. A run is cut every
    `CHUNK` elements, so that no chunk crosses a head or a page, and its last chunk may be short.
    Chunks are numbered head by head, within a head page by page.
    """

    kv_heads: int
    dim: int
    num_tokens: int
    page_slots: int

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // self.page_slots)

    @property
    def elements(self) -> int:
        return self.kv_heads * self.num_tokens * self.dim

    @property
    def raw_bytes(self) -> int:
        return 2 * self.elements

    @property
    def head_runs(self) -> list[int]:
        """Lengths of one head's runs, page by page, in elements."""
        full, rest = divmod(self.num_tokens, self.page_slots)
        return [self.page_slots * self.dim] * full + ([rest * self.dim] if rest else [])

    def chunk_lengths(self) -> list[int]:
        """Lengths of all chunks, in their order, in elements."""
        head = [min(CHUNK, run - start) for run in self.head_runs for start in range(0, run, CHUNK)]
        return head * self.kv_heads

    @property
    def num_chunks(self) -> int:
        return self._per_head(lambda run: -(-run // CHUNK))

    @property
    def code_bytes(self) -> int:
        """Bytes of the code stream: two codes a byte, every run starting at a byte."""
        return self._per_head(lambda run: (run + 1) // 2)

    def _per_head(self, of_run: Callable[[int], int]) -> int:
        full, rest = divmod(self.num_tokens, self.page_slots)
        per_head = full * of_run(self.page_slots * self.dim) + of_run(rest * self.dim)
        return self.kv_heads * per_head


@dataclass(frozen=True)
class Streams:
    """Where the streams of a `TOP16` block start, in bytes from the block's start."""

    counts: int
    codes: int
    signs: int
    tails: int

    @classmethod
    def of(cls, geometry: Geometry) -> "Streams":
        codes = align(2 * geometry.num_chunks)
        signs = align(codes + geometry.code_bytes)
        return cls(0, codes, signs, align(signs + geometry.elements))


@dataclass(frozen=True)
class PlaneHeader:
    """One plane of a segment: its mode, its codebook (0: none) and its block, in bytes."""

    mode: Mode
    codebook: int
    offset: int
    length: int


@dataclass(frozen=True)
class SegmentHeader:
    """The whole header. `checksum` covers the decoded content, `length` the whole segment."""

    element_type: ElementType
    geometry: Geometry
    length: int
    checksum: int
    planes: tuple[PlaneHeader, ...]


def header_bytes(num_planes: int) -> int:
    """Bytes of the header of a segment of `num_planes` planes; a multiple of `ALIGNMENT`."""
    return SEGMENT_HEADER_BYTES + num_planes * PLANE_HEADER_BYTES


def pack_header(header: SegmentHeader) -> bytes:
    """The header's bytes, with the CRC-32 of all the others in its place."""
    geometry = header.geometry
    fixed = _SEGMENT.pack(
        MAGIC,
        WIRE_VERSION,
        header.element_type,
        0,
        CHUNK,
        len(header.planes),
        geometry.kv_heads,
        geometry.dim,
        geometry.num_tokens,
        geometry.page_slots,
        header.length,
        header.checksum,
        0,
    )
    table = b"".join(
        _PLANE.pack(plane.mode, bytes(7), plane.codebook, plane.offset, plane.length)
        for plane in header.planes
    )
    return fixed + _CRC.pack(zlib.crc32(table, zlib.crc32(fixed))) + table


def peek_header_bytes(start: bytes, payload_bytes: int) -> int:
    """How long the header is, from its first `SEGMENT_HEADER_BYTES`, after a first look at it.

    Raises `TruncatedPayload` or `FormatError`.
    """
    if len(start) < SEGMENT_HEADER_BYTES:
        raise TruncatedPayload(
            f"{payload_bytes} bytes are no segment: a header has {SEGMENT_HEADER_BYTES}"
        )
    magic, version, *_ = fields = _SEGMENT.unpack_from(start)
    if magic != MAGIC:
        raise FormatError(f"magic is {magic!r}, not {MAGIC!r}")
    if version != WIRE_VERSION:
        raise FormatError(f"wire version {version}, this codec reads {WIRE_VERSION}")
    length = header_bytes(fields[5])
    if length > payload_bytes:
        raise TruncatedPayload(f"the header has {length} bytes, the payload {payload_bytes}")
    return length


def parse_header(header: bytes, payload_bytes: int) -> SegmentHeader:
    """Read and validate the header of a payload of `payload_bytes` bytes.

    `header` is its first `peek_header_bytes(...)` bytes. Every field is checked, and every offset
    and length against the geometry: what is returned can be indexed without further checks, except
    for the counts and positions of the escapes. Raises `TruncatedPayload` or `FormatError`.
    """
    fields = _SEGMENT.unpack_from(header)
    _, _, element_type, reserved, chunk, num_planes, kv_heads, dim = fields[:8]
    num_tokens, page_slots, length, checksum, reserved_too = fields[8:]
    (crc,) = _CRC.unpack_from(header, _SEGMENT.size)
    table = header[SEGMENT_HEADER_BYTES:]
    if crc != zlib.crc32(table, zlib.crc32(header[: _SEGMENT.size])):
        raise FormatError("the header's CRC-32 does not match")
    if length > payload_bytes:
        raise TruncatedPayload(f"the segment has {length} bytes, the payload {payload_bytes}")
    if length < payload_bytes:
        raise FormatError(f"{payload_bytes - length} bytes follow the segment's {length}")
    if element_type not in ElementType.__members__.values():
        raise FormatError(f"unknown element type {element_type}")
    if chunk != CHUNK:
        raise FormatError(f"chunks of {chunk} elements, this codec reads {CHUNK}")
    if reserved or reserved_too:
        raise FormatError("reserved bytes of the header are not zero")
    if not (num_planes and kv_heads and dim and page_slots):
        raise FormatError("a segment has at least one plane, head, dimension and slot")
    geometry = Geometry(kv_heads, dim, num_tokens, page_slots)
    planes = _parse_planes(table, geometry, length)
    return SegmentHeader(ElementType(element_type), geometry, length, checksum, planes)


def _parse_planes(table: bytes, geometry: Geometry, length: int) -> tuple[PlaneHeader, ...]:
    tails = Streams.of(geometry).tails
    planes: list[PlaneHeader] = []
    expected = header_bytes(len(table) // PLANE_HEADER_BYTES)
    for number, (mode, reserved, codebook, offset, size) in enumerate(_PLANE.iter_unpack(table)):
        where = f"plane {number}"
        if mode not in Mode.__members__.values():
            raise FormatError(f"{where}: unknown mode {mode}")
        if any(reserved):
            raise FormatError(f"{where}: reserved bytes are not zero")
        if offset != expected:
            raise FormatError(f"{where}: starts at {offset}, not at {expected}")
        if mode == Mode.RAW and (size != geometry.raw_bytes or codebook):
            raise FormatError(f"{where}: {size} raw bytes, not {geometry.raw_bytes}, or a codebook")
        if mode == Mode.TOP16 and not tails <= size < geometry.raw_bytes:
            raise FormatError(f"{where}: {size} bytes of codes, {tails} at least")
        planes.append(PlaneHeader(Mode(mode), codebook, offset, size))
        expected = align(offset + size)
    if expected != length:
        raise FormatError(f"the planes end at {expected}, the segment at {length}")
    return tuple(planes)


def max_payload_bytes(num_elements: int) -> int:
    """The largest payload of `codec.encode` for a tensor of `num_elements` elements, in bytes."""
    return max_segment_bytes(1, 1, 1, num_elements)


def max_segment_bytes(num_planes: int, kv_heads: int, dim: int, num_tokens: int) -> int:
    """The largest segment of `codec.encode_pages`, in bytes.

    A plane that its codes do not make smaller is stored raw, so the bound is the raw size, a header
    and up to `ALIGNMENT - 1` bytes of padding for each plane, whatever the data.
    """
    block = align(2 * kv_heads * dim * num_tokens)
    return header_bytes(num_planes) + num_planes * block
