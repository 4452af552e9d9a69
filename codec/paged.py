"""Codec bound to the planes of one KV cache, for encoding and decoding many of its segments.

On a GPU a call launches kernels and returns; its result can be read later, by any thread. On a CPU
the work is finished when the call returns.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from codec.backend import Decoded, Encoded, PagedCodec, paged_codec_for
from codec.checks import PageIds
from codec.codebook import Codebook
from codec.format import SegmentHeader
from codec.ops import decode_pages, encode_pages

T = TypeVar("T")


def paged(planes: Sequence[Tensor], codebooks: Sequence[Codebook | None]) -> PagedCodec:
    """Return a codec for planes `[page, kv_head, slot, dim]`, on their device.

    All calls must come from one thread and, on a GPU, use one CUDA stream.

    Args:
        planes: as for `encode_pages`.
        codebooks: one for each plane; None stores the plane raw.

    Raises:
        ArgumentError, InvalidCodebook: the planes or codebooks are invalid. On a CPU, `encode` and
            `decode` of the returned codec raise these errors instead.
    """
    factory = paged_codec_for(planes[0].device) if planes else None
    return factory(planes, codebooks) if factory else _SynchronousCodec(planes, codebooks)


@dataclass(frozen=True)
class Finished(Generic[T]):
    """Completed `Pending` result."""

    value: T
    seconds: float
    done: bool = True

    def result(self) -> T:
        return self.value


@dataclass(frozen=True)
class _SynchronousCodec:
    planes: Sequence[Tensor]
    codebooks: Sequence[Codebook | None]

    def encode(self, page_ids: PageIds, num_tokens: int, out: Tensor) -> Finished[Encoded]:
        started = time.perf_counter()
        encoded = encode_pages(self.planes, self.codebooks, page_ids, num_tokens, out)
        return Finished(encoded, time.perf_counter() - started)

    def decode(
        self, payload: Tensor, header: SegmentHeader, page_ids: PageIds, num_tokens: int
    ) -> Finished[Decoded]:
        started = time.perf_counter()
        decoded = decode_pages(
            payload, self.planes, self.codebooks, page_ids, num_tokens, header=header
        )
        return Finished(decoded, time.perf_counter() - started)
