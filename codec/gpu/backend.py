"""The GPU backend: the reference's bytes in few launches, without a word from the host in between.

`plan.py` has the launches; these three functions wait for what was launched, `planned.py` does not.
"""

from collections.abc import Sequence

from torch import Tensor

from codec.codebook import Codebook
from codec.elements import element_of
from codec.errors import FormatError
from codec.format import Geometry, Layout, Mode, SegmentHeader
from codec.gpu.plan import Plan
from codec.mix import MASK64

_ERRORS = (
    "the header is not that of this geometry and these codebooks",
    "a start or an entry lies outside of what its chunk can have",
)


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
    geometry: Geometry,
    layout: Layout,
    out: Tensor,
) -> tuple[int, int, int]:
    """See `reference.encode_planes`."""
    if not geometry.num_tokens:
        out[layout.starts : layout.entries] = 0
        return 0, 0, 0
    plan = Plan(planes, codebooks, geometry, layout)
    plan.encode(pages, out)
    _, checksum, escapes, units = plan.facts().read()
    return units, checksum & MASK64, escapes


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    layout: Layout,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
) -> int:
    """See `reference.decode_planes`; but what lies is found while the pages are written."""
    if not header.geometry.num_tokens:
        return 0
    plan = Plan(planes, books_of(header, codebooks), header.geometry, layout)
    plan.decode(pages, payload)
    _, checksum, _, errors = plan.facts().read()
    check(errors)
    return checksum & MASK64


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """See `reference.checksum_planes`."""
    if not geometry.num_tokens:
        return 0
    element = element_of(planes[0].dtype)
    layout = Layout.of(geometry, element, [Mode.RAW] * len(planes))
    plan = Plan(planes, [None] * len(planes), geometry, layout)
    plan.digest(pages)
    return plan.facts().read()[1] & MASK64


def books_of(header: SegmentHeader, codebooks: Sequence[Codebook | None]) -> list[Codebook | None]:
    """The codebooks that a segment was encoded with, of those that its reader has."""
    pairs = zip(header.planes, codebooks, strict=True)
    return [None if plane.mode is Mode.RAW else book for plane, book in pairs]


def check(errors: int) -> None:
    """Raises `FormatError` for what a decode's facts report."""
    for bit, message in enumerate(_ERRORS):
        if errors >> bit & 1:
            raise FormatError(message)
