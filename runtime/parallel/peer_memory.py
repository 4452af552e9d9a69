"""Tensors on GPUs that the kernels of all ranks can write."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


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

    def zeros(self, *shape: int, dtype: torch.dtype) -> PeerTensor:
        """Allocate a tensor of zeros on this rank, and map those of the others.

        All ranks must call it, in the same order, and not while a CUDA graph is captured.

        Raises:
            RuntimeError: the GPUs cannot access one another.
        """
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(shape, dtype=dtype, device=self.device)
        mapped = symmetric.rendezvous(own, self._group.group_name)
        own.zero_()
        torch.cuda.synchronize(self.device)
        distributed.barrier(group=self._group)  # no rank may write before all are zeroed
        addresses = torch.tensor(mapped.buffer_ptrs, dtype=torch.int64, device=self.device)
        return PeerTensor(own, addresses)


def can_access_one_another(group: distributed.ProcessGroup, device: torch.device) -> bool:
    """Return whether the kernels of every rank may access the GPUs of all. All ranks must call it.

    They may not if ``NCCL_P2P_DISABLE`` is 1. All ranks must see the same GPUs.
    """
    own = torch.tensor([device.index], device=device)
    found = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(found, own, group=group)
    peers = {int(index) for index in found} - {device.index}
    accessible = all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)
    allowed = accessible and os.environ.get("NCCL_P2P_DISABLE") != "1"
    can_access = torch.tensor([allowed], dtype=torch.int32, device=device)
    distributed.all_reduce(can_access, distributed.ReduceOp.MIN, group=group)
    return bool(can_access)
