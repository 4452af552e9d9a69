"""The ranks of a worker in benchmarks: processes with collectives, or one without its peers."""

import io
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from enum import StrEnum
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from runtime.parallel.group import ONE_RANK, DistributedGroup, RankGroup
from runtime.parallel.peer_group import PeerGroup

T = TypeVar("T")


class SilentGroup(RankGroup):
    """A rank without peers: collectives return their argument, in the shape of their result."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, addend: Tensor) -> Tensor:
        return addend

    def all_gather(self, part: Tensor) -> Tensor:
        return part.repeat(1, self.size)


class Collectives(StrEnum):
    """Implementation of collectives: `DistributedGroup` (NCCL) or `PeerGroup` (PUSH)."""

    NCCL = "nccl"
    PUSH = "push"


def over_ranks(
    size: int,
    device: str,
    work: Callable[[RankGroup], Iterator[T]],
    collectives: Collectives = Collectives.NCCL,
) -> Iterator[T]:
    """Start a process for each rank and yield what the work of the first rank yields.

    Args:
        device: ``cuda``, where each rank has a GPU, or ``cpu``.
        work: called on every rank, which sends and takes all its results; can be pickled.
        collectives: implementation on GPUs; CPUs use gloo.

    Raises:
        RuntimeError: a rank failed.
    """
    context = get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = size, device, work, collectives, f"{folder}/rendezvous", results
        ranks = [
            context.Process(target=_run_rank, args=(rank, *arguments), daemon=True)
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        try:
            running = size
            while running:
                if results.empty():
                    if any(rank.exitcode for rank in ranks):
                        raise RuntimeError("a rank failed")
                    time.sleep(0.05)
                elif (result := results.get()) is not None:
                    yield result
                else:
                    running -= 1
            for rank in ranks:
                rank.join()
        finally:
            for rank in ranks:
                rank.kill()  # the peers of a rank that failed wait in a collective


def _run_rank(
    rank: int,
    size: int,
    device: str,
    work: Callable[[RankGroup], Iterator[Any]],
    collectives: Collectives,
    rendezvous: str,
    results: Any,
) -> None:
    """Run one rank in a process of its own; the first prints and sends its results."""
    torch.set_num_threads(1)
    on_gpu = device == "cuda"
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
        made = distributed.new_group()
        push = on_gpu and collectives is Collectives.PUSH
        group = PeerGroup.join(made, torch.device(rank)) if push else DistributedGroup(made)
    output = nullcontext() if rank == 0 else redirect_stdout(io.StringIO())
    with torch.inference_mode(), output:
        for result in work(group):
            if rank == 0:
                results.put(result)
    results.put(None)
    distributed.destroy_process_group()
