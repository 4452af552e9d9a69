"""Collectives between the ranks of a worker."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, distributed

from runtime.kernels.alignment import round_up
from runtime.parallel.peer_memory import PeerMemory

# torch 2.13 renamed the function; 2.11 has the old name only.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class RankGroup(ABC):
    """The ranks of a worker, seen from one of them.

    All ranks call the same methods in the same order, with tensors of the same shape and dtype. All
    of them get bitwise identical results. Work on a GPU is launched on the current stream, so that
    a CUDA graph can capture it.

    Attributes:
        rank: number of this rank, from 0.
        size: number of ranks.
        memory: memory that the kernels of all ranks can write; None if the group has none.
    """

    rank: int
    size: int
    memory: PeerMemory | None = None

    @abstractmethod
    def all_reduce(self, addend: Tensor) -> Tensor:
        """Return the sum of the ranks' contiguous tensors. It may overwrite its argument."""

    @abstractmethod
    def all_gather(self, part: Tensor) -> Tensor:
        """Return the tensors `[n, w]` of all ranks side by side, `[n, size * w]`.

        Args:
            part: a contiguous tensor.
        """

    def add_sum(self, total: Tensor, addend: Tensor) -> Tensor:
        """Add the sum of the ranks' contiguous tensors to ``total`` in place, and return it.

        It may overwrite ``addend``, which has the shape and dtype of ``total``.
        """
        return total.add_(self.all_reduce(addend))

    def sum_normed(self, addend: Tensor, x: Tensor, size: int, eps: float) -> Tensor:
        """Return the sum of the ranks' ``addend``, divided by the rms of their ``x``.

        This is the linear map of a normed input, whose elements the ranks divide, if each rank
        passes its part of the input and the output of the linear map for this part. The sums of
        squares are part of the message.

        Args:
            addend: `[n, w]`, contiguous.
            x: `[n, h]`, contiguous, this rank's elements of the input.
            size: number of elements of the input of all ranks.
            eps: added to the mean square.
        """
        width, dtype = addend.shape[1], addend.dtype
        squares = x.float().square().sum(1)
        # Two numbers of the dtype, at the places of this rank, keep the sum accurate in bf16.
        high = squares.to(dtype)
        message = addend.new_zeros(len(addend), round_up(width + 2 * self.size))
        message[:, :width] = addend
        message[:, width + 2 * self.rank] = high
        message[:, width + 2 * self.rank + 1] = (squares - high.float()).to(dtype)
        total = self.all_reduce(message)
        square = total[:, width : width + 2 * self.size].float().sum(1, keepdim=True)
        return (total[:, :width].float() * torch.rsqrt(square / size + eps)).to(dtype)


class OneRank(RankGroup):
    """The group of a worker of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, addend: Tensor) -> Tensor:
        return addend

    def all_gather(self, part: Tensor) -> Tensor:
        return part


ONE_RANK = OneRank()


class DistributedGroup(RankGroup):
    """Collectives of `torch.distributed`: NCCL for GPUs, gloo for CPUs.

    Attributes:
        process_group: the group of all ranks of the worker.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.process_group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, addend: Tensor) -> Tensor:
        distributed.all_reduce(addend, group=self.process_group)
        return addend

    def all_gather(self, part: Tensor) -> Tensor:
        rows, width = part.shape
        parts = part.new_empty(self.size * rows, width)
        _all_gather(parts, part, group=self.process_group)
        return side_by_side(parts.view(self.size, rows, width))

    def sum_normed(self, addend: Tensor, x: Tensor, size: int, eps: float) -> Tensor:
        if not (addend.is_cuda and addend.dtype is x.dtype is torch.bfloat16):
            return super().sum_normed(addend, x, size, eps)
        from runtime.parallel.normed_ops import pack, scaled  # optional: Triton

        message = self.all_reduce(pack(addend, x, self.rank, self.size))
        return scaled(message, addend.shape[1], self.size, size, eps)


def side_by_side(parts: Tensor) -> Tensor:
    """Return `[n, ranks * w]` for the tensors of all ranks, `[ranks, n, w]`."""
    ranks, rows, width = parts.shape
    if rows == 1:
        return parts.view(1, ranks * width)
    return torch.cat(parts.unbind(), dim=1)
