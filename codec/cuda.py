"""The GPU backend: the reference's bytes from Triton kernels, for planes that lie on the device.

An encode surveys all planes (escapes and digests of each chunk), reads the blocks' lengths back
once, and writes the blocks where they then belong. A decode reads its streams' errors back once,
before it writes, and its checksum after. Kernels go to the current stream of the current device,
which is the planes'.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from codec import kernels
from codec.checksum import KEYS_HI, KEYS_LO, MASK64, combine
from codec.chunks import chunk_table
from codec.codebook import Codebook
from codec.errors import FormatError
from codec.format import (
    ESCAPE_BYTES,
    RAW_CHUNK,
    Geometry,
    Mode,
    PlaneHeader,
    SegmentHeader,
    Streams,
    align,
    header_bytes,
)


@dataclass(frozen=True)
class _Layout:
    """What the kernels need to know about a segment's chunks, on its device.

    Attributes:
        chunks: int64 `[chunks, 4]`, see `chunk_table`.
        half: int64 `[chunks]`, bytes of a chunk's codes, and of its tail if stored in full.
        code_starts, sign_starts: int64 `[chunks]`, from the block's start.
        raw_starts: int64 `[chunks]`, where a chunk starts in a raw block.
        keys: int64 `[2, words]`, the checksum's.
    """

    geometry: Geometry
    streams: Streams
    chunks: Tensor
    half: Tensor
    code_starts: Tensor
    sign_starts: Tensor
    raw_starts: Tensor
    keys: Tensor

    @classmethod
    def of(cls, pages: Tensor, geometry: Geometry, device: torch.device) -> "_Layout":
        streams = Streams.of(geometry)
        chunks = torch.from_numpy(chunk_table(pages, geometry)).to(device)
        lengths = chunks[:, 3]
        half = (lengths + 1) // 2
        starts = lengths.cumsum(0) - lengths
        keys = torch.from_numpy(np.stack((KEYS_LO, KEYS_HI)).astype(np.int64)).to(device)
        return cls(
            geometry, streams, chunks, half,
            code_starts=streams.codes + half.cumsum(0) - half,
            sign_starts=streams.signs + starts,
            raw_starts=2 * starts,
            keys=keys,
        )  # fmt: skip

    @property
    def grid(self) -> tuple[int]:
        return (len(self.chunks),)

    def tail_sizes(self, counts: Tensor) -> Tensor:
        """Bytes of each chunk's tail; int32 counts, `RAW_CHUNK` for one stored in full."""
        return torch.where(counts == RAW_CHUNK, self.half, ESCAPE_BYTES * counts.long())

    def starts(self, tail_sizes: Tensor) -> Tensor:
        """int64 `[chunks, 3]`, as the kernels take it."""
        tails = self.streams.tails + tail_sizes.cumsum(0) - tail_sizes
        return torch.stack((self.code_starts, self.sign_starts, tails), dim=1)

    def checksum(self, digests: Tensor) -> Tensor:
        """int64 0-d, from the digests `[planes, chunks]` of all planes."""
        lengths = self.chunks[:, 3].repeat(len(digests))
        return combine(digests.reshape(-1), lengths, 0)


def _view(plane: Tensor) -> tuple[Tensor, int, int]:
    """A plane as the kernels take it: int16 pointer and strides of page and head."""
    return plane.view(torch.int16), plane.stride(0), plane.stride(1)


def _code_table(codebook: Codebook | None, device: torch.device) -> Tensor:
    table = codebook.code_table if codebook else bytes(256)
    return torch.frombuffer(bytearray(table), dtype=torch.uint8).to(device)


