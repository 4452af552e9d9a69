"""The codec of some planes, kept: for who encodes or decodes segment after segment of them.

On a GPU a call launches and returns; what came of it is asked for later, from any thread. On the
CPU all is done when a call returns.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from codec.checks import PageIds
from codec.codebook import Codebook
from codec.format import SegmentHeader
from codec.ops import Decoded, Encoded, decode_pages, encode_pages

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """What a call will have done. Segment and pages must stay untouched until it has."""

    @property
    def done(self) -> bool: ...

    @property
    def seconds(self) -> float:
        """Of codec work, without waiting; once it is done."""
        ...

    def result(self) -> T_co:
        """Waits, and raises what the call found, as `encode_pages` and `decode_pages` do."""
        ...


class PagedCodec(Protocol):
    """See `paged`."""

    def encode(self, page_ids: PageIds, num_tokens: int, out: Tensor) -> Pending[Encoded]:
        """`encode_pages`. Bad arguments are raised at once."""
        ...

    def decode(
        self, payload: Tensor, header: SegmentHeader, page_ids: PageIds, num_tokens: int
    ) -> Pending[Decoded]:
        """`decode_pages` of a payload whose header was read."""
        ...


def paged(planes: Sequence[Tensor], codebooks: Sequence[Codebook | None]) -> PagedCodec:
    """The codec of planes `[page, kv_head, slot, dim]`, one codebook each or None, on their device.

    Calls come from one thread and, on a GPU, one stream. Raises as `encode_pages` does.
    """
    if planes and planes[0].is_cuda:
        from codec.gpu.planned import PlannedCodec

        return PlannedCodec(planes, codebooks)
    return _DirectCodec(planes, codebooks)


@dataclass(frozen=True)
class Finished(Generic[T]):
    """What is done already."""

    value: T
    seconds: float
    done: bool = True

    def result(self) -> T:
        return self.value


@dataclass(frozen=True)
class _DirectCodec:
    planes: Sequence[Tensor]
    codebooks: Sequence[Codebook | None]

    def encode(self, page_ids: PageIds, num_tokens: int, out: Tensor) -> Finished[Encoded]:
        begun = time.perf_counter()
        encoded = encode_pages(self.planes, self.codebooks, page_ids, num_tokens, out)
        return Finished(encoded, time.perf_counter() - begun)

    def decode(
        self, payload: Tensor, header: SegmentHeader, page_ids: PageIds, num_tokens: int
    ) -> Finished[Decoded]:
        begun = time.perf_counter()
        decoded = decode_pages(
            payload, self.planes, self.codebooks, page_ids, num_tokens, header=header
        )
        return Finished(decoded, time.perf_counter() - begun)
