"""Tensors on GPUs that the kernels of all ranks can write."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class PeerTensor:
    """A tensor of each rank, with the same shape.

    Attributes:
        own: that of this rank.
        addresses: int64 `[ranks]`, the address of each rank's tensor on this rank's device.
    """

    own: Tensor
    addresses: Tensor

    @classmethod
    def zeros(
        cls,
        group: distributed.ProcessGroup,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Allocate a tensor of zeros on this rank, and map those of the others.

        All ranks must call it, in the same order, and not while a CUDA graph is captured.

        Raises:
            RuntimeError: the GPUs cannot access one another.
        """
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(shape, dtype=dtype, device=device)
        mapped = symmetric.rendezvous(own, group.group_name)
        own.zero_()
        torch.cuda.synchronize(device)
        distributed.barrier(group=group)  # no rank may write before
        return cls(own, torch.tensor(mapped.buffer_ptrs, dtype=torch.int64, device=device))
