"""Linears whose inner dimension the ranks of a worker divide, and whose whole outputs they add.

This is DeInfer's *Base*, which `Scheme.LOW_RANK` is compared with.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import FactorPair, Linear
from runtime.kernels.alignment import round_up
from runtime.layers.linear import LinearOp, SharedOps, linear_op
from runtime.parallel.group import RankGroup
from runtime.parallel.partition import even_part


class SummedProjection:
    """Several linears over one input: ``[n, in]`` to ``[n, sum(out)]``.

    A rank holds columns of dense weights and reads these columns of the input, or some rows of the
    V and columns of the U of a factor pair. Biases are held by one rank.

    Args:
        shared: V of earlier projections. A V that is found there is reused, others are added.
    """

    def __init__(
        self, linears: Sequence[Linear], group: RankGroup, shared: SharedOps | None = None
    ) -> None:
        self._group = group
        self._ops = [_part(linear, {} if shared is None else shared) for linear in linears]

    def __call__(self, x: Tensor) -> Tensor:
        columns = even_part(x.shape[1], self._group.rank, self._group.size)
        own = x[:, columns.start : columns.stop]
        parts = [op(x if reads_all else own) for op, reads_all in self._ops]
        return self._group.all_reduce(torch.cat(parts, dim=1))


def _part(linear: Linear, shared: SharedOps) -> tuple[LinearOp, bool]:
    """Return a rank's part of a linear, and whether it reads the whole input."""
    if not isinstance(linear, FactorPair):
        return linear_op(linear.weight, linear.bias), False
    # GPUs multiply matrices of other sizes several times slower.
    padding = round_up(linear.rank) - linear.rank
    key = (id(linear.v),)
    if key not in shared:
        shared[key] = linear_op(functional.pad(linear.v, (0, 0, 0, padding)))
    down, up = shared[key], linear_op(functional.pad(linear.u, (0, padding)), linear.bias)
    return lambda x: up(down(x)), True
