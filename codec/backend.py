"""Interface of the codec backends, and selection of the backend for a device.

Backends are imported by module name on first use, because each one imports its own compiler: numba
on a CPU, Triton on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from codec.checks import PageIds, Pages
from codec.codebook import Codebook
from codec.errors import PayloadError
from codec.format import Geometry, Layout, SegmentHeader

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_BACKENDS = {"cpu": "codec.cpu.backend", "cuda": "codec.gpu.backend"}
_REFERENCE = "codec.reference.backend"


class Encoded(NamedTuple):
    """Result of encoding one segment.

    Attributes:
        length: length of the segment in bytes. Output bytes after it are undefined.
        raw_bytes: size of the segment's KV before encoding, in bytes.
        escapes: number of elements, in planes with a codebook, whose exponent has no code. A rising
            rate means that the data have drifted from the calibration sample.
        checksum: 64-bit checksum of the segment, also stored in its header.
    """

    length: int
    raw_bytes: int
    escapes: int
    checksum: int


class Backend(Protocol):
    """Encode, decode and checksum functions of one device type.

    `codec.reference.backend` specifies and documents them.
    """

    def encode_planes(
        self,
        planes: Sequence[Tensor],
        codebooks: Sequence[Codebook | None],
        pages: Pages,
        geometry: Geometry,
        layout: Layout,
        out: Tensor,
    ) -> tuple[int, int, int]: ...

    def decode_planes(
        self,
        payload: Tensor,
        header: SegmentHeader,
        planes: Sequence[Tensor],
        codebooks: Sequence[Codebook | None],
        pages: Pages,
    ) -> int: ...

    def checksum_planes(
        self, planes: Sequence[Tensor], pages: Pages, geometry: Geometry
    ) -> int: ...


class Pending(Protocol[T_co]):
    """Result of a call that may still be running.

    Until `done`, the caller must not access the segment or the pages.
    """

    @property
    def done(self) -> bool:
        """Whether the call has finished; does not block."""
        ...

    @property
    def seconds(self) -> float:
        """Duration of the codec work in seconds; undefined before `done`. Does not block."""
        ...

    def result(self) -> T_co:
        """Wait for the call to finish and return its result.

        Raises:
            CodecError: the same errors as `encode_pages` and `decode_pages`.
        """
        ...


@dataclass(frozen=True)
class Finished(Generic[T]):
    """Completed `Pending` or `PendingDecode`: a value, or the error that `result` raises."""

    value: T | PayloadError
    seconds: float = 0.0
    prefix: bytes = b""
    done: bool = True

    def result(self) -> T:
        if isinstance(self.value, PayloadError):
            raise self.value
        return self.value


class PendingDecode(Pending[None], Protocol):
    """Result of a decode that may still be running."""

    @property
    def prefix(self) -> bytes:
        """The `prefix_bytes` bytes before the payload; undefined before `done`, valid after errors.

        Empty if the payload's length is impossible for its number of tokens.
        """
        ...


class EncodeSegment(NamedTuple):
    """One segment of a `PagedCodec.encode_batch` call.

    Attributes:
        page_ids: pages of the tokens, in token order. If it is a tuple, the result of its
            validation is cached.
        num_tokens: number of tokens, at least one.
        offset: start of the segment in the buffer, in bytes. On a GPU its address must be a
            multiple of 16.
        capacity: bytes available from `offset` on; see `codec.max_segment_bytes`.
    """

    page_ids: PageIds
    num_tokens: int
    offset: int
    capacity: int


class DecodeSegment(NamedTuple):
    """One segment of a `PagedCodec.decode_batch` call, with what its header should contain.

    Attributes:
        page_ids, num_tokens: destination; see `EncodeSegment`.
        offset: start of the payload in the buffer, as for `EncodeSegment`.
        length: length of the payload in bytes.
        checksum: `Encoded.checksum` of the payload.
        raw: whether all planes are stored raw. Otherwise each plane has the mode of its codebook.
    """

    page_ids: PageIds
    num_tokens: int
    offset: int
    length: int
    checksum: int
    raw: bool = False


class PagedCodec(Protocol):
    """Codec bound to the planes of one KV cache; see `codec.paged`.

    On a GPU, kernels are launched on the current CUDA stream, and working memory is kept for each
    stream. Calls on different streams may overlap.
    """

    def encode_batch(
        self, segments: Sequence[EncodeSegment], buffer: Tensor
    ) -> Sequence[Pending[Encoded]]:
        """Start encoding segments into a buffer.

        Args:
            segments: they may differ in pages and number of tokens. Their parts of the buffer must
                not overlap.
            buffer: uint8, 1-D, contiguous, on the device of the planes.

        Returns:
            The result of each segment, in order. On a GPU, `Pending.seconds` is the duration of the
            call, divided among its segments by their raw bytes.

        Raises:
            ArgumentError: an argument is invalid. On a GPU nothing was started.
        """
        ...

    def decode_batch(
        self, segments: Sequence[DecodeSegment], buffer: Tensor, *, prefix_bytes: int = 0
    ) -> Sequence[PendingDecode]:
        """Start decoding segments of a buffer into pages, without reading their headers first.

        Header and content are verified by `Pending.result`, which raises the `PayloadError` of its
        segment. It does not affect the other segments.

        Args:
            segments: as for `encode_batch`. Their pages must be disjoint.
            buffer: as for `encode_batch`.
            prefix_bytes: number of bytes before each payload to return as `PendingDecode.prefix`:
                a multiple of 8, at most 128.

        Raises:
            ArgumentError: an argument is invalid. On a GPU nothing was started.
        """
        ...

    def warm_up(self, max_tokens: int, max_segments: int = 1) -> None:
        """Compile the kernels and capture the CUDA graphs of calls up to a size.

        The graphs serve all codecs whose planes have the same shape, strides and modes, on the
        current CUDA stream. No page and no buffer is accessed. Does nothing on a CPU.

        Args:
            max_tokens: maximum number of tokens of a segment.
            max_segments: maximum number of segments of a call.
        """
        ...


def backend_for(device: torch.device) -> Backend:
    """Return the backend for a device, or the reference backend if its device type has none."""
    return cast(Backend, import_module(_BACKENDS.get(device.type, _REFERENCE)))
