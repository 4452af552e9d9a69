"""The CPU backend: the reference's bytes from compiled loops, one call for a whole segment.

One call covers all planes, because every return to Python competes for the interpreter's lock,
which the loops do not hold.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from torch import Tensor

from codec.checksum import KEYS
from codec.codebook import Codebook
from codec.cpu import entries, loops
from codec.cpu.chunks import chunk_table
from codec.cpu.fields import NO_CODE
from codec.cpu.tables import BOOK, PLANE, Element, Places, Table
from codec.elements import ElementType, element_of
from codec.errors import FormatError
from codec.format import Geometry, Layout, SegmentHeader, spilled_words

_KEYS = np.array(KEYS, dtype=np.uint32)
_ERRORS = {
    entries.TOO_MANY: "a chunk has more entries or escapes than it may",
    entries.OUTSIDE: "an entry's position lies outside its chunk",
    entries.DISORDERED: "the positions of a chunk's entries do not ascend",
    entries.EXPONENT: "an entry's exponent is none of the element type",
    entries.UNUSED: "unused bits of an entry are not zero",
    entries.SECOND: "the codebook has no such second-level code",
    entries.COUNT: "a chunk's entries are not as many as its escapes need",
    entries.DISPLACED: "an entry's position is not its escape's",
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
    units, escapes, checksum = loops.encode_segment(
        _places(out, layout), _planes(planes, layout), _books(codebooks),
        chunk_table(pages, geometry), _element(element_of(planes[0].dtype)), _KEYS,
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
    _check_starts(payload, header, layout)
    used = [
        codebook if entry.mode else None
        for entry, codebook in zip(header.planes, codebooks, strict=True)
    ]
    places, table, books = _places(payload, layout), _planes(planes, layout), _books(used)
    chunks, element = chunk_table(pages, header.geometry), _element(header.element)
    error, plane = loops.scan_segment(places, table, books, chunks, element)
    if error:
        raise FormatError(f"plane {plane}: {_ERRORS[error]}")
    return int(loops.decode_segment(places, table, books, chunks, element, _KEYS))


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """See `reference.checksum_planes`."""
    table = np.array([(*_lie(plane), 0, 0, 0, 0) for plane in planes], dtype=PLANE)
    element = _element(element_of(planes[0].dtype))
    return int(loops.checksum_segment(table, chunk_table(pages, geometry), element, _KEYS))


def _check_starts(payload: Tensor, header: SegmentHeader, layout: Layout) -> None:
    """Raises `FormatError` if the table of starts is invalid."""
    if not layout.coded_chunks:
        return
    table = payload.numpy()[layout.starts :][: 4 * (layout.coded_chunks + 1)]
    starts = table.view("<u4")
    if starts[0] or (starts[1:] < starts[:-1]).any():
        raise FormatError("the starts of the entries do not ascend from 0")
    units = int(starts[-1])
    if layout.length(units) != header.length:
        raise FormatError(f"{units} words of entries do not make {header.length} bytes")


def _places(segment: Tensor, layout: Layout) -> Places:
    address = segment.data_ptr()
    return Places(address, address + layout.starts, address + layout.entries)


def _lie(plane: Tensor) -> tuple[int, int, int]:
    """Address of a plane's first element, strides of pages and heads in bytes."""
    page, head, _, _ = plane.stride()
    size = plane.element_size()
    return plane.data_ptr(), page * size, head * size


def _planes(planes: Sequence[Tensor], layout: Layout) -> Table:
    """`PLANE` `[planes]`."""
    rows = []
    for plane, block in zip(planes, layout.blocks, strict=True):
        codes, low, high = (*block.streams, block.end, block.end)[:3]
        rows.append((*_lie(plane), codes, low, high, block.end))
    return np.array(rows, dtype=PLANE)


def _books(codebooks: Sequence[Codebook | None]) -> Table:
    """`BOOK` `[planes]`."""
    return np.frombuffer(b"".join(map(_book, codebooks)), dtype=BOOK)


@lru_cache(maxsize=4096)
def _book(codebook: Codebook | None) -> bytes:
    """One `BOOK`: for every segment the same, so it is made once."""
    book = np.zeros((), dtype=BOOK)
    if codebook:
        mode = codebook.mode
        escape = mode.codes if mode.has_escape_code else 0
        codes = np.frombuffer(codebook.code_table, dtype=np.uint8)
        book["code_bits"], book["count"], book["escape"] = mode.code_bits, mode.codes, escape
        book["window"], book["lowest"] = codebook.is_window, codebook.exponents[0]
        book["spilled"] = spilled_words(codebook.element, mode)
        book["num_seconds"] = len(codebook.second)
        book["codes"] = np.where(codes & NO_CODE, NO_CODE | escape, codes) if escape else codes
        book["second_codes"] = np.frombuffer(codebook.second_table, dtype=np.uint8)
        book["exponents"][: mode.codes] = codebook.exponents
        book["seconds"][: len(codebook.second)] = codebook.second
    return book.tobytes()


@lru_cache
def _element(element: ElementType) -> Element:
    low, high = (*element.remainder_widths, 0, 0)[:2]
    return Element(element.size, element.mantissa_bits, element.exponent_bits, low, high)
