"""GPU backend: Triton kernels that write the same bytes as the reference.

`launch.py` launches the kernels. The functions here wait for the results; `paged.py` does not.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from codec.checks import Pages
from codec.codebook import Codebook
from codec.elements import element_of
from codec.errors import FormatError, InvalidBuffer
from codec.format import Geometry, Layout, SegmentHeader
from codec.gpu.descriptors import SegmentCall, SegmentTemplates
from codec.gpu.launch import Launch, Workspace
from codec.mix import MASK64

_ERRORS = (
    "the header does not match the geometry and the codebooks",
    "an entry start or an entry is out of range",
)


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Pages,
    geometry: Geometry,
    layout: Layout,
    out: Tensor,
) -> tuple[int, int, int]:
    """Encode planes; see `codec.reference.backend.encode_planes`."""
    if not geometry.num_tokens:
        out[layout.starts : layout.entries] = 0
        return 0, 0, 0
    _, checksum, escapes, entry_words = _run(Launch.encode, planes, codebooks, pages, geometry, out)
    return entry_words, checksum & MASK64, escapes


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Pages,
) -> int:
    """Decode planes; see `codec.reference.backend.decode_planes`.

    Errors in entry starts and entries are detected while the pages are written.
    """
    if not header.geometry.num_tokens:
        return 0
    _, checksum, _, errors = _run(
        Launch.decode, planes, codebooks, pages, header.geometry, payload, len(payload)
    )
    check_errors(errors)
    return checksum & MASK64


def checksum_planes(planes: Sequence[Tensor], pages: Pages, geometry: Geometry) -> int:
    """Compute the checksum of planes; see `codec.reference.backend.checksum_planes`."""
    if not geometry.num_tokens:
        return 0
    found = _run(Launch.checksum, planes, [None] * len(planes), pages, geometry)
    return found[1] & MASK64


def check_errors(errors: int) -> None:
    """Raise `FormatError` if an error flag of a decode is set."""
    for bit, message in enumerate(_ERRORS):
        if errors >> bit & 1:
            raise FormatError(message)


def check_alignment(address: int) -> None:
    """Raise `InvalidBuffer` unless the address of a segment is a multiple of 16."""
    if address % 16:
        raise InvalidBuffer("a segment on a GPU must be aligned to 16 bytes")


def _run(
    start: Callable[[Launch], None],
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Pages,
    geometry: Geometry,
    segment: Tensor | None = None,
    length: int = 0,
) -> list[int]:
    """Launch the kernels for one segment, wait for them and return the first four results.

    Args:
        segment: the output or the payload; None to compute the checksum only.
        length: length of the payload in bytes; 0 for an output.
    """
    templates = SegmentTemplates(planes, codebooks, element_of(planes[0].dtype), geometry)
    device = planes[0].device
    address = 0
    if segment is not None:
        check_alignment(address := segment.data_ptr())
    launch = Launch(templates.shape, 1, geometry.num_pages, device, Workspace(device))
    template = templates.of(geometry.num_tokens)
    launch.describe([SegmentCall(template, pages, address, length)])
    launch.fetch()
    start(launch)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    numbers: list[int] = launch.results[0, :4].tolist()
    return numbers
