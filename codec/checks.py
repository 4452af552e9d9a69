"""Validation of arguments and headers, before anything is read or written."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
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
    TruncatedPayload,
)
from codec.format import (
    ALIGNMENT,
    MAX_ENTRY_WORDS,
    WORD_BYTES,
    Geometry,
    Layout,
    Mode,
    SegmentHeader,
)

PageIds = Sequence[int] | Tensor
Pages = NDArray[np.int64]
"""Validated page ids, in token order."""
MAX_PREFIX_BYTES = 128
"""Maximum `prefix_bytes` of `PagedCodec.decode_batch`."""


def check_planes(
    planes: Sequence[Tensor], codebooks: Sequence[Codebook | None], num_tokens: int
) -> tuple[ElementType, Geometry]:
    """Validate planes and codebooks; return their element type and the geometry of a segment.

    Raises:
        InvalidPlanes, InvalidPages, InvalidCodebook, UnsupportedDtype: an argument is invalid.
    """
    if not planes or len(planes) != len(codebooks):
        raise InvalidPlanes(
            f"a segment needs planes, each with a codebook or None, not {len(planes)} planes "
            f"and {len(codebooks)} codebooks"
        )
    first = planes[0]
    if first.ndim != 4:
        raise InvalidPlanes(f"a plane must be [page, kv_head, slot, dim], not {tuple(first.shape)}")
    element = element_of(first.dtype)
    _, kv_heads, slots, dim = first.shape
    for plane in planes:
        properties = (plane.dtype, plane.shape, plane.device)
        if properties != (first.dtype, first.shape, first.device):
            raise InvalidPlanes(
                "all planes of a segment must have the same dtype, shape and device"
            )
        if (dim > 1 and plane.stride(3) != 1) or (slots > 1 and plane.stride(2) != dim):
            raise InvalidPlanes(
                f"the slots of a head must be contiguous, strides are {plane.stride()}"
            )
    for codebook in codebooks:
        if codebook is not None and codebook.dtype != first.dtype:
            raise InvalidCodebook(
                f"the codebook is for {codebook.dtype}, the planes are {first.dtype}"
            )
    if num_tokens < 0:
        raise InvalidPages(f"the number of tokens is negative: {num_tokens}")
    geometry = Geometry(kv_heads, dim * element.units, num_tokens, max(slots, 1))
    if not (kv_heads and dim and (slots or not num_tokens)):
        raise InvalidPlanes(f"a plane has no elements: {tuple(first.shape)}")
    return element, geometry


def check_pages(page_ids: PageIds, pages_in_plane: int, num_tokens: int, page_slots: int) -> Pages:
    """Validate page ids; return them as an array `[num_pages]`, which must not be changed.

    Raises:
        InvalidPages: ids are out of range, repeated, or more or fewer than the tokens need.
    """
    if type(page_ids) is tuple:
        ids = page_ids
    else:
        ids = tuple(page_ids.tolist() if isinstance(page_ids, Tensor) else page_ids)
    needed = -(-num_tokens // page_slots)
    if len(ids) != needed:
        raise InvalidPages(f"{num_tokens} tokens need {needed} page ids, got {list(ids)}")
    return _valid_pages(ids, pages_in_plane)


@lru_cache(maxsize=1024)
def _valid_pages(ids: tuple[int, ...], pages_in_plane: int) -> Pages:
    """Return page ids as an array. Cached, because the layers of a sequence use the same pages.

    Raises `InvalidPages`.
    """
    if ids and not (min(ids) >= 0 and max(ids) < pages_in_plane):
        raise InvalidPages(f"page ids must be in [0, {pages_in_plane}): {list(ids)}")
    if len(set(ids)) != len(ids):
        raise InvalidPages(f"page ids are repeated: {list(ids)}")
    return np.array(ids, dtype=np.int64)


def check_range(offset: int, length: int, size: int) -> None:
    """Raise `InvalidBuffer` unless a segment lies within its buffer of `size` bytes."""
    if not 0 <= offset <= offset + length <= size:
        raise InvalidBuffer(
            f"bytes {offset} to {offset + length} are not in the buffer of {size} bytes"
        )


def check_prefix(prefix_bytes: int, offset: int) -> None:
    """Raise `InvalidBuffer` unless `prefix_bytes` bytes before `offset` can be returned."""
    if prefix_bytes % 8 or not 0 <= prefix_bytes <= min(MAX_PREFIX_BYTES, offset):
        raise InvalidBuffer(
            f"a prefix has up to {MAX_PREFIX_BYTES} bytes, a multiple of 8, and lies in the "
            f"buffer, not {prefix_bytes} bytes before byte {offset}"
        )


def check_bytes(payload: Tensor, device: torch.device) -> None:
    """Raise `InvalidBuffer` unless a tensor is uint8, 1-D, contiguous and on this device."""
    properties = (payload.dtype, payload.ndim, payload.device)
    if properties != (torch.uint8, 1, device) or not payload.is_contiguous():
        raise InvalidBuffer(f"the buffer must be uint8, 1-D, contiguous and on {device}")


def check_output(size: int, layout: Layout) -> None:
    """Raise an `ArgumentError` unless `size` bytes can hold any segment of this layout.

    Raises:
        InvalidPlanes: the layout may need more entry words than 32-bit starts can address.
        BufferTooSmall: `size` is less than `layout.bound`.
    """
    if layout.bound - layout.entries > WORD_BYTES * MAX_ENTRY_WORDS:
        raise InvalidPlanes("the segment is too large for 32-bit starts; split it")
    if size < layout.bound:
        raise BufferTooSmall(f"the output has {size} bytes, the segment may need {layout.bound}")


def check_header(
    header: SegmentHeader,
    size: int,
    element: ElementType,
    geometry: Geometry,
    codebooks: Sequence[Codebook | None],
) -> None:
    """Raise a `PayloadError` unless the header of a `size`-byte payload matches the arguments."""
    if header.length != size:
        raise FormatError(f"the header states {header.length} bytes, the payload has {size}")
    if (len(header.planes), header.element, header.geometry) != (len(codebooks), element, geometry):
        raise FormatError(
            f"the segment holds {len(header.planes)} planes of {header.element.name} and "
            f"{header.geometry}, expected {len(codebooks)} of {element.name} and {geometry}"
        )
    check_codebooks(header, codebooks)


def check_length(length: int, layout: Layout) -> None:
    """Raise a `FormatError` unless a segment of this layout can have this length."""
    if length < layout.entries:
        raise TruncatedPayload(f"the payload has {length} bytes, the segment {layout.entries}")
    if length > layout.bound or length % ALIGNMENT:
        raise FormatError(
            f"invalid length of {length} bytes, expected {layout.entries} to {layout.bound}"
        )


def check_checksum(found: int, expected: int) -> None:
    """Raise `ChecksumMismatch` unless a checksum equals the expected one."""
    if found != expected:
        raise ChecksumMismatch(f"the checksum is {found:016x}, expected {expected:016x}")


def check_codebooks(header: SegmentHeader, codebooks: Sequence[Codebook | None]) -> None:
    """Raise a `PayloadError` unless each coded plane was encoded with the given codebook."""
    for number, (entry, codebook) in enumerate(zip(header.planes, codebooks, strict=True)):
        if entry.mode is Mode.RAW:
            continue
        given = codebook.id if codebook else None
        if codebook is None or codebook.number != entry.codebook:
            raise CodebookMismatch(
                f"plane {number} was encoded with codebook {entry.codebook:016x}, not {given}"
            )
        if codebook.mode is not entry.mode:
            raise FormatError(
                f"plane {number} has mode {entry.mode.name}, codebook {given} has mode "
                f"{codebook.mode.name}"
            )
