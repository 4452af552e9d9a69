"""What is checked before anything runs: arguments against one another, a header against them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from codec.codebook import Codebook
from codec.elements import ElementType, element_of
from codec.errors import (
    BufferTooSmall,
    ChecksumMismatch,
    CodebookMismatch,
    FormatError,
    InvalidBuffer,
    InvalidCodebook,
    InvalidPages,
    InvalidPlanes,
)
from codec.format import (
    MAX_ENTRY_WORDS,
    WORD_BYTES,
    Geometry,
    Layout,
    Mode,
    SegmentHeader,
)

PageIds = Sequence[int] | Tensor


def check_planes(
    planes: Sequence[Tensor], codebooks: Sequence[Codebook | None], num_tokens: int
) -> tuple[ElementType, Geometry]:
    """What a segment of these planes holds; they fit one another, and the codebooks them."""
    if not planes or len(planes) != len(codebooks):
        raise InvalidPlanes(f"{len(planes)} planes and {len(codebooks)} codebooks")
    first = planes[0]
    if first.ndim != 4:
        raise InvalidPlanes(f"a plane is [page, kv_head, slot, dim], not {tuple(first.shape)}")
    element = element_of(first.dtype)
    _, kv_heads, slots, dim = first.shape
    for plane in planes:
        kind = (plane.dtype, plane.shape, plane.device)
        if kind != (first.dtype, first.shape, first.device):
            raise InvalidPlanes("all planes of a segment have one dtype, one shape and one device")
        if (dim > 1 and plane.stride(3) != 1) or (slots > 1 and plane.stride(2) != dim):
            raise InvalidPlanes(f"a head's slots must be contiguous: strides {plane.stride()}")
    for codebook in codebooks:
        if codebook is not None and codebook.dtype != first.dtype:
            raise InvalidCodebook(f"a codebook of {codebook.dtype} for planes of {first.dtype}")
    if num_tokens < 0:
        raise InvalidPages(f"{num_tokens} tokens")
    geometry = Geometry(kv_heads, dim * element.units, num_tokens, max(slots, 1))
    if not (kv_heads and dim and (slots or not num_tokens)):
        raise InvalidPlanes(f"a plane without elements: {tuple(first.shape)}")
    return element, geometry


def check_pages(page_ids: PageIds, pages_in_plane: int, geometry: Geometry) -> Tensor:
    """The page ids as int64 `[num_pages]` on the CPU: as many as the tokens need, each once."""
    ids = page_ids.tolist() if isinstance(page_ids, Tensor) else list(page_ids)
    if len(ids) != geometry.num_pages:
        raise InvalidPages(f"{geometry.num_tokens} tokens take {geometry.num_pages} pages: {ids}")
    if any(not 0 <= page < pages_in_plane for page in ids):
        raise InvalidPages(f"page ids lie in [0, {pages_in_plane}): {ids}")
    if len(set(ids)) != len(ids):
        raise InvalidPages(f"a page appears twice: {ids}")
    return torch.tensor(ids, dtype=torch.int64)


def check_bytes(payload: Tensor, device: torch.device) -> None:
    """A payload or an output must be u8, 1-D, contiguous and on this device."""
    kind = (payload.dtype, payload.ndim, payload.device)
    if kind != (torch.uint8, 1, device) or not payload.is_contiguous():
        raise InvalidBuffer(f"payloads are uint8, 1-D, contiguous and on {device}")


def check_output(out: Tensor, layout: Layout) -> None:
    """An output must have the bytes that this segment may take, and its starts must count them."""
    if layout.bound - layout.entries > WORD_BYTES * MAX_ENTRY_WORDS:
        raise InvalidPlanes("more KV than a segment's table of starts can count: cut it in two")
    if out.numel() < layout.bound:
        raise BufferTooSmall(
            f"the segment may take {layout.bound} bytes, the output has {out.numel()}"
        )


def check_header(
    header: SegmentHeader,
    size: int,
    element: ElementType,
    geometry: Geometry,
    codebooks: Sequence[Codebook | None],
) -> None:
    """A segment of so many bytes must hold what the call names."""
    if header.length != size:
        raise FormatError(f"the header is of {header.length} bytes, the payload has {size}")
    if (len(header.planes), header.element, header.geometry) != (len(codebooks), element, geometry):
        raise FormatError(
            f"the segment holds {len(header.planes)} planes of {header.element.name} and "
            f"{header.geometry}, the call names {len(codebooks)} of {element.name} and {geometry}"
        )
    check_codebooks(header, codebooks)


def check_checksum(found: int, header: SegmentHeader) -> None:
    """What was decoded must be what was encoded."""
    if found != header.checksum:
        raise ChecksumMismatch(f"decoded {found:016x}, encoded {header.checksum:016x}")


def check_codebooks(header: SegmentHeader, codebooks: Sequence[Codebook | None]) -> None:
    """Every plane that has codes is given the codebook that it was encoded with."""
    for number, (entry, codebook) in enumerate(zip(header.planes, codebooks, strict=True)):
        if entry.mode is Mode.RAW:
            continue
        given = codebook.id if codebook else "none"
        if codebook is None or codebook.number != entry.codebook:
            raise CodebookMismatch(
                f"plane {number} was encoded with codebook {entry.codebook:016x}, given: {given}"
            )
        if codebook.mode is not entry.mode:
            raise FormatError(
                f"plane {number} is in mode {entry.mode.name}, codebook {given} is of another"
            )