def _survey(
    planes: Sequence[Tensor], tables: Sequence[Tensor], layout: _Layout
) -> tuple[Tensor, Tensor]:
    """Escapes int32 and digests int64, `[planes, chunks]`."""
    shape, device = (len(planes), len(layout.chunks)), layout.chunks.device
    counts = torch.zeros(shape, dtype=torch.int32, device=device)
    digests = torch.zeros(shape, dtype=torch.int64, device=device)
    for number, (plane, table) in enumerate(zip(planes, tables, strict=True)):
        if layout.geometry.elements:
            kernels.survey_kernel[layout.grid](
                *_view(plane), layout.chunks, table, *layout.keys, counts[number], digests[number]
            )
    return counts, digests


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
    geometry: Geometry,
    out: Tensor,
) -> tuple[list[PlaneHeader], int, int]:
    """See `reference.encode_planes`."""
    layout = _Layout.of(pages, geometry, out.device)
    tables = [_code_table(codebook, out.device) for codebook in codebooks]
    escapes, digests = _survey(planes, tables, layout)
    counts = torch.where(ESCAPE_BYTES * escapes > layout.half, RAW_CHUNK, escapes)
    tail_sizes = layout.tail_sizes(counts)
    facts = torch.cat((tail_sizes.sum(1), escapes.sum(1), layout.checksum(digests)[None]))
    *numbers, checksum = facts.tolist()
    tails, escaped = numbers[: len(planes)], numbers[len(planes) :]

    headers: list[PlaneHeader] = []
    offset, total = header_bytes(len(planes)), 0
    for number, (plane, codebook) in enumerate(zip(planes, codebooks, strict=True)):
        length = layout.streams.tails + tails[number]
        if codebook and layout.streams.tails < geometry.raw_bytes:
            total += escaped[number]
        if codebook and length < geometry.raw_bytes:
            header = PlaneHeader(Mode.TOP16, codebook.number, offset, length)
            block = out[offset : offset + length]
            block[: layout.streams.tails] = 0
            kernels.encode_kernel[layout.grid](
                *_view(plane), layout.chunks, layout.starts(tail_sizes[number]),
                tables[number], counts[number], block,
            )  # fmt: skip
        else:
            header = PlaneHeader(Mode.RAW, 0, offset, geometry.raw_bytes)
            if geometry.elements:
                kernels.pack_raw_kernel[layout.grid](
                    *_view(plane), layout.chunks, layout.raw_starts, out[offset:]
                )
        headers.append(header)
        offset = align(header.offset + header.length)
        out[header.offset + header.length : offset] = 0
    return headers, total, checksum & MASK64


def _read_counts(block: Tensor, layout: _Layout) -> Tensor:
    pairs = block[: 2 * len(layout.chunks)].view(-1, 2).to(torch.int32)
    return pairs[:, 0] | pairs[:, 1] << 8


def _scan(block: Tensor, layout: _Layout) -> tuple[Tensor, Tensor, Tensor]:
    """A coded block's counts, its starts, and bool `[3]`: which stream errors it has."""
    counts = _read_counts(block, layout)
    tail_sizes = layout.tail_sizes(counts)
    too_many = (tail_sizes > layout.half).any()
    disagree = tail_sizes.sum() != len(block) - layout.streams.tails
    # Positions lie where the counts say, so wrong counts must not be followed.
    followed = torch.where(too_many | disagree, 0, counts)
    starts = layout.starts(layout.tail_sizes(followed))
    disorder = torch.zeros_like(counts)
    kernels.scan_kernel[layout.grid](layout.chunks, starts, followed, block, disorder)
    return counts, starts, torch.stack((too_many, disagree, disorder.any()))


_STREAM_ERRORS = (
    "a chunk has more escapes than it may",
    "the escape counts do not add up to the block's length",
    "the positions of a chunk's escapes do not ascend within it",
)


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
) -> int:
    """See `reference.decode_planes`."""
    layout = _Layout.of(pages, header.geometry, payload.device)
    blocks = [payload[entry.offset : entry.offset + entry.length] for entry in header.planes]
    scans = {
        number: _scan(blocks[number], layout)
        for number, entry in enumerate(header.planes)
        if entry.mode is Mode.TOP16
    }
    if scans:
        flags = torch.stack([errors for _, _, errors in scans.values()]).tolist()
        for number, errors in zip(scans, flags, strict=True):
            if any(errors):
                raise FormatError(f"plane {number}: {_STREAM_ERRORS[errors.index(True)]}")

    shape = (len(planes), len(layout.chunks))
    digests = torch.zeros(shape, dtype=torch.int64, device=payload.device)
    for number, (plane, codebook) in enumerate(zip(planes, codebooks, strict=True)):
        tail = (blocks[number], *layout.keys, digests[number])
        if number in scans and codebook:
            counts, starts, _ = scans[number]
            book = torch.tensor(codebook.exponents, dtype=torch.int32, device=payload.device)
            kernels.decode_kernel[layout.grid](
                *_view(plane), layout.chunks, starts, book, counts, *tail
            )
        elif header.geometry.elements:
            kernels.unpack_raw_kernel[layout.grid](
                *_view(plane), layout.chunks, layout.raw_starts, *tail
            )
    return int(layout.checksum(digests)) & MASK64


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """See `reference.checksum_planes`."""
    layout = _Layout.of(pages, geometry, planes[0].device)
    tables = [_code_table(None, planes[0].device)] * len(planes)
    _, digests = _survey(planes, tables, layout)
    return int(layout.checksum(digests)) & MASK64
