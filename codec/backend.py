"""Interface of the codec backends, and selection of the backend for a device.

Backends are imported by module name on first use, because each one imports its own compiler: numba
on a CPU, Triton on a GPU. Only this module contains the names of the backend modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from codec.checks import PageIds
from codec.codebook import Codebook
from codec.elements import element_of
from codec.format import Geometry, Layout, SegmentHeader

T_co = TypeVar("T_co", covariant=True)

_BACKENDS = {"cpu": "codec.cpu.backend", "cuda": "codec.gpu.backend"}
_REFERENCE = "codec.reference.backend"
_PAGED_CODECS = {"cuda": "codec.gpu.paged"}


@dataclass(frozen=True)
class Encoded:
    """Result of encoding one segment.

    Attributes:
        length: length of the segment in bytes. Output bytes after it are undefined.
        raw_bytes: size of the encoded slots in the pages, in bytes.
        escapes: number of elements, in planes with a codebook, whose exponent has no code. A rising
            rate means that the data have drifted from the calibration sample.
        checksum: 64-bit checksum of the segment, also stored in its header.
    """

    length: int
    raw_bytes: int
    escapes: int
    checksum: int


@dataclass(frozen=True)
class Decoded:
    """Result of decoding one verified segment; fields as in `Encoded`."""

    length: int
    raw_bytes: int
    checksum: int


class Backend(Protocol):
    """Encode, decode and checksum functions of one device type.

    `codec.reference.backend` specifies and documents them.
    """

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
        """Duration of the codec work in seconds, valid once `done`; does not block."""
        ...

    def result(self) -> T_co:
        """Wait for the call to finish and return its result.

        Raises:
            CodecError: the same errors as `encode_pages` and `decode_pages`.
        """
        ...


class PagedCodec(Protocol):
    """Codec bound to the planes of one KV cache; see `codec.paged`."""

    def encode(self, page_ids: PageIds, num_tokens: int, out: Tensor) -> Pending[Encoded]:
        """Start encoding pages; the result is that of `encode_pages`.

        Invalid arguments raise here, all other errors in `Pending.result`.
        """
        ...

    def decode(
        self, payload: Tensor, header: SegmentHeader, page_ids: PageIds, num_tokens: int
    ) -> Pending[Decoded]:
        """Start decoding a payload into pages; the result is that of `decode_pages`.

        Args:
            header: header of the payload, from `codec.read_header`.
        """
        ...


class PagedCodecFactory(Protocol):
    """Constructor of the `PagedCodec` of a device type."""

    def __call__(
        self, planes: Sequence[Tensor], codebooks: Sequence[Codebook | None]
    ) -> PagedCodec: ...


def backend_for(device: torch.device) -> Backend:
    """Return the backend for a device, or the reference backend if its device type has none."""
    return cast(Backend, import_module(_BACKENDS.get(device.type, _REFERENCE)))


def paged_codec_for(device: torch.device) -> PagedCodecFactory | None:
    """Return the constructor of a device's asynchronous paged codec, or None if it has none."""
    module = _PAGED_CODECS.get(device.type)
    return cast(PagedCodecFactory, import_module(module).PagedCodec) if module else None


def raw_bytes(planes: Sequence[Tensor], geometry: Geometry) -> int:
    """Return the size of the encoded slots in the pages, over all planes, in bytes."""
    return len(planes) * geometry.elements * element_of(planes[0].dtype).size
