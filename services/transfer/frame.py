"""The frame: what lies in a slot is one segment behind a header that says whose it is.

A manifest entry comes over gRPC and the bytes over NIXL; the header is how the reader knows that
the two belong together. Little-endian, 96 bytes, so that the payload stays aligned to 16:

| offset | bytes | field                                                   |
|-------:|------:|---------------------------------------------------------|
|      0 |     4 | magic, "HRKV"                                           |
|      4 |     2 | version, 1                                              |
|      6 |     2 | header length, 96                                       |
|      8 |     4 | CRC-32 of the header with this field zero               |
|     12 |     4 | attempt                                                 |
|     16 |    16 | epoch of the sender, a UUID                             |
|     32 |    16 | request: SHA-256 of its id, the first 16 bytes          |
|     48 |     4 | index of the segment in its sequence                    |
|     52 |     4 | first token                                             |
|     56 |     4 | number of tokens                                        |
|     60 |     4 | first layer                                             |
|     64 |     4 | number of layers                                        |
|     68 |     4 | zero                                                    |
|     72 |     8 | generation of the sender's slot                         |
|     80 |     8 | length of the payload, bytes                            |
|     88 |     8 | checksum of the payload, as its own header has it       |
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import Self

import torch

from services.transfer.errors import CorruptFrame, ForeignSegment, FrameError, StaleSegment

HEADER_BYTES = 96
VERSION = 1
_MAGIC = b"HRKV"
_LAYOUT = struct.Struct("<4sHHII16s16s6I3Q")
_CRC = slice(8, 12)


@dataclass(frozen=True)
class FrameHeader:
    """Whose segment this is. Counts and offsets are unsigned; see the module for their widths."""

    epoch: bytes  # 16
    request: bytes  # 16
    attempt: int
    index: int
    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    generation: int
    length: int  # of the payload, bytes
    checksum: int

    @classmethod
    def describing(
        cls,
        *,
        epoch: str,
        request_id: str,
        attempt: int,
        index: int,
        first_token: int,
        num_tokens: int,
        first_layer: int,
        num_layers: int,
        generation: int,
        length: int,
        checksum: int,
    ) -> Self:
        """The header of a segment in the manifest's terms.

        Args:
            epoch: 32 hex digits.

        Raises:
            FrameError: the epoch is not that.
        """
        try:
            epoch_bytes = bytes.fromhex(epoch)
        except ValueError:
            epoch_bytes = b""
        if len(epoch_bytes) != 16:
            raise FrameError(f"epoch {epoch!r} is not 32 hex digits")
        return cls(
            epoch=epoch_bytes,
            request=hashlib.sha256(request_id.encode()).digest()[:16],
            attempt=attempt,
            index=index,
            first_token=first_token,
            num_tokens=num_tokens,
            first_layer=first_layer,
            num_layers=num_layers,
            generation=generation,
            length=length,
            checksum=checksum,
        )

    def pack_into(self, buffer: torch.Tensor) -> None:
        """Writes the header to the first 96 bytes of ``buffer``, ``[n]`` uint8 on any device.

        Raises:
            FrameError: the buffer is shorter, or a field does not fit its width.
        """
        if buffer.numel() < HEADER_BYTES:
            raise FrameError(f"a header does not fit {buffer.numel()} bytes")
        try:
            packed = bytearray(
                _LAYOUT.pack(
                    *(_MAGIC, VERSION, HEADER_BYTES, 0, self.attempt, self.epoch, self.request),
                    *(self.index, self.first_token, self.num_tokens),
                    *(self.first_layer, self.num_layers, 0),
                    *(self.generation, self.length, self.checksum),
                )
            )
        except struct.error as error:
            raise FrameError(f"{self} does not fit a header: {error}") from error
        packed[_CRC] = zlib.crc32(packed).to_bytes(4, "little")
        buffer[:HEADER_BYTES].copy_(torch.frombuffer(packed, dtype=torch.uint8))

    @classmethod
    def unpack(cls, buffer: torch.Tensor) -> Self:
        """Reads the header of the frame in ``buffer``, ``[n]`` uint8 on any device.

        Raises:
            CorruptFrame: there is none, it is of another version, or it is damaged.
        """
        packed = bytearray(buffer[:HEADER_BYTES].cpu().numpy().tobytes())
        if len(packed) < HEADER_BYTES:
            raise CorruptFrame(f"a frame of {len(packed)} bytes has no header")
        fields = _LAYOUT.unpack(packed)
        magic, version, header_bytes, crc, attempt, epoch, request = fields[:7]
        index, first_token, num_tokens, first_layer, num_layers, zero = fields[7:13]
        generation, length, checksum = fields[13:]
        if magic != _MAGIC:
            raise CorruptFrame("the slot does not hold a frame")
        if (version, header_bytes) != (VERSION, HEADER_BYTES):
            raise CorruptFrame(f"a frame of version {version} with {header_bytes} header bytes")
        packed[_CRC] = bytes(4)
        if zlib.crc32(packed) != crc or zero:
            raise CorruptFrame("the frame's header is damaged")
        return cls(
            epoch=epoch,
            request=request,
            attempt=attempt,
            index=index,
            first_token=first_token,
            num_tokens=num_tokens,
            first_layer=first_layer,
            num_layers=num_layers,
            generation=generation,
            length=length,
            checksum=checksum,
        )


_STALE = ("epoch", "generation", "attempt")
_FOREIGN = (
    *("request", "index", "first_token", "num_tokens"),
    *("first_layer", "num_layers", "length", "checksum"),
)


def verify(expected: FrameHeader, found: FrameHeader) -> None:
    """Holds the frame that was read against the one that was announced.

    Staleness is looked for first: a slot that was reused meanwhile differs in everything, and its
    generation is the reason.

    Raises:
        StaleSegment: epoch, slot generation or attempt differ.
        ForeignSegment: any other field differs.
    """
    for fields, error in ((_STALE, StaleSegment), (_FOREIGN, ForeignSegment)):
        for name in fields:
            want, have = getattr(expected, name), getattr(found, name)
            if want != have:
                raise error(f"{name} is {_show(have)}, announced was {_show(want)}")


def _show(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
