"""Which codebooks a worker encodes and decodes with, and the codec of each group of layers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

import codec
from services.transfer.policy import WireMode

T = TypeVar("T")


@dataclass(frozen=True)
class CodecPlan:
    """The codebooks of this worker's planes; a plane without one is always sent raw."""

    codebooks: tuple[codec.Codebook | None, ...]
    _kept: dict[tuple[int, int, WireMode], codec.PagedCodec] = field(default_factory=dict)

    def of(
        self,
        planes: Sequence[Tensor],
        first: int,
        count: int,
        mode: WireMode = WireMode.SPLITZIP,
    ) -> codec.PagedCodec:
        """The codec of these layers, made once.

        Args:
            planes: of all layers, K and V by turns; the same at each call.
        """
        key = first, count, mode
        if key not in self._kept:
            layers = slice(2 * first, 2 * (first + count))
            self._kept[key] = codec.paged(planes[layers], self._layers(first, count, mode))
        return self._kept[key]

    def escape_rate(self, first: int, count: int) -> float:
        """The share of these layers' elements that the calibration found no code for."""
        layers = self._layers(first, count, WireMode.SPLITZIP)
        books = [book for book in layers if book is not None]
        return sum(book.escape_rate for book in books) / max(1, len(books))

    def _layers(self, first: int, count: int, mode: WireMode) -> Sequence[codec.Codebook | None]:
        if mode is WireMode.RAW:
            return (None,) * (2 * count)
        return self.codebooks[2 * first : 2 * (first + count)]


async def outcome_of(pending: codec.Pending[T]) -> T:
    """What a call of the codec came to; who waits for a GPU does it on a thread of its own."""
    return pending.result() if pending.done else await asyncio.to_thread(pending.result)
