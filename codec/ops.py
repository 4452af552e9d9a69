"""The public calls: check every argument, choose the backend by device, keep the header's promises.

A backend (`reference`, `cpu`, `cuda`) is three functions, `encode_planes`, `decode_planes` and
`checksum_planes`, which find everything checked but a payload's starts and entries, and write
everything but the header.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from codec.checks import (
    PageIds,
    check_bytes,
    check_checksum,
    check_codebooks,
    check_header,
    check_output,
    check_pages,
    check_planes,
)
from codec.codebook import Codebook
from codec.elements import element_of
from codec.errors import (
    FormatError,
    InvalidBuffer,
)
from codec.format import (
    SEGMENT_HEADER_BYTES,
    Geometry,
    Layout,
    Mode,
    PlaneHeader,
    SegmentHeader,
    header_bytes,
    max_payload_bytes,
    pack_static,
    parse_header,
    peek_header_bytes,
    seal,
)

_FIRST_READ = header_bytes(256)
"""What is read of a payload at first: for nearly every segment its whole header, in one copy."""


@dataclass(frozen=True)
class Encoded:
    """What one `encode_pages` wrote.

    Attributes:
        length: bytes of `out` that are used; the rest is untouched or padding.
        raw_bytes: bytes of the valid slots as they lie in the pages.
        escapes: elements whose exponent has no code, in planes with a codebook. A rising rate is
            a drift from the calibration.
        checksum: 64-bit checksum of the segment; the header carries it too.
    """

    length: int
    raw_bytes: int
    escapes: int
    checksum: int


@dataclass(frozen=True)
class Decoded:
    """What one `decode_pages` read and verified; fields as in `Encoded`."""

    length: int
    raw_bytes: int
    checksum: int


class Backend(Protocol):
    """What a device's implementation provides; `reference.py` is the specification."""

    def encode_planes(
        self,
        planes: Sequence[Tensor],
        codebooks: Sequence[Codebook | None],
        pages: Tensor,
        geometry: Geometry,
        layout: Layout,
        out: Tensor,
    ) -> tuple[int, int, int]: ...

    def decode_planes(
        self,
        payload: Tensor,
        header: SegmentHeader,
        layout: Layout,
        planes: Sequence[Tensor],
        codebooks: Sequence[Codebook | None],
        pages: Tensor,
    ) -> int: ...

    def checksum_planes(
        self, planes: Sequence[Tensor], pages: Tensor, geometry: Geometry
    ) -> int: ...


def encode_pages(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    page_ids: PageIds,
    num_tokens: int,
    out: Tensor,
    *,
    backend: Backend | None = None,
) -> Encoded:
    """Encode the tokens of some pages, of all planes, into one self-describing segment.

    Args:
        planes: `[page, kv_head, slot, dim]` each, of one dtype, shape and device; a head's slots
            are contiguous within a page, pages and heads may be strided.
        codebooks: one for each plane; `None` stores it raw.
        page_ids: the pages that hold the tokens, in token order; any ids, each once.
        num_tokens: valid tokens from the first slot of the first page. Other slots are not read.
        out: u8, 1-D, contiguous, same device, at least `max_segment_bytes(...)` long.
        backend: an implementation other than the device's own; tests and benchmarks pass it.

    Raises an `ArgumentError` or `InvalidCodebook` before anything is written.
    """
    element, geometry = check_planes(planes, codebooks, num_tokens)
    pages = check_pages(page_ids, planes[0].shape[0], geometry)
    check_bytes(out, planes[0].device)
    entries = [
        PlaneHeader(codebook.mode, codebook.number) if codebook else PlaneHeader(Mode.RAW, 0)
        for codebook in codebooks
    ]
    layout = Layout.of(geometry, element, [entry.mode for entry in entries])
    check_output(out, layout)
    backend = backend or _backend_of(out.device)
    units, checksum, escapes = backend.encode_planes(
        planes, codebooks, pages, geometry, layout, out
    )
    length = layout.length(units)
    header = bytearray(seal(pack_static(geometry, element, entries), length, checksum))
    out[: len(header)] = torch.frombuffer(header, dtype=torch.uint8).to(out.device)
    return Encoded(length, raw_bytes(planes, geometry), escapes, checksum)


def decode_pages(
    payload: Tensor,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    page_ids: PageIds,
    num_tokens: int,
    *,
    header: SegmentHeader | None = None,
    backend: Backend | None = None,
) -> Decoded:
    """Decode a segment into pages and verify its checksum.

    Args:
        payload: u8, 1-D, contiguous: exactly the segment's `length` bytes. Nobody may write to it
            during the call: what was validated must be what is decoded.
        planes, codebooks, page_ids, num_tokens, backend: as for `encode_pages`; the page ids are
            the receiver's own. Slots past `num_tokens` are not written. A codebook is needed only
            for a plane that is not stored raw.
        header: the payload's, if it has been read already.

    Every header field is validated before the first write; on the CPU the table of starts and all
    entries as well. After `ChecksumMismatch`, and on a GPU after any `FormatError`, the pages may
    hold garbage. They must not join a page table; the caller frees them.

    Raises `ArgumentError`, `InvalidCodebook`, `FormatError`, `CodebookMismatch`,
    `ChecksumMismatch`.
    """
    element, geometry = check_planes(planes, codebooks, num_tokens)
    pages = check_pages(page_ids, planes[0].shape[0], geometry)
    check_bytes(payload, planes[0].device)
    header = header or read_header(payload)
    check_header(header, payload.numel(), element, geometry, codebooks)
    backend = backend or _backend_of(payload.device)
    checksum = backend.decode_planes(payload, header, header.layout, planes, codebooks, pages)
    check_checksum(checksum, header)
    return Decoded(header.length, raw_bytes(planes, geometry), checksum)


