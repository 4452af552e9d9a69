"""Tensors on GPUs that the kernels of all ranks can write."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, distributed

from runtime.errors import PeerAccessError


@dataclass(frozen=True)
class PeerTensor:
    """A tensor of each rank, with the same shape.

    Attributes:
        own: the tensor of this rank.
        addresses: int64 `[ranks]`, the address of each rank's tensor on this rank's device.
    """

    own: Tensor
    addresses: Tensor


class PeerMemory:
    """Memory of GPUs that can access one another.

    Attributes:
        device: GPU of this rank.
        rank: number of this rank.
        size: number of ranks.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.device = device
        self.rank = group.rank()
        self.size = group.size()

    @classmethod
    def join(cls, group: distributed.ProcessGroup, device: torch.device) -> Self:
        """Return the memory of this rank. All ranks must call it, and must see the same GPUs.

        Raises:
            PeerAccessError: see `check`, for example because ``NCCL_P2P_DISABLE`` is 1.
        """
        memory = cls(group, device)
        indices: list[int] = [0] * memory.size
        distributed.all_gather_object(indices, device.index, group=group)
        memory.check(_no_access(device.index, indices))
        return memory

    def zeros(self, *shape: int, dtype: torch.dtype) -> PeerTensor:
        """Allocate a tensor of zeros on this rank, and map those of the others.

        All ranks must call it, in the same order, and not while a CUDA graph is captured.

        Raises:
            PeerAccessError: see `check`.
        """
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # not used
        import torch.distributed._symmetric_memory as symmetric

        problem = None
        try:
            own = symmetric.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            problem = str(error)
        self.check(problem)
        try:
            mapped = symmetric.rendezvous(own, self._group.group_name)
        except RuntimeError as error:  # on all ranks, since it ends with a barrier
            raise PeerAccessError(f"rank {self.rank}: {error}") from error
        own.zero_()
        torch.cuda.synchronize(self.device)
        distributed.barrier(group=self._group)  # no rank may write before all are zeroed
        addresses = torch.tensor(mapped.buffer_ptrs, dtype=torch.int64, device=self.device)
        return PeerTensor(own, addresses)

    def check(self, problem: str | None) -> None:
        """Raise an error on all ranks if one of them has a problem. All ranks must call it.

        Args:
            problem: why this rank cannot use the memory of the others, or None.

        Raises:
            PeerAccessError: a rank has a problem.
        """
        problems: list[str | None] = [None] * self.size
        distributed.all_gather_object(problems, problem, group=self._group)
        found = [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None]
        if found:
            raise PeerAccessError("; ".join(found))


def _no_access(own: int, indices: Sequence[int]) -> str | None:
    """Return why the kernels of GPU ``own`` may not access all of ``indices``, or None."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE is 1"
    for index in indices:
        if index != own and not torch.cuda.can_device_access_peer(own, index):
            return f"GPU {own} cannot access GPU {index}"
    return None
