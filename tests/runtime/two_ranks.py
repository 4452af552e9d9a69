"""Workers of two ranks on the CPU, each with half of the heads and of the KV.

The ranks exchange activations with gloo. The first rank of each worker runs in the test's process,
and every second rank in a process of its own.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import Tensor, distributed

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.slices import rank_checkpoint
from runtime.core.options import EngineOptions
from runtime.engine import LocalExecutor, Ranks, StepChannel, StepReader, follow
from runtime.models.build import build_model
from runtime.parallel.group import DistributedGroup
from runtime.parallel.partition import Partition
from tests.runtime.tiny import CONFIG, tiny_checkpoint

RANKS = 2
LIMIT_S = 120


def whole(vocab: int) -> Checkpoint:
    """Return a model with dense linears and factor pairs, and ``vocab`` tokens."""
    config = replace(CONFIG, vocab_size=vocab)
    return tiny_checkpoint(bias=True, ranks=(None, 12, None, 20, 16, None, None), config=config)


def whole_executor(options: EngineOptions, vocab: int = CONFIG.vocab_size) -> LocalExecutor:
    """Return the executor of a worker of one rank."""
    return LocalExecutor(build_model(whole(vocab)), options)


def _rank_executor(
    options: EngineOptions, vocab: int, rank: int, group: distributed.ProcessGroup
) -> LocalExecutor:
    checkpoint = whole(vocab)
    part = rank_checkpoint(checkpoint, Partition.of(checkpoint.config, rank, RANKS))
    model = build_model(part, group=DistributedGroup(group))
    return LocalExecutor(model, options)


def _join(rendezvous: str, member: int, workers: int) -> list[distributed.ProcessGroup]:
    """Join the processes of all workers; return the group of each worker.

    Args:
        member: 0 for the test's process, else the number of the worker, from 1.
    """
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=member,
        world_size=1 + workers,
        timeout=timedelta(seconds=LIMIT_S),
    )
    return [distributed.new_group([0, 1 + worker]) for worker in range(workers)]


Start = Callable[[LocalExecutor], None]


def _serve(
    queries: Connection,
    steps: StepReader,
    rendezvous: str,
    member: int,
    workers: int,
    options: EngineOptions,
    vocab: int,
    start: Start,
) -> None:
    """Run the second rank of a worker until the first rank closes the channel."""
    group = _join(rendezvous, member, workers)[member - 1]
    rank = _rank_executor(options, vocab, 1, group)
    start(rank)
    threading.Thread(target=_send_planes, args=(queries, rank), daemon=True).start()
    follow(rank, steps)
    distributed.destroy_process_group()


def _send_planes(queries: Connection, rank: LocalExecutor) -> None:
    """Answer each query with a copy of all planes."""
    while True:
        queries.recv()
        queries.send([plane.float().numpy() for plane in rank.cache.planes])


@dataclass(frozen=True)
class TwoRanks:
    """The ranks of a worker.

    Attributes:
        first: executor of the first rank.
        executor: executes steps on both ranks.
        channel: sends steps to the second rank.
    """

    first: LocalExecutor
    executor: Ranks
    channel: StepChannel
    queries: Connection

    @classmethod
    def of(cls, first: LocalExecutor, channel: StepChannel, queries: Connection) -> "TwoRanks":
        return cls(first, Ranks(first, channel), channel, queries)

    def planes(self) -> list[Tensor]:
        """Return a copy of the second rank's planes after all steps, in float32."""
        ends = time.monotonic() + LIMIT_S
        while [rank.executed for rank in self.channel.ranks()] != [self.channel.sent]:
            assert time.monotonic() < ends, "the second rank does not execute all steps"
            time.sleep(0.01)
        self.queries.send("planes")
        assert self.queries.poll(LIMIT_S), "the second rank does not answer"
        return list(map(torch.from_numpy, self.queries.recv()))


@contextmanager
def two_rank_workers(
    rendezvous: str, options: EngineOptions, *starts: Start, vocab: int = CONFIG.vocab_size
) -> Iterator[list[TwoRanks]]:
    """Start the second rank of one worker for each of ``starts``; yield the ranks of all workers.

    Set GLOO_SOCKET_IFNAME before.

    Args:
        rendezvous: a file that does not exist.
        starts: called in the process of a second rank, with its executor.
        vocab: number of tokens of the model.
    """
    context = multiprocessing.get_context("spawn")
    workers, pipes, processes = len(starts), [], []
    channels = [StepChannel(1, timeout_s=LIMIT_S) for _ in starts]
    for worker, (start, channel) in enumerate(zip(starts, channels, strict=True)):
        queries, theirs = context.Pipe()
        [steps] = channel.readers
        arguments = (theirs, steps, rendezvous, 1 + worker, workers, options, vocab, start)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        pipes.append(queries)
        processes.append(process)
    groups = _join(rendezvous, 0, workers)
    try:
        first = [_rank_executor(options, vocab, 0, group) for group in groups]
        yield list(map(TwoRanks.of, first, channels, pipes))
    finally:
        for channel in channels:
            channel.close()
        distributed.destroy_process_group()
        for process in processes:
            process.join(LIMIT_S)
            assert process.exitcode == 0


def nothing(executor: LocalExecutor) -> None:
    """The second rank needs its executor only."""
