"""The specification: encode, decode and checksum in torch, for any device, written to be read.

Every other backend writes the same bytes. A backend is these three functions; `ops.py` checks all
arguments before and writes the header after, so none of them validates more than what a payload's
starts and entries say. `packing.py` has columns and words, `coded_plane.py` codes and entries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from codec import checksum
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
    pages: Tensor,
    geometry: Geometry,
    layout: Layout,
    out: Tensor,
) -> tuple[int, int, int]:
    """Write the table of starts, all blocks and the entries, and nothing past the segment's end.

    Args:
        planes: `[page, kv_head, slot, dim]` each, of one element type.
        codebooks: one for each plane; `None` stores it raw.
        pages: int64 `[num_pages]` on the CPU.
        out: u8 `[>= layout.bound]`.

    Returns how many words the entries take, the checksum, and how many elements, in planes with a
    codebook, have an exponent without a code.
    """
    out[layout.starts : layout.entries] = 0
    element, columns = element_of(planes[0].dtype), Columns.of(geometry, out.device)
    total = escapes = 0
    units = [torch.zeros(1, dtype=torch.int64, device=out.device)]
    entries = [units[0][:0]]
    for number, (plane, codebook) in enumerate(zip(planes, codebooks, strict=True)):
        content, mode = _gather(plane, pages, geometry), codebook.mode if codebook else Mode.RAW
        if codebook is None:
            words = pack(columns.cut(content, element, 0), 8 * element.size, raw=True)
            total += _sum_of_raw(words, columns, number)
        else:
            lowest = codebook.exponents[0] << element.mantissa_bits
            coded, escaped = encode_plane(columns.cut(content, element, lowest), columns, codebook)
            words = coded.words
            total += checksum_of(coded, number, columns, codebook)
            units.append(coded.units)
            entries.append(coded.entries)
            escapes += escaped
        put_words(out, columns.addresses(layout.blocks[number], element, mode), words)
    if layout.coded_chunks:
        starts = torch.cat(units).cumsum(0)
        put_words(out, consecutive(layout.starts, len(starts), out.device), starts)
    listed = torch.cat(entries)
    out[layout.entries : layout.length(len(listed))] = 0
    put_words(out, consecutive(layout.entries, len(listed), out.device), listed)
    return len(listed), total & MASK64, escapes


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    layout: Layout,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
) -> int:
    """Validate starts and entries, then write all planes; the checksum of what the payload says.

    Args as for `encode_planes`. Raises `FormatError` before anything is written.
    """
    element, columns = header.element, Columns.of(header.geometry, payload.device)
    starts = _read_starts(payload, header, layout)
    entries = get_words(payload, consecutive(layout.entries, int(starts[-1]), payload.device))
    total, contents = 0, []
    for number, (entry, codebook) in enumerate(zip(header.planes, codebooks, strict=True)):
        addresses = columns.addresses(layout.blocks[number], element, entry.mode)
        words = get_words(payload, addresses)
        if entry.mode is Mode.RAW or codebook is None:
            total += _sum_of_raw(words, columns, number)
            patterns = unpack(words, raw=True)
        else:
            own, starts = starts[: len(columns.lengths) + 1], starts[len(columns.lengths) :]
            coded = CodedPlane(words, own.diff(), entries[int(own[0]) : int(own[-1])])
            patterns = decode_plane(coded, columns, codebook)
            total += checksum_of(coded, number, columns, codebook)
        contents.append(columns.joined(patterns, element))
    for plane, content in zip(planes, contents, strict=True):
        _scatter(content, plane, pages, header.geometry)
    return total & MASK64


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """The checksum of the segment of these planes, all stored raw. Args as for `encode_planes`."""
    element, columns = element_of(planes[0].dtype), Columns.of(geometry, planes[0].device)
    total = 0
    for number, plane in enumerate(planes):
        patterns = columns.cut(_gather(plane, pages, geometry), element, 0)
        total += _sum_of_raw(pack(patterns, 8 * element.size, raw=True), columns, number)
    return total & MASK64


def _sum_of_raw(words: Tensor, columns: Columns, plane: int) -> int:
    """What the columns `[columns, words]` of a raw plane add to the checksum."""
    chunk = plane * len(columns.lengths) + columns.chunk
    return int(checksum.columns(words, chunk, columns.column, 0))


def _read_starts(payload: Tensor, header: SegmentHeader, layout: Layout) -> Tensor:
    """Where each coded chunk's entries start, and where they end; int64 `[coded_chunks + 1]`."""
    if not layout.coded_chunks:
        return torch.zeros(1, dtype=torch.int64, device=payload.device)
    table = consecutive(layout.starts, layout.coded_chunks + 1, payload.device)
    starts = get_words(payload, table)
    if int(starts[0]) or bool((starts.diff() < 0).any()):
        raise FormatError("the starts of the entries do not ascend from 0")
    if layout.length(int(starts[-1])) != header.length:
        raise FormatError(f"{int(starts[-1])} words of entries do not make {header.length} bytes")
    return starts


def _gather(plane: Tensor, pages: Tensor, geometry: Geometry) -> Tensor:
    """The valid slots as int64 patterns `[elements]`, in the order `[kv_head, token, dim]`."""
    element = element_of(plane.dtype)
    by_head = unit_view(plane)[pages.to(plane.device)].transpose(0, 1)
    tokens = by_head.reshape(geometry.kv_heads, -1, geometry.dim)[:, : geometry.num_tokens]
    return tokens.reshape(-1).to(torch.int64) & (1 << 8 * element.size) - 1


def _scatter(content: Tensor, plane: Tensor, pages: Tensor, geometry: Geometry) -> None:
    """The inverse of `_gather`: write the valid slots, and no other."""
    target = unit_view(plane)
    tokens = content.to(target.dtype).view(geometry.kv_heads, geometry.num_tokens, geometry.dim)
    for number, page in enumerate(pages.tolist()):
        start = number * geometry.page_slots
        run = tokens[:, start : start + geometry.page_slots]
        target[page, :, : run.shape[1]] = run
