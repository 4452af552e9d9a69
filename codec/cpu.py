"""The CPU backend: the reference's bytes from compiled loops, one call for a whole segment.

One call covers all planes, because every return to Python competes for the interpreter's lock,
which the loops do not hold.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from codec import loops
from codec.checksum import KEYS_HI, KEYS_LO
from codec.chunks import chunk_table
from codec.codebook import CODES, Codebook
from codec.errors import FormatError
from codec.format import Geometry, Mode, PlaneHeader, SegmentHeader, Streams, header_bytes

_STREAM_ERRORS = {
    loops.COUNT_TOO_LARGE: "a chunk has more escapes than it may",
    loops.LENGTHS_DISAGREE: "the escape counts do not add up to the block's length",
    loops.POSITIONS_DISORDERED: "the positions of a chunk's escapes do not ascend within it",
}


def _streams(geometry: Geometry) -> loops.Integers:
    streams = Streams.of(geometry)
    return np.array([streams.counts, streams.codes, streams.signs, streams.tails], dtype=np.int64)


def _addresses(planes: Sequence[Tensor]) -> tuple[NDArray[np.uint64], loops.Integers]:
    """u64 `[planes]` addresses and int64 `[planes, 2]` strides (page, head) in elements."""
    addresses = np.array([plane.data_ptr() for plane in planes], dtype=np.uint64)
    return addresses, np.array([plane.stride()[:2] for plane in planes], dtype=np.int64)


@lru_cache(maxsize=4096)
def _table(codebook: Codebook | None) -> loops.Bytes:
    return np.frombuffer(codebook.code_table if codebook else bytes(256), dtype=np.uint8)


@lru_cache(maxsize=4096)
def _book(codebook: Codebook | None) -> NDArray[np.uint16]:
    """The exponents where a bf16 pattern has them."""
    exponents = codebook.exponents if codebook else (0,) * CODES
    return np.array([exponent << 7 for exponent in exponents], dtype=np.uint16)


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
    geometry: Geometry,
    out: Tensor,
) -> tuple[list[PlaneHeader], int, int]:
    """See `reference.encode_planes`."""
    addresses, strides = _addresses(planes)
    tables = np.stack([_table(codebook) for codebook in codebooks])
    coded = np.array([codebook is not None for codebook in codebooks])
    entries = np.empty((len(planes), 3), dtype=np.int64)
    escapes, checksum = loops.encode_segment(
        addresses, strides, tables, coded, chunk_table(pages, geometry), _streams(geometry),
        geometry.raw_bytes, header_bytes(len(planes)), out.numpy(), entries, KEYS_LO, KEYS_HI,
    )  # fmt: skip
    headers = [
        PlaneHeader(Mode(mode), codebook.number if mode and codebook else 0, offset, length)
        for (mode, offset, length), codebook in zip(entries.tolist(), codebooks, strict=True)
    ]
    return headers, int(escapes), int(checksum)


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
) -> int:
    """See `reference.decode_planes`."""
    addresses, strides = _addresses(planes)
    entries = np.array([(e.mode, e.offset, e.length) for e in header.planes], dtype=np.int64)
    chunks, streams = chunk_table(pages, header.geometry), _streams(header.geometry)
    data = payload.numpy()
    error, plane = divmod(loops.scan_segment(data, entries, chunks, streams), len(planes))
    if error:
        raise FormatError(f"plane {plane}: {_STREAM_ERRORS[error]}")
    books = np.stack([_book(codebook) for codebook in codebooks])
    return int(
        loops.decode_segment(
            data, entries, addresses, strides, books, chunks, streams, KEYS_LO, KEYS_HI
        )
    )


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """See `reference.checksum_planes`."""
    addresses, strides = _addresses(planes)
    return int(
        loops.checksum_segment(addresses, strides, chunk_table(pages, geometry), KEYS_LO, KEYS_HI)
    )
