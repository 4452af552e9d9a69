"""A rank's part of the residual stream, if the ranks of a worker divide the hidden dimension."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor
from torch.nn import functional

from runtime.parallel.group import RankGroup
from runtime.parallel.partition import EvenRows, Partition


@dataclass(frozen=True)
class ResidualPart:
    """Division of the residual stream among the ranks of a worker (`Scheme.EVEN`).

    A rank has ``EvenRows.height`` elements of each token. Those after its `EvenRows.rows` are
    padding zeros.

    Attributes:
        rows: the elements that the rank has.
        size: number of elements of the whole residual stream.
        group: the ranks of the worker.
    """

    rows: EvenRows
    size: int
    group: RankGroup

    @classmethod
    def of(cls, partition: Partition | None, size: int, group: RankGroup) -> Self | None:
        """Return the part of a rank; None if each rank has the whole residual stream."""
        rows = None if partition is None else partition.residual_rows(size)
        return None if rows is None else cls(rows, size, group)

    def own(self, whole: Tensor) -> Tensor:
        """Return the rank's elements, ``[..., height]``, of ``[..., size]``."""
        own = self.rows.rows
        return self.padded(whole[..., own.start : own.stop]).contiguous()

    def padded(self, own: Tensor) -> Tensor:
        """Append zeros to the rank's elements, ``[..., len(rows)]``: ``[..., height]``."""
        return functional.pad(own, (0, self.rows.height - own.shape[-1]))

    def whole(self, part: Tensor) -> Tensor:
        """Gather the residual stream, ``[n, size]``. All ranks must call it.

        Args:
            part: ``[n, height]``, contiguous.
        """
        return self.group.all_gather(part)[:, : self.size].contiguous()
