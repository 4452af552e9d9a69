"""Public calls: validate the arguments, select the backend, write or verify the segment header."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from codec.backend import Backend, Encoded, backend_for
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
from codec.elements import BF16, ElementType, element_of
from codec.errors import FormatError, InvalidBuffer, ShapeMismatch
from codec.format import (
    SEGMENT_HEADER_BYTES,
    WORD_BYTES,
    Block,
    Geometry,
    Layout,
    Mode,
    PlaneHeader,
    SegmentHeader,
    align,
    header_bytes,
    overflow_words,
    pack_static,
    parse_header,
    peek_header_bytes,
    seal,
)

_FIRST_READ = header_bytes(256)
"""Number of payload bytes in the first copy to the host: the header of a segment of 256 planes."""


def encode_pages(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    page_ids: PageIds,
    num_tokens: int,
    out: Tensor,
    *,
    backend: Backend | None = None,
) -> Encoded:
    """Encode the tokens of some pages, in all planes, into one self-describing segment.

    Args:
        planes: tensors `[page, kv_head, slot, dim]` of one dtype, shape and device. The slots of a
            head must be contiguous within a page; pages and heads may be strided.
        codebooks: one for each plane; None stores the plane raw. Integer planes are always raw.
        page_ids: ids of the pages that hold the tokens, in token order, without repetition.
        num_tokens: number of tokens. They fill the slots of the pages in order, from the first
            slot of the first page. Other slots are not read.
        out: uint8 output, 1-D, contiguous, on the device of the planes, of at least
            `max_segment_bytes(...)` bytes.
        backend: implementation to use instead of the device's own, for tests and benchmarks.

    Raises:
        ArgumentError: an argument is invalid. Nothing was written.
        InvalidCodebook: a codebook has another dtype than the planes. Nothing was written.
    """
    element, geometry = check_planes(planes, codebooks, num_tokens)
    pages = check_pages(page_ids, planes[0].shape[0], num_tokens, geometry.page_slots)
    check_bytes(out, planes[0].device)
    entries = [
        PlaneHeader(codebook.mode, codebook.number) if codebook else PlaneHeader(Mode.RAW, 0)
        for codebook in codebooks
    ]
    layout = Layout.of(geometry, element, [entry.mode for entry in entries])
    check_output(out.numel(), layout)
    backend = backend or backend_for(out.device)
    entry_words, checksum, escapes = backend.encode_planes(
        planes, codebooks, pages, geometry, layout, out
    )
    length = layout.length(entry_words)
    header = bytearray(seal(pack_static(geometry, element, entries), length, checksum))
    out[: len(header)] = torch.frombuffer(header, dtype=torch.uint8).to(out.device)
    raw_bytes = len(planes) * geometry.elements * element.size
    return Encoded(length, raw_bytes, escapes, checksum)


def decode_pages(
    payload: Tensor,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    page_ids: PageIds,
    num_tokens: int,
    *,
    header: SegmentHeader | None = None,
    backend: Backend | None = None,
) -> None:
    """Decode a segment into pages and verify its checksum.

    The header is validated before the first write; on a CPU the entries are validated as well.
    After `ChecksumMismatch`, and on a GPU after any `FormatError`, the pages may hold garbage.
    The caller must free such pages without using them.

    Args:
        payload: uint8, 1-D, contiguous: exactly the bytes of one segment. It must not change
            during the call, because it is validated before it is decoded.
        planes: as for `encode_pages`.
        codebooks: as for `encode_pages`; may be None for a plane that the segment stores raw.
        page_ids: ids of the destination pages.
        num_tokens: number of tokens in the segment. Slots after them are not written.
        header: header of the payload, if the caller has read it already.
        backend: as for `encode_pages`.

    Raises:
        ArgumentError: an argument is invalid.
        InvalidCodebook: a codebook has another dtype than the planes.
        FormatError: the payload is not a valid segment, or does not match the arguments.
        CodebookMismatch: a plane was encoded with another codebook.
        ChecksumMismatch: the decoded content differs from the encoded content.
    """
    element, geometry = check_planes(planes, codebooks, num_tokens)
    pages = check_pages(page_ids, planes[0].shape[0], num_tokens, geometry.page_slots)
    check_bytes(payload, planes[0].device)
    header = header or read_header(payload)
    check_header(header, payload.numel(), element, geometry, codebooks)
    used = [
        None if entry.mode is Mode.RAW else codebook
        for entry, codebook in zip(header.planes, codebooks, strict=True)
    ]
    backend = backend or backend_for(payload.device)
    checksum = backend.decode_planes(payload, header, planes, used, pages)
    check_checksum(checksum, header.checksum)


def checksum_pages(
    planes: Sequence[Tensor],
    page_ids: PageIds,
    num_tokens: int,
    *,
    backend: Backend | None = None,
) -> int:
    """Return the 64-bit checksum of the content of some pages.

    It equals the checksum of a segment that stores these pages raw, and does not depend on the
    page ids. The arguments are those of `encode_pages`.
    """
    _, geometry = check_planes(planes, [None] * len(planes), num_tokens)
    pages = check_pages(page_ids, planes[0].shape[0], num_tokens, geometry.page_slots)
    backend = backend or backend_for(planes[0].device)
    return backend.checksum_planes(planes, pages, geometry)


def encode(tensor: Tensor, codebook: Codebook | None) -> Tensor:
    """Encode a tensor of any shape. If `codebook` is None, it is stored raw.

    The payload does not contain the shape, so `decode` takes it as an argument.

    Returns:
        uint8 tensor `[length]` on the same device: a segment of one plane, page and head with as
        many slots as the tensor has elements.

    Raises:
        UnsupportedDtype: the codec does not store the tensor's dtype.
        InvalidCodebook: the codebook has another dtype than the tensor.
    """
    plane = _as_plane(tensor.contiguous())
    bound = max_payload_bytes(tensor.numel(), element_of(tensor.dtype))
    out = torch.empty(bound, dtype=torch.uint8, device=tensor.device)
    encoded = encode_pages([plane], [codebook], _one_page(tensor), tensor.numel(), out)
    return out[: encoded.length]


def decode(
    payload: Tensor,
    codebook: Codebook | None,
    shape: Sequence[int],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Decode the result of `encode` into a tensor of a given shape.

    Args:
        payload: uint8 `[length]`, contiguous.
        codebook: codebook that the tensor was encoded with; not needed for a raw payload.
        shape: shape of the result. One dimension may be -1 and is inferred, as in `Tensor.view`;
            `(-1,)` returns a 1-D tensor.
        out: contiguous tensor of this shape and of the payload's dtype that receives the result.
            After `ChecksumMismatch` it holds garbage; any other error leaves it unchanged.

    Raises:
        ShapeMismatch: the payload has another number of elements than the shape.
        ArgumentError: the payload or `out` has the wrong dtype, layout or device.
        InvalidCodebook: the codebook has another dtype than `out`.
        FormatError: the payload is not a valid segment of one tensor.
        CodebookMismatch: the payload was encoded with another codebook.
        ChecksumMismatch: the decoded content differs from the encoded content.
    """
    header = read_header(payload)
    count = header.geometry.num_tokens
    flat = Geometry(1, header.element.units, count, max(count, 1))
    if header.geometry != flat or len(header.planes) != 1:
        raise FormatError("the segment was encoded by encode_pages; use decode_pages")
    expected = _resolved(shape, count)
    if out is None:
        check_codebooks(header, [codebook])
        out = torch.empty(expected, dtype=header.element.dtype, device=payload.device)
    elif tuple(out.shape) != expected:
        raise ShapeMismatch(f"the output has shape {tuple(out.shape)}, not {expected}")
    elif not out.is_contiguous():
        raise InvalidBuffer("the output must be contiguous")
    decode_pages(payload, [_as_plane(out)], [codebook], _one_page(out), count)
    return out


