"""The ranks of a worker in benchmarks: processes with collectives, or one without its peers."""

import io
import math
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing import get_context
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, distributed

from runtime.checkpoint.slices import rank_checkpoint
from runtime.checkpoint.weights import Checkpoint
from runtime.parallel.group import ONE_RANK, DistributedGroup, RankGroup
from runtime.parallel.partition import Partition

T = TypeVar("T")


class SilentGroup(RankGroup):
    """A rank without peers: collectives return their argument, in the shape of their result."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, addend: Tensor) -> Tensor:
        return addend

    def all_gather(self, part: Tensor) -> Tensor:
        return part.repeat(1, self.size)

    def sum_normed(self, addend: Tensor, x: Tensor, size: int, eps: float) -> Tensor:  # noqa: ARG002
        return addend


@dataclass(frozen=True)
class Elements:
    """Elements of collectives, with an all-reduce counted once and twice."""

    once: int = 0
    twice: int = 0

    @classmethod
    def of_sum(cls, count: int) -> Self:
        """Return the elements of an all-reduce."""
        return cls(count, 2 * count)

    @classmethod
    def of_gather(cls, count: int, size: int) -> Self:
        """Return the elements of an all-gather of ``count`` elements of each of ``size`` ranks."""
        return cls(count * size, count * size)

    def __add__(self, other: "Elements") -> "Elements":
        return Elements(self.once + other.once, self.twice + other.twice)

    def __sub__(self, other: "Elements") -> "Elements":
        return Elements(self.once - other.once, self.twice - other.twice)


class CountedGroup(RankGroup):
    """Counts the elements of collectives, and leaves them out on request.

    Attributes:
        counted: elements so far.
        silent: whether collectives are those of `SilentGroup`, for times without communication.
    """

    def __init__(self, group: RankGroup) -> None:
        self._without_peers = SilentGroup(group.rank, group.size)
        self.rank, self.size = group.rank, group.size
        self.counted = Elements()
        self.silent = False
        self.use(group)

    def use(self, group: RankGroup) -> None:
        """Use another implementation of the collectives between the same ranks."""
        self._group, self.memory = group, group.memory

    def all_reduce(self, addend: Tensor) -> Tensor:
        self.counted += Elements.of_sum(addend.numel())
        return self._collectives.all_reduce(addend)

    def all_gather(self, part: Tensor) -> Tensor:
        self.counted += Elements.of_gather(part.numel(), self.size)
        return self._collectives.all_gather(part)

    def add_sum(self, total: Tensor, addend: Tensor) -> Tensor:
        self.counted += Elements.of_sum(addend.numel())
        return self._collectives.add_sum(total, addend)

    def sum_normed(self, addend: Tensor, x: Tensor, size: int, eps: float) -> Tensor:
        self.counted += Elements.of_sum(addend.numel() + len(addend))
        return self._collectives.sum_normed(addend, x, size, eps)

    @property
    def _collectives(self) -> RankGroup:
        return self._without_peers if self.silent else self._group


def rank_part(whole: Checkpoint, partition: Partition) -> Checkpoint:
    """Return a rank's part whose tensors do not keep those of the whole model in memory."""
    part = rank_checkpoint(whole, partition)
    embedding = lm_head = part.embedding.clone()
    if part.lm_head is not part.embedding:
        lm_head = part.lm_head.clone()
    return replace(part, embedding=embedding, lm_head=lm_head)


class Collectives(StrEnum):
    """Implementation of collectives on GPUs: `DistributedGroup` or `PeerGroup`. CPUs use gloo.

    Attributes:
        NCCL: `DistributedGroup`.
        PUSH: `PeerGroup`; a failure if the GPUs cannot access one another.
        FASTEST: those of a worker, see `join_fastest`.
    """

    NCCL = "nccl"
    PUSH = "push"
    FASTEST = "fastest"


def over_ranks(
    size: int,
    device: str,
    work: Callable[[RankGroup], Iterator[T]],
    collectives: Collectives = Collectives.NCCL,
    *,
    direct: bool = True,
    deadline: float = math.inf,
) -> Generator[T, None, None]:
    """Start a process for each rank and yield what the work of the first rank yields.

    The processes end when the generator is closed.

    Args:
        device: ``cuda``, where each rank has a GPU, or ``cpu``.
        work: called on every rank, which sends and takes all its results; can be pickled.
        collectives: implementation on GPUs.
        direct: whether GPUs access one another, through NVLink if they have it. If False,
            ``NCCL_P2P_DISABLE`` is 1, and all data between GPUs goes through host memory; PUSH is
            not possible.
        deadline: value of ``time.monotonic`` at which the processes end, whatever they do.

    Raises:
        RuntimeError: a rank failed.
    """
    context = get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = size, device, work, collectives, direct, f"{folder}/rendezvous", results
        ranks = [
            context.Process(target=_run_rank, args=(rank, *arguments), daemon=True)
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        try:
            running = size
            while running and time.monotonic() < deadline:
                if results.empty():
                    if any(rank.exitcode for rank in ranks):
                        raise RuntimeError("a rank failed")
                    time.sleep(0.05)
                elif (result := results.get()) is not None:
                    yield result
                else:
                    running -= 1
            for rank in ranks if not running else ():
                rank.join()
        finally:
            for rank in ranks:
                rank.kill()  # the peers of a rank that failed wait in a collective
            for rank in ranks:
                rank.join()


def _run_rank(
    rank: int,
    size: int,
    device: str,
    work: Callable[[RankGroup], Iterator[Any]],
    collectives: Collectives,
    direct: bool,
    rendezvous: str,
    results: Any,
) -> None:
    """Run one rank in a process of its own; the first prints and sends its results."""
    torch.set_num_threads(1)
    on_gpu = device == "cuda"
    if not direct:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    if on_gpu:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
    )
    group: RankGroup = ONE_RANK
    if size > 1:
        group = DistributedGroup(distributed.new_group())
        if on_gpu and collectives is not Collectives.NCCL:
            from runtime.parallel import peer_group  # imports Triton

            own = torch.device(rank)
            if collectives is Collectives.PUSH:
                group = peer_group.PeerGroup.join(group.process_group, own)
            else:
                group, _ = peer_group.join_fastest(group.process_group, own)
    output = nullcontext() if rank == 0 else redirect_stdout(io.StringIO())
    with torch.inference_mode(), output:
        for result in work(group):
            if rank == 0:
                results.put(result)
    results.put(None)
    distributed.destroy_process_group()
