"""The specification: encode, decode and checksum in torch, for any device, written to be read.

Every other backend writes the same bytes. A backend is these three functions; `ops.py` checks all
arguments before and writes the header after, so none of them validates more than a payload's slots.
`coded_plane.py` has the block of a plane with a codebook.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from codec.checksum import combine, nh
from codec.codebook import Codebook
from codec.coded_plane import CodedPlane, Place, encode_plane
from codec.format import CHUNK, WORD, WORDS, Geometry, Layout, Mode, SegmentHeader
from codec.mix import MASK64
from codec.packing import inside, padded, read_values, words_of, write_values


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
    geometry: Geometry,
    layout: Layout,
    out: Tensor,
) -> tuple[int, int, int]:
    """Write the blocks of all planes and the spill area, and nothing past the segment's end.

    Args:
        planes: bf16 `[page, kv_head, slot, dim]` each.
        codebooks: one for each plane, all of one slot size; `None` stores it raw.
        pages: int64 `[num_pages]` on the CPU.
        out: u8 `[>= layout.bound]`.

    Returns the units that were spilled, the checksum, and the number of escapes.
    """
    out[layout.blocks[0] : layout.spill] = 0
    units = checksum = escapes = 0
    lengths = torch.tensor(geometry.chunk_lengths(), dtype=torch.int64, device=out.device)
    for number, (plane, codebook) in enumerate(zip(planes, codebooks, strict=True)):
        chunks = _to_chunks(_gather(plane, pages, geometry), lengths)
        block = layout.blocks[number]
        if codebook is None:
            write_values(out, block, inside(padded(lengths)), chunks, 2)
            digests = _digest_raw(chunks, lengths)
        else:
            place = Place(block, layout, codebook.slot_bytes)
            spilled, escaped = encode_plane(chunks, lengths, codebook, place, units, out)
            units, escapes = units + spilled, escapes + escaped
            segment = out[: layout.length(units)]
            digests = CodedPlane.read(segment, lengths, place).digests(lengths)
        checksum += int(combine(digests, lengths, number * len(lengths)))
    return units, checksum & MASK64, escapes


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    layout: Layout,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
) -> int:
    """Validate all slots, then write all planes; returns the checksum of what the payload says.

    Args as for `encode_planes`. Raises `FormatError` before anything is written.
    """
    geometry = header.geometry
    lengths = torch.tensor(geometry.chunk_lengths(), dtype=torch.int64, device=payload.device)
    checksum, contents = 0, []
    for number, (entry, codebook) in enumerate(zip(header.planes, codebooks, strict=True)):
        block = layout.blocks[number]
        if entry.mode is Mode.RAW or codebook is None:
            chunks = read_values(payload, block, inside(padded(lengths)), 2)
            digests = _digest_raw(chunks, lengths)
        else:
            place = Place(block, layout, header.slot_bytes)
            coded = CodedPlane.read(payload, lengths, place)
            chunks, digests = coded.patterns(codebook), coded.digests(lengths)
        checksum += int(combine(digests, lengths, number * len(lengths)))
        contents.append(chunks[inside(lengths)])
    for plane, content in zip(planes, contents, strict=True):
        _scatter(content, plane, pages, geometry)
    return checksum & MASK64


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """The checksum of the segment of these planes, all stored raw."""
    checksum = 0
    for number, plane in enumerate(planes):
        lengths = torch.tensor(geometry.chunk_lengths(), dtype=torch.int64, device=plane.device)
        chunks = _to_chunks(_gather(plane, pages, geometry), lengths)
        digests = _digest_raw(chunks, lengths)
        checksum += int(combine(digests, lengths, number * len(lengths)))
    return checksum & MASK64


def _gather(plane: Tensor, pages: Tensor, geometry: Geometry) -> Tensor:
    """The valid slots as int64 patterns `[elements]`, in the order `[kv_head, token, dim]`."""
    by_head = plane[pages.to(plane.device)].transpose(0, 1)
    tokens = by_head.reshape(geometry.kv_heads, -1, geometry.dim)[:, : geometry.num_tokens]
    return tokens.contiguous().view(torch.int16).reshape(-1).to(torch.int64) & 0xFFFF


def _scatter(content: Tensor, plane: Tensor, pages: Tensor, geometry: Geometry) -> None:
    """The inverse of `_gather`: write the valid slots, and no other."""
    tokens = content.to(torch.int16).view(plane.dtype)
    tokens = tokens.view(geometry.kv_heads, geometry.num_tokens, geometry.dim)
    for number, page in enumerate(pages.tolist()):
        start = number * geometry.page_slots
        run = tokens[:, start : start + geometry.page_slots]
        plane[page, :, : run.shape[1]] = run


def _to_chunks(content: Tensor, lengths: Tensor) -> Tensor:
    """`[elements]` → `[chunks, CHUNK]`, zeros past each chunk's length."""
    chunks = content.new_zeros(len(lengths), CHUNK)
    chunks[inside(lengths)] = content
    return chunks


def _digest_raw(chunks: Tensor, lengths: Tensor) -> Tensor:
    """Digests of chunks stored raw, int64 `[chunks]`."""
    e = chunks.view(len(chunks), WORDS, WORD)
    hashes = nh(e[..., 0] | e[..., 1] << 16, e[..., 2] | e[..., 3] << 16)
    return (hashes * inside(words_of(lengths), WORDS)).sum(dim=1)
