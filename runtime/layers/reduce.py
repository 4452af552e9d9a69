"""Sums over the ranks of a worker, for linear layers whose input is split over the ranks."""

from collections.abc import Callable

from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Function that adds tensors ``[n, d]`` of all ranks and returns the sum on each rank.

It may overwrite its argument. All ranks call it in the same order, with tensors of the same shape.
Work on a GPU is launched on the current stream, so that a CUDA graph can capture it.
"""


def one_rank(addend: Tensor) -> Tensor:
    """Return ``addend``: the `Reduce` of a worker of one rank."""
    return addend
