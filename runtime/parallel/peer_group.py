"""Collectives through memory that all ranks can write, for the small tensors of decode steps."""

from typing import Self

import torch
import triton
from torch import Tensor, distributed

from runtime.errors import PeerAccessError
from runtime.kernels.overlap import overlapped
from runtime.parallel.group import DistributedGroup
from runtime.parallel.peer_memory import PeerMemory, PeerTensor
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
    def join(cls, group: distributed.ProcessGroup, device: torch.device) -> Self:
        """Return a group of all ranks, with all kernels compiled. All ranks must call it.

        A driver may say that GPUs can access one another although stores do not arrive, for example
        with some settings of an IOMMU. Collectives would then wait forever, so this is tried first.

        Raises:
            PeerAccessError: the GPUs cannot access one another. It is raised on all ranks.
        """
        memory = PeerMemory.join(group, device)
        _try_stores(memory, group)
        made = cls(group, memory.zeros(2, _HALF, dtype=torch.int64), memory)
        made._warm_up()
        return made

    def _warm_up(self) -> None:
        """Call collectives of all sizes for which the kernels differ."""
        device = self._messages.own.device
        limit = self._half // self.size
        sizes = [1 << bits for bits in range(4, limit.bit_length())]
        # The maximum number of words, and that with which two-step sums have room for squares.
        for words in (*sizes, limit // 16 * 16, limit // 32 * 16 - 16):
            whole = torch.zeros(1, 2 * words * self.size, dtype=torch.bfloat16, device=device)
            part = whole[:, : 2 * words]
            self.all_gather(part)
            for addend in (part, whole):
                self.add_sum(addend, self.all_reduce(addend).clone())
                self.sum_normed(addend.clone(), addend, 1, 1.0)

    def all_reduce(self, addend: Tensor) -> Tensor:
        if not self._can_sum(addend):
            return super().all_reduce(addend)
        return self._sum(addend, addend)

    def add_sum(self, total: Tensor, addend: Tensor) -> Tensor:
        if not (self._can_sum(addend) and total.is_contiguous()):
            return super().add_sum(total, addend)
        return self._sum(addend, total, adds=True)

    def sum_normed(self, addend: Tensor, x: Tensor, size: int, eps: float) -> Tensor:
        sums = self._can_sum(addend) and x.dtype is torch.bfloat16 and addend.shape[1] % 2 == 0
        if not (sums and self._can_send_squares(addend)):
            return super().sum_normed(addend, x, size, eps)
        return self._sum(addend, addend, x, size, eps)

    def all_gather(self, part: Tensor) -> Tensor:
        if not self._can_gather(part):
            return super().all_gather(part)
        out = part.new_empty(len(part), self.size * part.shape[1])
        if out.numel():
            words = part.nbytes // 4
            self._launch(gather_kernel, words, part, out, words, words // len(part))
        return out

    def _can_sum(self, addend: Tensor) -> bool:
        numbers, size = addend.numel(), self.size
        if addend.dtype is not torch.bfloat16 or numbers % 2:
            return False
        if self._in_one_step(addend):
            return True
        return numbers % (2 * size) == 0 and numbers <= self._half // size * size

    def _can_gather(self, part: Tensor) -> bool:
        row_bytes = part.shape[1] * part.element_size()
        return row_bytes % 4 == 0 and part.nbytes // 4 <= self._half // self.size

    def _in_one_step(self, addend: Tensor) -> bool:
        return addend.numel() // 2 <= min(ONE_STEP_WORDS, self._half) // self.size

    def _can_send_squares(self, addend: Tensor) -> bool:
        """Return whether a rank's slot has room for the sums of squares of ``addend``'s rows."""
        count, slot = addend.numel() // 2, self._half // self.size
        if self._in_one_step(addend):
            return count + len(addend) <= slot
        return count // self.size + len(addend) <= slot // 2

    def _sum(
        self,
        addend: Tensor,
        out: Tensor,
        x: Tensor | None = None,
        elements: int = 0,
        eps: float = 0.0,
        *,
        adds: bool = False,
    ) -> Tensor:
        """Sum ``addend`` into ``out``; with an ``x``, as `sum_normed` does."""
        count = addend.numel() // 2
        if count:
            one_step = self._in_one_step(addend)
            kernel, messages = (
                (sum_kernel, count) if one_step else (two_step_sum_kernel, count // self.size)
            )
            rows = (addend, 0, 0, 0) if x is None else (x, *x.shape, addend.shape[1] // 2)
            self._launch(
                kernel, messages, addend, out, count, *rows, elements, eps, ADDS=adds,
                NORMS=x is not None,
            )  # fmt: skip
        return out

    def _launch(
        self,
        kernel: triton.JITFunction,
        messages: int,
        source: Tensor,
        out: Tensor,
        *arguments: object,
        **options: bool,
    ) -> None:
        """Launch a kernel of `push` on 32-bit words of ``source`` and ``out``.

        Args:
            messages: number of messages that a rank sends to each rank in one step.
        """
        least = triton.next_power_of_2(triton.cdiv(messages, MAX_PROGRAMS))
        block = max(_MIN_BLOCK, least)
        threads = min(block, _MAX_THREADS)
        kernel[(triton.cdiv(messages, block),)](
            source.view(-1).view(torch.int32), out.view(-1).view(torch.int32),
            self._messages.addresses, self._state, self.rank, *arguments,
            RANKS=self.size, HALF=self._half, BLOCK=block, COUNT=block // threads,
            num_warps=threads // 32, **options, **overlapped(source.device),
        )  # fmt: skip


def join_fastest(
    group: distributed.ProcessGroup, device: torch.device
) -> tuple[DistributedGroup, str | None]:
    """Return the fastest collectives of a worker's GPUs. All ranks must call it.

    Returns:
        `PeerGroup`; or NCCL alone, and the reason.
    """
    try:
        return PeerGroup.join(group, device), None
    except PeerAccessError as error:
        return DistributedGroup(group), str(error)


def _try_stores(memory: PeerMemory, group: distributed.ProcessGroup) -> None:
    """Store a number in the memory of every rank. All ranks must call it.

    Raises:
        PeerAccessError: a number has not arrived.
    """
    probe = memory.zeros(memory.size, dtype=torch.int64)
    probe_kernel[(1,)](probe.addresses, memory.rank, RANKS=memory.size)
    torch.cuda.synchronize(memory.device)
    distributed.barrier(group=group)
    arrived = probe.own.tolist() == [*range(1, memory.size + 1)]
    memory.check(None if arrived else "stores of other GPUs do not arrive")
