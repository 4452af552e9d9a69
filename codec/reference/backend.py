"""Reference backend: the specification of encode, decode and checksum, in torch, on any device.

Every backend consists of these three functions and writes the same bytes. `ops.py` validates all
arguments before these calls and writes the header after them. A backend only validates the entry
starts and the entries of a payload. `packing.py` defines columns and words, `coded_plane.py` codes
and entries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from codec import checksum
from codec.checks import Pages
from codec.codebook import Codebook
from codec.elements import element_of, unit_view
from codec.errors import FormatError
from codec.format import Geometry, Layout, Mode, SegmentHeader
from codec.mix import MASK64
from codec.reference.coded_plane import CodedPlane, checksum_of, decode_plane, encode_plane
from codec.reference.packing import Columns, consecutive, get_words, pack, put_words, unpack


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Pages,
    geometry: Geometry,
    layout: Layout,
    out: Tensor,
) -> tuple[int, int, int]:
    """Write the table of entry starts, all blocks and the entries, and no byte after the segment.

    Args:
        planes: tensors `[page, kv_head, slot, dim]` of one dtype.
        codebooks: one for each plane; None stores it raw.
        pages: int64 `[num_pages]` page ids, in token order.
        geometry: geometry of the segment.
        layout: layout of the segment.
        out: uint8 `[>= layout.bound]`.

    Returns:
        Number of entry words, checksum, and number of escapes in planes with a codebook.
    """
    out[layout.starts : layout.entries] = 0
    element = element_of(planes[0].dtype)
    columns = Columns.of(geometry, out.device)
    total = escapes = 0
    entry_words = [torch.zeros(1, dtype=torch.int64, device=out.device)]
    entries = [entry_words[0][:0]]
    for number, (plane, codebook) in enumerate(zip(planes, codebooks, strict=True)):
        content = _gather(plane, pages, geometry)
        mode = codebook.mode if codebook else Mode.RAW
        if codebook is None:
            words = pack(columns.split(content, element, 0), 8 * element.size, raw=True)
            total += _sum_of_raw(words, columns, number)
        else:
            lowest = codebook.exponents[0] << element.mantissa_bits
            coded, escaped = encode_plane(
                columns.split(content, element, lowest), columns, codebook
            )
            words = coded.words
            total += checksum_of(coded, number, columns, codebook)
            entry_words.append(coded.entry_words)
            entries.append(coded.entries)
            escapes += escaped
        put_words(out, columns.addresses(layout.blocks[number], element, mode), words)
    if layout.coded_chunks:
        starts = torch.cat(entry_words).cumsum(0)
        put_words(out, consecutive(layout.starts, len(starts), out.device), starts)
    listed = torch.cat(entries)
    out[layout.entries : layout.length(len(listed))] = 0
    put_words(out, consecutive(layout.entries, len(listed), out.device), listed)
    return len(listed), total & MASK64, escapes


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Pages,
) -> int:
    """Validate the entry starts and entries of a payload, then write all planes.

    Arguments are as for `encode_planes`. The codebooks have the modes of the header.

    Returns:
        The checksum of the payload's content.

    Raises:
        FormatError: an entry start or an entry is invalid. Nothing was written.
    """
    element, layout = header.element, header.layout
    columns = Columns.of(header.geometry, payload.device)
    starts = _read_starts(payload, header)
    entries = get_words(payload, consecutive(layout.entries, int(starts[-1]), payload.device))
    total = 0
    contents = []
    for number, codebook in enumerate(codebooks):
        mode = codebook.mode if codebook else Mode.RAW
        words = get_words(payload, columns.addresses(layout.blocks[number], element, mode))
        if codebook is None:
            total += _sum_of_raw(words, columns, number)
            patterns = unpack(words, raw=True)
        else:
            own, starts = starts[: len(columns.lengths) + 1], starts[len(columns.lengths) :]
            coded = CodedPlane(words, own.diff(), entries[int(own[0]) : int(own[-1])])
            patterns = decode_plane(coded, columns, codebook)
            total += checksum_of(coded, number, columns, codebook)
        contents.append(columns.join(patterns, element))
    for plane, content in zip(planes, contents, strict=True):
        _scatter(content, plane, pages, header.geometry)
    return total & MASK64


def checksum_planes(planes: Sequence[Tensor], pages: Pages, geometry: Geometry) -> int:
    """Return the checksum of planes as if they were stored raw."""
    element = element_of(planes[0].dtype)
    columns = Columns.of(geometry, planes[0].device)
    total = 0
    for number, plane in enumerate(planes):
        patterns = columns.split(_gather(plane, pages, geometry), element, 0)
        total += _sum_of_raw(pack(patterns, 8 * element.size, raw=True), columns, number)
    return total & MASK64


def _sum_of_raw(words: Tensor, columns: Columns, plane: int) -> int:
    """Return the checksum of a raw plane, given the words of its columns, `[columns, words]`."""
    chunk = plane * len(columns.lengths) + columns.chunk
    return int(checksum.columns(words, chunk, columns.column, 0))


def _read_starts(payload: Tensor, header: SegmentHeader) -> Tensor:
    """Return the validated table of entry starts, int64 `[coded_chunks + 1]`."""
    layout = header.layout
    if not layout.coded_chunks:
        return torch.zeros(1, dtype=torch.int64, device=payload.device)
    table = consecutive(layout.starts, layout.coded_chunks + 1, payload.device)
    starts = get_words(payload, table)
    if int(starts[0]) or bool((starts.diff() < 0).any()):
        raise FormatError("the table of entry starts is not ascending from 0")
    if layout.length(int(starts[-1])) != header.length:
        raise FormatError(f"{int(starts[-1])} entry words do not match {header.length} bytes")
    return starts


def _gather(plane: Tensor, pages: Pages, geometry: Geometry) -> Tensor:
    """Return the bit patterns of the valid slots, int64 `[elements]`, in segment order."""
    element = element_of(plane.dtype)
    by_head = unit_view(plane)[pages.tolist()].transpose(0, 1)
    tokens = by_head.reshape(geometry.kv_heads, -1, geometry.dim)[:, : geometry.num_tokens]
    return tokens.reshape(-1).to(torch.int64) & (1 << 8 * element.size) - 1


def _scatter(content: Tensor, plane: Tensor, pages: Pages, geometry: Geometry) -> None:
    """Write the bit patterns of the valid slots to the pages; inverse of `_gather`.

    Args:
        content: int64 `[elements]`, in segment order.
    """
    target = unit_view(plane)
    tokens = content.to(target.dtype).view(geometry.kv_heads, geometry.num_tokens, geometry.dim)
    for number, page in enumerate(pages.tolist()):
        start = number * geometry.page_slots
        run = tokens[:, start : start + geometry.page_slots]
        target[page, :, : run.shape[1]] = run
