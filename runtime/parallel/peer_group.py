"""Collectives through memory that all ranks can write, for the small tensors of decode steps."""

import torch
import triton
from torch import Tensor, distributed

from runtime.parallel.group import DistributedGroup
from runtime.parallel.peer_memory import PeerMemory, PeerTensor, can_access_one_another
from runtime.parallel.push import (
    MAX_PROGRAMS,
    gather_kernel,
    probe_kernel,
    sum_kernel,
    two_step_sum_kernel,
)

_HALF = 1 << 20
"""Number of 8-byte messages in each half of a rank's memory."""
_MIN_BLOCK = 256
"""Minimum number of messages that a program sends to each rank."""
_MAX_THREADS = 512
ONE_STEP_WORDS = 1 << 17
"""Maximum number of 32-bit words that a rank sends in one step; larger sums take two steps, see
`two_step_sum_kernel`."""


class PeerGroup(DistributedGroup):
    """Collectives of a single kernel for tensors that fit into peer memory, and NCCL for others.

    Sums have single kernels for bf16 only. They are computed in fp32 in the order of the ranks, and
    rounded to bf16.

    Args:
        messages: int64 `[2, half]` on each rank, initially zeros, where `push` stores messages.
        memory: see `RankGroup`.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        messages: PeerTensor,
        memory: PeerMemory | None = None,
    ) -> None:
        super().__init__(group)
        self.memory = memory
        self._messages = messages
        self._half = messages.own.shape[1]
        self._state = torch.tensor([1, 0], dtype=torch.int32, device=messages.own.device)

    @classmethod
    def join(cls, group: distributed.ProcessGroup, device: torch.device) -> DistributedGroup:
        """Return a group of all ranks, with all kernels compiled. All ranks must call it.

        If the GPUs cannot access one another, all collectives are those of NCCL. A driver may say
        that they can although stores do not arrive, for example with some settings of an IOMMU;
        collectives would then wait forever, so this is tried first.
        """
        if not can_access_one_another(group, device):
            return DistributedGroup(group)
        memory = PeerMemory(group, device)
        if not _stores_arrive(memory, group):
            return DistributedGroup(group)
        made = cls(group, memory.zeros(2, _HALF, dtype=torch.int64), memory)
        made._warm_up()
        return made

    def _warm_up(self) -> None:
        """Call collectives of all sizes for which the kernels differ."""
        device = self._messages.own.device
        limit = self._half // self.size
        sizes = [1 << bits for bits in range(4, limit.bit_length())] + [limit // 16 * 16]
        for words in sizes:
            self.all_gather(torch.zeros(1, words, dtype=torch.int32, device=device))
            for count in (words, words * self.size):
                self.all_reduce(torch.zeros(1, 2 * count, dtype=torch.bfloat16, device=device))

    def all_reduce(self, addend: Tensor) -> Tensor:
        numbers, size = addend.numel(), self.size
        slot = self._half // size
        if addend.dtype is not torch.bfloat16 or numbers % (2 * size) or numbers > size * slot:
            return super().all_reduce(addend)
        if numbers:
            words = addend.view(-1).view(torch.int32)
            one_step = len(words) <= min(ONE_STEP_WORDS // size, slot)
            kernel, messages = (
                (sum_kernel, len(words)) if one_step else (two_step_sum_kernel, len(words) // size)
            )
            self._launch(kernel, messages, words, words, len(words))
        return addend

    def all_gather(self, part: Tensor) -> Tensor:
        rows, width = part.shape
        row_bytes = width * part.element_size()
        if row_bytes % 4 or rows * row_bytes // 4 > self._half // self.size:
            return super().all_gather(part)
        out = part.new_empty(rows, self.size * width)
        if out.numel():
            words = part.view(-1).view(torch.int32)
            found = out.view(-1).view(torch.int32)
            self._launch(gather_kernel, len(words), words, found, len(words), row_bytes // 4)
        return out

    def _launch(
        self, kernel: triton.JITFunction, messages: int, source: Tensor, out: Tensor, *sizes: int
    ) -> None:
        """Launch a kernel of `push`.

        Args:
            messages: number of messages that a rank sends to each rank in one step.
        """
        least = triton.next_power_of_2(triton.cdiv(messages, MAX_PROGRAMS))
        block = max(_MIN_BLOCK, least)
        threads = min(block, _MAX_THREADS)
        kernel[(triton.cdiv(messages, block),)](
            source, out, self._messages.addresses, self._state, self.rank, *sizes,
            RANKS=self.size, HALF=self._half, BLOCK=block, COUNT=block // threads,
            num_warps=threads // 32,
        )  # fmt: skip


def _stores_arrive(memory: PeerMemory, group: distributed.ProcessGroup) -> bool:
    """Return whether every rank can store in the memory of all. All ranks must call it."""
    probe = memory.zeros(memory.size, dtype=torch.int64)
    probe_kernel[(1,)](probe.addresses, memory.rank, RANKS=memory.size)
    torch.cuda.synchronize(memory.device)
    distributed.barrier(group=group)
    expected = torch.arange(1, memory.size + 1, device=memory.device)
    arrived = torch.tensor([torch.equal(probe.own, expected)], device=memory.device).int()
    distributed.all_reduce(arrived, distributed.ReduceOp.MIN, group=group)
    return bool(arrived)
