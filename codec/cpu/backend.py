"""CPU backend: compiled loops that write the same bytes as the reference.

One compiled call processes all planes of a segment. The loops run without the GIL, and every return
to Python would have to acquire it.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from torch import Tensor

from codec.checks import Pages
from codec.checksum import KEYS
from codec.codebook import Codebook
from codec.cpu import entries, loops
from codec.cpu.fields import NO_CODE
from codec.cpu.tables import BOOK, PLANE, Element, SegmentAddresses, Table, chunk_table
from codec.elements import ElementType, element_of
from codec.errors import FormatError
from codec.format import Geometry, Layout, SegmentHeader, overflow_words

_KEYS = np.array(KEYS, dtype=np.uint32)
_ERRORS = {
    entries.TOO_MANY: "a chunk has too many entries or escapes",
    entries.OUTSIDE: "an entry's position is outside its chunk",
    entries.DISORDERED: "the entry positions of a chunk are not ascending",
    entries.EXPONENT: "an entry's exponent is out of range for the element type",
    entries.UNUSED: "unused bits of an entry are not zero",
    entries.SECOND: "a second-level code is not in the codebook",
    entries.COUNT: "the number of entries does not match the number of escapes",
    entries.DISPLACED: "an entry's position does not match its escape",
}


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Pages,
    geometry: Geometry,
    layout: Layout,
    out: Tensor,
) -> tuple[int, int, int]:
    """Encode planes; see `codec.reference.backend.encode_planes`."""
    entry_words, escapes, checksum = loops.encode_segment(
        _addresses(out, layout), _planes(planes, layout), _books(codebooks),
        chunk_table(pages, geometry), _element(element_of(planes[0].dtype)), _KEYS,
    )  # fmt: skip
    return int(entry_words), int(checksum), int(escapes)


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Pages,
) -> int:
    """Decode planes; see `codec.reference.backend.decode_planes`."""
    _check_starts(payload, header)
    addresses = _addresses(payload, header.layout)
    table = _planes(planes, header.layout)
    books = _books(codebooks)
    chunks = chunk_table(pages, header.geometry)
    element = _element(header.element)
    error, plane = loops.scan_segment(addresses, table, books, chunks, element)
    if error:
        raise FormatError(f"plane {plane}: {_ERRORS[error]}")
    return int(loops.decode_segment(addresses, table, books, chunks, element, _KEYS))


def checksum_planes(planes: Sequence[Tensor], pages: Pages, geometry: Geometry) -> int:
    """Compute the checksum of planes; see `codec.reference.backend.checksum_planes`."""
    table = np.array([(*_memory_of(plane), 0, 0, 0, 0) for plane in planes], dtype=PLANE)
    element = _element(element_of(planes[0].dtype))
    return int(loops.checksum_segment(table, chunk_table(pages, geometry), element, _KEYS))


def _check_starts(payload: Tensor, header: SegmentHeader) -> None:
    """Raise `FormatError` if the table of entry starts is invalid."""
    layout = header.layout
    if not layout.coded_chunks:
        return
    table = payload.numpy()[layout.starts :][: 4 * (layout.coded_chunks + 1)]
    starts = table.view("<u4")
    if starts[0] or (starts[1:] < starts[:-1]).any():
        raise FormatError("the table of entry starts is not ascending from 0")
    entry_words = int(starts[-1])
    if layout.length(entry_words) != header.length:
        raise FormatError(
            f"{entry_words} entry words do not match a length of {header.length} bytes"
        )


def _addresses(segment: Tensor, layout: Layout) -> SegmentAddresses:
    address = segment.data_ptr()
    return SegmentAddresses(address, address + layout.starts, address + layout.entries)


def _memory_of(plane: Tensor) -> tuple[int, int, int]:
    """Return the address of a plane's first element, and its page and head strides in bytes."""
    page, head, _, _ = plane.stride()
    size = plane.element_size()
    return plane.data_ptr(), page * size, head * size


def _planes(planes: Sequence[Tensor], layout: Layout) -> Table:
    """Return a table of `PLANE` records, one for each plane."""
    rows = []
    for plane, block in zip(planes, layout.blocks, strict=True):
        codes, low, high = (*block.streams, block.end, block.end)[:3]
        rows.append((*_memory_of(plane), codes, low, high, block.end))
    return np.array(rows, dtype=PLANE)


def _books(codebooks: Sequence[Codebook | None]) -> Table:
    """Return a table of `BOOK` records, one for each plane."""
    return np.frombuffer(b"".join(map(_book, codebooks)), dtype=BOOK)


@lru_cache(maxsize=4096)
def _book(codebook: Codebook | None) -> bytes:
    """Return one `BOOK` record as bytes; cached, because every segment uses the same codebooks."""
    book = np.zeros((), dtype=BOOK)
    if codebook:
        mode = codebook.mode
        escape = mode.codes if mode.has_escape_code else 0
        codes = np.frombuffer(codebook.code_table, dtype=np.uint8)
        book["code_bits"], book["count"], book["escape"] = mode.code_bits, mode.codes, escape
        book["window"], book["lowest"] = codebook.is_window, codebook.exponents[0]
        book["overflow"] = overflow_words(codebook.element, mode)
        book["num_second"] = len(codebook.second)
        book["codes"] = np.where(codes & NO_CODE, NO_CODE | escape, codes) if escape else codes
        book["second_codes"] = np.frombuffer(codebook.second_table, dtype=np.uint8)
        book["exponents"][: mode.codes] = codebook.exponents
        book["second_exponents"][: len(codebook.second)] = codebook.second
    return book.tobytes()


@lru_cache
def _element(element: ElementType) -> Element:
    low, high = (*element.remainder_widths, 0, 0)[:2]
    return Element(element.size, element.mantissa_bits, element.exponent_bits, low, high)
