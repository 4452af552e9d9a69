"""The CPU backend: the reference's bytes from compiled loops, one call for a whole segment.

One call covers all planes, because every return to Python competes for the interpreter's lock,
which the loops do not hold.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from codec import loops, slots
from codec.checksum import KEYS_HI, KEYS_LO
from codec.chunks import chunk_table
from codec.codebook import CODES, Codebook
from codec.errors import FormatError
from codec.format import SLOT_SIZES, Geometry, Layout, SegmentHeader
from codec.words import Books

_SLOT_ERRORS = {
    slots.WRONG_COUNT: "a chunk has more escapes than it may, or lists too few",
    slots.OUTSIDE: "a chunk's spilled bytes lie outside the segment",
    slots.DISORDERED: "the positions of a chunk's escapes do not ascend within it",
}


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
    geometry: Geometry,
    layout: Layout,
    out: Tensor,
) -> tuple[int, int, int]:
    """See `reference.encode_planes`."""
    slot_bytes = next((book.slot_bytes for book in codebooks if book), SLOT_SIZES[0])
    modes = [book is not None for book in codebooks]
    units, escapes, checksum = loops.encode_segment(
        out.data_ptr(), _planes(planes, modes, layout), _books(codebooks),
        chunk_table(pages, geometry), _layout(layout, slot_bytes), KEYS_LO, KEYS_HI,
    )  # fmt: skip
    return int(units), int(checksum), int(escapes)


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    layout: Layout,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
) -> int:
    """See `reference.decode_planes`."""
    segment, chunks = payload.data_ptr(), chunk_table(pages, header.geometry)
    table = _planes(planes, [bool(entry.mode) for entry in header.planes], layout)
    places = _layout(layout, header.slot_bytes)
    found = loops.scan_segment(segment, payload.numel(), table, chunks, places)
    error, plane = divmod(found, len(planes))
    if error:
        raise FormatError(f"plane {plane}: {_SLOT_ERRORS[error]}")
    books = _books(codebooks)
    return int(loops.decode_segment(segment, table, books, chunks, places, KEYS_LO, KEYS_HI))


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """See `reference.checksum_planes`."""
    table = np.array([(p.data_ptr(), *p.stride()[:2], 0, 0) for p in planes], dtype=np.int64)
    return int(loops.checksum_segment(table, chunk_table(pages, geometry), KEYS_LO, KEYS_HI))


def _planes(planes: Sequence[Tensor], coded: Sequence[bool], layout: Layout) -> loops.Integers:
    """int64 `[planes, 5]`, see `loops.py`."""
    facts = zip(planes, coded, layout.blocks, strict=True)
    rows = [(plane.data_ptr(), *plane.stride()[:2], mode, at) for plane, mode, at in facts]
    return np.array(rows, dtype=np.int64)


def _layout(layout: Layout, slot_bytes: int) -> loops.Integers:
    """int64 `[5]`, see `loops.py`."""
    streams = layout.streams
    return np.array([slot_bytes, streams.codes, streams.signs, streams.end, layout.spill])


def _books(codebooks: Sequence[Codebook | None]) -> Books:
    """u8 `[planes, 16]`; zeros where there is none."""
    books = b"".join(bytes(book.exponents if book else CODES) for book in codebooks)
    return np.frombuffer(books, dtype=np.uint8).reshape(-1, CODES)