def checksum_pages(
    planes: Sequence[Tensor],
    page_ids: PageIds,
    num_tokens: int,
    *,
    backend: Backend | None = None,
) -> int:
    """The checksum of the content alone: that of the segment of these pages, all stored raw.

    Args as for `encode_pages`. Equal content in other pages has an equal checksum.
    """
    _, geometry = check_planes(planes, [None] * len(planes), num_tokens)
    pages = check_pages(page_ids, planes[0].shape[0], geometry)
    backend = backend or _backend_of(planes[0].device)
    return backend.checksum_planes(planes, pages, geometry)


def encode(tensor: Tensor, codebook: Codebook | None) -> Tensor:
    """Encode a tensor of any shape; `codebook=None` stores it raw.

    Returns a u8 tensor `[length]` on the same device: a segment of one plane with one page, one
    head and as many slots as elements. Shape is not part of it. Raises `UnsupportedDtype`.
    """
    plane = _as_plane(tensor.contiguous())
    bound = max_payload_bytes(tensor.numel(), element_of(tensor.dtype))
    out = torch.empty(bound, dtype=torch.uint8, device=tensor.device)
    encoded = encode_pages([plane], [codebook], _one_page(tensor), tensor.numel(), out)
    return out[: encoded.length]


def decode(
    payload: Tensor,
    codebook: Codebook | None,
    *,
    shape: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode what `encode` returned: 1-D unless a shape or an output is given.

    Args:
        payload: u8 `[length]`, contiguous.
        codebook: the one it was encoded with; not needed for a raw payload.
        shape: shape of the result, of as many elements as the payload has.
        out: contiguous tensor of the payload's dtype to write into and return; it holds garbage
            after `ChecksumMismatch`, and is as it was after any other error.

    Raises `ArgumentError`, `FormatError`, `CodebookMismatch`, `ChecksumMismatch`.
    """
    header = read_header(payload)
    count = header.geometry.num_tokens
    if (
        header.geometry != Geometry(1, header.element.units, count, max(count, 1))
        or len(header.planes) != 1
    ):
        raise FormatError("this segment was encoded from pages; decode it with decode_pages")
    if out is None:
        check_codebooks(header, [codebook])
        out = torch.empty(count, dtype=header.element.dtype, device=payload.device)
        out = out if shape is None else _reshaped(out, shape)
    elif shape is not None and tuple(shape) != tuple(out.shape):
        raise InvalidBuffer(f"the output has shape {tuple(out.shape)}, not {tuple(shape)}")
    if out.numel() != count or not out.is_contiguous():
        raise InvalidBuffer(f"the output must be contiguous and hold {count} elements")
    decode_pages(payload, [_as_plane(out)], [codebook], _one_page(out), count)
    return out


def read_header(payload: Tensor) -> SegmentHeader:
    """Parse and validate the header of a u8 tensor that is exactly one segment.

    Raises `InvalidBuffer`, `FormatError`.
    """
    check_bytes(payload, payload.device)
    size = payload.numel()
    start = bytes(payload[:_FIRST_READ].cpu().numpy())
    length = peek_header_bytes(start[:SEGMENT_HEADER_BYTES], size)
    if length > len(start):
        start = bytes(payload[:length].cpu().numpy())
    return parse_header(start[:length], size)


def warm_up() -> None:
    """Compile the CPU backend now, so that the first request does not wait for it."""
    sample = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    for mode in (Mode.TOP16, Mode.INBAND, Mode.THREE_BIT):
        codebook = Codebook(tuple(range(112, 112 + mode.codes)), mode)
        decode(encode(sample, codebook), codebook)
    checksum_pages([_as_plane(sample)], _one_page(sample), sample.numel())


def raw_bytes(planes: Sequence[Tensor], geometry: Geometry) -> int:
    """Bytes of the valid slots of all planes."""
    return len(planes) * geometry.elements * element_of(planes[0].dtype).size


def _backend_of(device: torch.device) -> Backend:
    """The device's implementation, imported when first needed: each brings its own compiler."""
    if device.type == "cuda":
        from codec.gpu import backend as cuda

        return cuda
    if device.type == "cpu":
        from codec.cpu import backend as cpu

        return cpu
    from codec.reference import backend as reference

    return reference


def _as_plane(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one page of one head, `[1, 1, elements, 1]`."""
    return tensor.view(-1).view(1, 1, tensor.numel(), 1)


def _one_page(tensor: Tensor) -> list[int]:
    return [0] if tensor.numel() else []


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    try:
        return tensor.view(tuple(shape))
    except RuntimeError:
        raise InvalidBuffer(f"{tensor.numel()} elements have no shape {tuple(shape)}") from None
