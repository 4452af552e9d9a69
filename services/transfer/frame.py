"""The frame: one segment in a slot, behind a header that identifies it.

The manifest entry of a segment arrives over gRPC and its bytes over NIXL. The header lets the
reader check that the two belong together. Length and checksum are not part of it: they are in the
manifest and in the payload's own header, and the sender knows them only after the encode. The
header is little-endian and 96 bytes long, so that the payload stays aligned to 16:

| offset | bytes | field                                                   |
|-------:|------:|---------------------------------------------------------|
|      0 |     4 | magic, "HRKV"                                           |
|      4 |     2 | version, 5                                              |
|      6 |     2 | header length, 96                                       |
|      8 |     4 | CRC-32 of the header with this field zero               |
|     12 |     4 | attempt                                                 |
|     16 |    16 | epoch of the sender, a UUID                             |
|     32 |    16 | request: the first 16 bytes of the SHA-256 of its id    |
|     48 |     4 | index of the segment in its sequence                    |
|     52 |     4 | first token                                             |
|     56 |     4 | number of tokens                                        |
|     60 |     4 | first layer                                             |
|     64 |     4 | number of layers                                        |
|     68 |     4 | first KV head                                           |
|     72 |     4 | number of KV heads                                      |
|     76 |     4 | plane group                                             |
|     80 |     4 | rank                                                    |
|     84 |     4 | zero                                                    |
|     88 |     8 | generation of the sender's slot                         |
"""

import hashlib
import struct
import zlib
from dataclasses import astuple, dataclass, fields
from typing import Self

import torch

from headrace.v1 import prefill_pb2 as pb
from services.transfer.errors import CorruptFrame, ForeignSegment, FrameError, StaleSegment
from services.transfer.extent import Extent

HEADER_BYTES = 96
VERSION = 5
"""Version of the frame and of the numbering of plane groups; equal on workers that exchange KV."""
_MAGIC = b"HRKV"
_LAYOUT = struct.Struct("<4sHHII16s16s10IQ")
_CRC = slice(8, 12)


@dataclass(frozen=True)
class FrameHeader:
    """Identity of one segment. Fields are unsigned; the module docstring gives their widths.

    Attributes:
        epoch: epoch of the sender, 16 bytes.
        request: first 16 bytes of the hash of the request's id.
    """

    epoch: bytes
    request: bytes
    attempt: int
    index: int
    extent: Extent
    generation: int

    @classmethod
    def of(cls, segment: pb.Segment, *, epoch: str, request_id: str, attempt: int) -> Self:
        """Return the header that a manifest entry announces.

        Args:
            epoch: epoch of the sender, 32 hex digits.

        Raises:
            FrameError: ``epoch`` is malformed.
        """
        return cls(
            epoch=_epoch_bytes(epoch),
            request=hashlib.sha256(request_id.encode()).digest()[:16],
            attempt=attempt,
            index=segment.index,
            extent=Extent.of(segment),
            generation=segment.generation,
        )

    def pack_into(self, buffer: torch.Tensor) -> None:
        """Write the header to the start of ``buffer``, ``[n]`` uint8 on any device.

        On a GPU it is written in stream order.
        """
        packed = bytearray(
            _LAYOUT.pack(
                *(_MAGIC, VERSION, HEADER_BYTES, 0, self.attempt, self.epoch, self.request),
                *(self.index, *astuple(self.extent), 0, self.generation),
            )
        )
        packed[_CRC] = zlib.crc32(packed).to_bytes(4, "little")
        header = torch.frombuffer(packed, dtype=torch.uint8)
        buffer[:HEADER_BYTES].copy_(header, non_blocking=True)

    @classmethod
    def unpack(cls, frame: bytes) -> Self:
        """Read the header of the frame that starts with these bytes.

        Raises:
            CorruptFrame: there is no header, or it has another version or is damaged.
        """
        packed = bytearray(frame[:HEADER_BYTES])
        if len(packed) < HEADER_BYTES:
            raise CorruptFrame(f"a frame of {len(packed)} bytes has no header")
        magic, version, header_bytes, crc, attempt, epoch, request, *numbers = _LAYOUT.unpack(
            packed
        )
        if magic != _MAGIC:
            raise CorruptFrame("the slot does not hold a frame")
        if (version, header_bytes) != (VERSION, HEADER_BYTES):
            raise CorruptFrame(
                f"the frame has version {version} and a header of {header_bytes} bytes, "
                f"expected version {VERSION} and {HEADER_BYTES} bytes"
            )
        packed[_CRC] = bytes(4)
        index, *extent, zero, generation = numbers
        if zlib.crc32(packed) != crc or zero:
            raise CorruptFrame("the frame's header is damaged")
        return cls(epoch, request, attempt, index, Extent(*extent), generation)


_STALE = ("epoch", "generation", "attempt")
_FOREIGN = ("request", "index", *(field.name for field in fields(Extent)))


def verify(expected: FrameHeader, found: FrameHeader) -> None:
    """Compare the header that was read with the one that the manifest announced.

    Stale fields are checked first: the frame of a reused slot differs in most fields, and the error
    should name the generation.

    Raises:
        StaleSegment: epoch, slot generation or attempt differ.
        ForeignSegment: any other field differs.
    """
    want, have = _values(expected), _values(found)
    for names, error in ((_STALE, StaleSegment), (_FOREIGN, ForeignSegment)):
        for name in names:
            if want[name] != have[name]:
                raise error(
                    f"{name} is {_show(have[name])}, but the manifest has {_show(want[name])}"
                )


def _values(header: FrameHeader) -> dict[str, int | bytes]:
    """Return the fields of a header and of its extent, by name."""
    return {**vars(header), **vars(header.extent)}


def _epoch_bytes(epoch: str) -> bytes:
    try:
        packed = bytes.fromhex(epoch)
    except ValueError:
        packed = b""
    if len(packed) != 16:
        raise FrameError(f"epoch {epoch!r} is not 32 hex digits")
    return packed


def _show(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
