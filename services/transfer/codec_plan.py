"""Which codebooks a worker encodes and decodes with."""

from collections.abc import Sequence
from dataclasses import dataclass

import codec
from services.transfer.policy import WireMode


@dataclass(frozen=True)
class CodecPlan:
    """The codebooks of this worker's planes; a plane without one is always sent raw."""

    codebooks: tuple[codec.Codebook | None, ...]

    def layers(
        self, first: int, count: int, mode: WireMode = WireMode.SPLITZIP
    ) -> Sequence[codec.Codebook | None]:
        """What `codec.encode_pages` and `codec.decode_pages` want for these layers."""
        if mode is WireMode.RAW:
            return (None,) * (2 * count)
        return self.codebooks[2 * first : 2 * (first + count)]

    def escape_rate(self, first: int, count: int) -> float:
        """The share of these layers' elements that the calibration found no code for."""
        books = [book for book in self.layers(first, count) if book is not None]
        return sum(book.escape_rate for book in books) / max(1, len(books))
