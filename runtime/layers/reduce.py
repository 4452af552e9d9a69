"""Sums over the ranks of a worker, for linear layers whose input is split over the ranks."""

from typing import Protocol

from torch import Tensor


class Reduce(Protocol):
    """Adds tensors ``[n, d]`` of all ranks and returns the sum on each rank.

    All ranks call it in the same order, with tensors of the same shape. Work on a GPU is launched
    on the current stream, so that a CUDA graph can capture it.
    """

    def __call__(self, addend: Tensor) -> Tensor:
        """Return the sum. ``addend`` may be overwritten."""
        ...


def one_rank(addend: Tensor) -> Tensor:
    """Return ``addend``: the `Reduce` of a worker of one rank."""
    return addend
