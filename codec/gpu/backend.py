"""GPU backend: Triton kernels that write the same bytes as the reference.

`plan.py` launches the kernels. The functions here wait for the results; `paged.py` does not.
"""

from collections.abc import Sequence

from torch import Tensor

from codec.codebook import Codebook
from codec.elements import element_of
from codec.errors import FormatError
from codec.format import Geometry, Layout, Mode, SegmentHeader
from codec.gpu.groups import used_codebooks
from codec.gpu.plan import LaunchPlan
from codec.mix import MASK64

_ERRORS = (
    "the header does not match the geometry and the codebooks",
    "an entry start or an entry is out of range",
)


def encode_planes(
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
    geometry: Geometry,
    layout: Layout,
    out: Tensor,
) -> tuple[int, int, int]:
    """Encode planes; see `codec.reference.backend.encode_planes`."""
    if not geometry.num_tokens:
        out[layout.starts : layout.entries] = 0
        return 0, 0, 0
    plan = LaunchPlan(planes, codebooks, geometry, layout)
    plan.encode(pages, out)
    _, checksum, escapes, entry_words = plan.results().read()
    return entry_words, checksum & MASK64, escapes


def decode_planes(
    payload: Tensor,
    header: SegmentHeader,
    layout: Layout,
    planes: Sequence[Tensor],
    codebooks: Sequence[Codebook | None],
    pages: Tensor,
) -> int:
    """Decode planes; see `codec.reference.backend.decode_planes`.

    Errors in entry starts and entries are detected while the pages are written.
    """
    if not header.geometry.num_tokens:
        return 0
    plan = LaunchPlan(planes, used_codebooks(header, codebooks), header.geometry, layout)
    plan.decode(pages, payload)
    _, checksum, _, errors = plan.results().read()
    check_errors(errors)
    return checksum & MASK64


def checksum_planes(planes: Sequence[Tensor], pages: Tensor, geometry: Geometry) -> int:
    """Compute the checksum of planes; see `codec.reference.backend.checksum_planes`."""
    if not geometry.num_tokens:
        return 0
    element = element_of(planes[0].dtype)
    layout = Layout.of(geometry, element, [Mode.RAW] * len(planes))
    plan = LaunchPlan(planes, [None] * len(planes), geometry, layout)
    plan.checksum(pages)
    return plan.results().read()[1] & MASK64


def check_errors(errors: int) -> None:
    """Raise `FormatError` if an error flag of a decode is set."""
    for bit, message in enumerate(_ERRORS):
        if errors >> bit & 1:
            raise FormatError(message)
