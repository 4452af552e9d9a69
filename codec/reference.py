"""The specification: encode, decode and checksum in torch, for any device, written to be read.

Every other backend writes the same bytes. A backend is these three functions; `ops.py` checks all
arguments before, so none of them validates more than the payload's streams.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from codec.checksum import MASK64, combine, digest_chunks
from codec.codebook import CODES, Codebook
from codec.errors import FormatError
from codec.format import (
    CHUNK,
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


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
    geometry: Geometry,
    out: Tensor,
) -> tuple[list[PlaneHeader], int, int]:
    """Write the blocks of all planes behind the place of the header.

    Args:
        planes: bf16 `[page, kv_head, slot, dim]` each.
        codebooks: one for each plane; `None` stores it raw.
        pages: int64 `[num_pages]` on the CPU.
        out: u8 `[>= max_segment_bytes]`.

    Returns the planes' headers, the number of escapes and the checksum.
    """
    headers: list[PlaneHeader] = []
    offset, checksum, escapes = header_bytes(len(planes)), 0, 0
    lengths = torch.tensor(geometry.chunk_lengths(), dtype=torch.int64, device=out.device)
    for number, (plane, codebook) in enumerate(zip(planes, codebooks, strict=True)):
        content = _gather(plane, pages, geometry)
        chunks = _to_chunks(content, lengths)
        checksum += int(combine(digest_chunks(chunks, lengths), lengths, number * len(lengths)))
        block = None
        if codebook is not None:
            block, escaped = _encode_block(content, chunks, lengths, codebook, geometry)
            escapes += escaped
        mode, book = (Mode.RAW, None) if block is None else (Mode.TOP16, codebook)
        block = _raw_block(content) if block is None else block
        headers.append(PlaneHeader(mode, book.number if book else 0, offset, len(block)))
        out[offset : offset + len(block)] = block
        end = align(offset + len(block))
        out[offset + len(block) : end] = 0
        offset = end
    return headers, escapes, checksum & MASK64


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
) -> int:
    """Validate all streams, then write all planes; returns the checksum of what was decoded.

    Args as for `encode_planes`. Raises `FormatError` before anything is written.
    """
    geometry = header.geometry
    lengths = torch.tensor(geometry.chunk_lengths(), dtype=torch.int64, device=payload.device)
    contents = []
    for entry, codebook in zip(header.planes, codebooks, strict=True):
        block = payload[entry.offset : entry.offset + entry.length].to(torch.int64)
        if entry.mode is Mode.RAW or codebook is None:
            contents.append(block[0::2] | block[1::2] << 8)
        else:
            contents.append(_decode_block(block, lengths, codebook, geometry))
    checksum = 0
    for number, (plane, content) in enumerate(zip(planes, contents, strict=True)):
        digests = digest_chunks(_to_chunks(content, lengths), lengths)
        checksum += int(combine(digests, lengths, number * len(lengths)))
        _scatter(content, plane, pages, geometry)
    return checksum & MASK64


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """The checksum of the planes' content, as if it had been encoded in one segment."""
    checksum = 0
    for number, plane in enumerate(planes):
        lengths = torch.tensor(geometry.chunk_lengths(), dtype=torch.int64, device=plane.device)
        chunks = _to_chunks(_gather(plane, pages, geometry), lengths)
        checksum += int(combine(digest_chunks(chunks, lengths), lengths, number * len(lengths)))
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
    chunks[_inside(lengths)] = content
    return chunks