def read_header(payload: Tensor) -> SegmentHeader:
    """Read and validate the header of a uint8 tensor that holds exactly one segment.

    Raises:
        InvalidBuffer: the payload is not uint8, 1-D and contiguous.
        FormatError: the header is invalid.
    """
    check_bytes(payload, payload.device)
    size = payload.numel()
    start = bytes(payload[:_FIRST_READ].cpu().numpy())
    length = peek_header_bytes(start[:SEGMENT_HEADER_BYTES], size)
    if length > len(start):
        start = bytes(payload[:length].cpu().numpy())
    return parse_header(start[:length], size)


def max_payload_bytes(num_elements: int, element: ElementType = BF16) -> int:
    """Return the maximum length in bytes of a result of `codec.encode`, for any data."""
    return max_segment_bytes(1, 1, 1, num_elements, max(num_elements, 1), element)


@lru_cache(maxsize=4096)
def max_segment_bytes(
    num_planes: int,
    kv_heads: int,
    dim: int,
    num_tokens: int,
    page_slots: int,
    element: ElementType = BF16,
) -> int:
    """Return the maximum length in bytes of a segment of `codec.encode_pages`, for any data.

    `dim` is the head dimension in elements; `element` is the result of `codec.element_of`.
    """
    geometry = Geometry(kv_heads, dim * element.units, num_tokens, page_slots)
    modes = (mode for mode in Mode if mode.supports(element))
    return max(_bound(num_planes, geometry, element, mode) for mode in modes)


def _bound(num_planes: int, geometry: Geometry, element: ElementType, mode: Mode) -> int:
    """Return `Layout.bound` for planes that all have the same mode, in constant time."""
    coded = num_planes * geometry.num_chunks if mode is not Mode.RAW else 0
    table = align(WORD_BYTES * (coded + 1)) if coded else 0
    end = header_bytes(num_planes) + table + num_planes * Block.of(0, geometry, element, mode).end
    overflow = num_planes * overflow_words(element, mode) * geometry.num_columns
    return align(end + WORD_BYTES * overflow)


def warm_up() -> None:
    """Compile the CPU backend, so that the first request is not delayed by compilation."""
    sample = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    for mode in (Mode.TOP16, Mode.INBAND, Mode.THREE_BIT):
        codebook = Codebook(tuple(range(112, 112 + mode.codes)), mode)
        decode(encode(sample, codebook), codebook, sample.shape)
    checksum_pages([_as_plane(sample)], _one_page(sample), sample.numel())


def _as_plane(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as one page of one head, `[1, 1, elements, 1]`."""
    return tensor.view(-1).view(1, 1, tensor.numel(), 1)


def _one_page(tensor: Tensor) -> list[int]:
    """Return the page ids of `_as_plane(tensor)`."""
    return [0] if tensor.numel() else []


def _resolved(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """Replace a dimension of -1 so that the shape has `count` elements."""
    try:
        return tuple(torch.empty(count, device="meta").view(tuple(shape)).shape)
    except RuntimeError:
        raise ShapeMismatch(f"the payload has {count} elements, not {tuple(shape)}") from None