def _inside(lengths: Tensor, width: int = CHUNK) -> Tensor:
    """bool `[chunks, width]`: which positions lie before each length."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _starts(sizes: Tensor) -> Tensor:
    """Where each of consecutive parts of these sizes starts."""
    return sizes.cumsum(0) - sizes


def _raw_block(content: Tensor) -> Tensor:
    return torch.stack((content & 0xFF, content >> 8), dim=1).reshape(-1).to(torch.uint8)


def _nibbles_to_bytes(nibbles: Tensor, sizes: Tensor) -> Tensor:
    """int64 `[chunks, CHUNK]` of nibbles → `[sum of sizes]` bytes, the even position low."""
    packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return packed[_inside(sizes, CHUNK // 2)]


def _bytes_to_nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _encode_block(
    content: Tensor, chunks: Tensor, lengths: Tensor, codebook: Codebook, geometry: Geometry
) -> tuple[Tensor | None, int]:
    """The `TOP16` block of a plane, or `None` if it is not smaller than raw; and its escapes.

    A chunk whose escapes take more bytes than half a byte for each element stores its exponents in
    full instead: the low nibbles in the place of the codes, the high nibbles in the tail.
    """
    streams = Streams.of(geometry)
    if streams.tails >= geometry.raw_bytes:
        return None, 0
    table = torch.tensor(list(codebook.code_table), device=content.device)
    exponents = chunks >> 7 & 0xFF
    codes = table[exponents]
    escaped = (codes == CODES) & _inside(lengths)
    escapes = escaped.sum(dim=1)
    half = (lengths + 1) // 2
    raw = ESCAPE_BYTES * escapes > half
    codes = torch.where(raw[:, None], exponents & 0xF, codes.masked_fill(codes == CODES, 0))
    codes = codes.masked_fill(~_inside(lengths), 0)

    tail_sizes = torch.where(raw, half, ESCAPE_BYTES * escapes)
    tail_starts = streams.tails + _starts(tail_sizes)
    length = streams.tails + int(tail_sizes.sum())
    if length >= geometry.raw_bytes:
        return None, int(escapes.sum())

    block = content.new_zeros(length)
    counts = escapes.masked_fill(raw, RAW_CHUNK)
    block[: 2 * len(counts)] = torch.stack((counts & 0xFF, counts >> 8), dim=1).reshape(-1)
    block[streams.codes : streams.codes + geometry.code_bytes] = _nibbles_to_bytes(codes, half)
    signs = content >> 8 & 0x80 | content & 0x7F
    block[streams.signs : streams.signs + geometry.elements] = signs

    entry = escaped & ~raw[:, None]
    chunk, position = entry.nonzero(as_tuple=True)
    at = tail_starts[chunk] + ESCAPE_BYTES * (entry.cumsum(dim=1)[entry] - 1)
    block[at] = position & 0xFF
    block[at + 1] = position >> 8
    block[at + 2] = exponents[entry]
    high = exponents[raw] >> 4 & _inside(lengths[raw]) * 0xF
    places = tail_starts[raw, None] + torch.arange(CHUNK // 2, device=content.device)
    block[places[_inside(half[raw], CHUNK // 2)]] = _nibbles_to_bytes(high, half[raw])
    return block.to(torch.uint8), int(escapes.sum())


def _decode_block(block: Tensor, lengths: Tensor, codebook: Codebook, geometry: Geometry) -> Tensor:
    """Patterns `[elements]` of a `TOP16` block. Raises `FormatError`."""
    streams = Streams.of(geometry)
    half = (lengths + 1) // 2
    counts = block[0 : 2 * len(lengths) : 2] | block[1 : 2 * len(lengths) : 2] << 8
    raw = counts == RAW_CHUNK
    counts = counts.masked_fill(raw, 0)
    if bool((ESCAPE_BYTES * counts > half).any()):
        raise FormatError("a chunk has more escapes than it may")
    tail_sizes = torch.where(raw, half, ESCAPE_BYTES * counts)
    if streams.tails + int(tail_sizes.sum()) != len(block):
        raise FormatError("the escape counts do not add up to the block's length")
    tail_starts = streams.tails + _starts(tail_sizes)

    places = _inside(half, CHUNK // 2)
    packed = block.new_zeros(len(lengths), CHUNK // 2)
    packed[places] = block[streams.codes : streams.codes + geometry.code_bytes]
    codes = _bytes_to_nibbles(packed)
    exponents = torch.tensor(codebook.exponents, device=block.device)[codes]
    full = packed.new_zeros(int(raw.sum()), CHUNK // 2)
    high_places = tail_starts[raw, None] + torch.arange(CHUNK // 2, device=block.device)
    full[places[raw]] = block[high_places[places[raw]]]
    exponents[raw] = codes[raw] | _bytes_to_nibbles(full) << 4

    chunk = torch.arange(len(lengths), device=block.device).repeat_interleave(counts)
    rank = torch.arange(len(chunk), device=block.device) - _starts(counts)[chunk]
    at = tail_starts[chunk] + ESCAPE_BYTES * rank
    position = block[at] | block[at + 1] << 8
    ascending = (position[1:] > position[:-1]) | (chunk[1:] != chunk[:-1])
    if bool((position >= lengths[chunk]).any()) or not bool(ascending.all()):
        raise FormatError("the positions of a chunk's escapes do not ascend within it")
    exponents[chunk, position] = block[at + 2]

    signs = block[streams.signs : streams.signs + geometry.elements]
    inside = _inside(lengths)
    return (signs & 0x80) << 8 | exponents[inside] << 7 | signs & 0x7F
