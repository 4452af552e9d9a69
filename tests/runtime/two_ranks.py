"""Workers of two ranks on the CPU, each with half of the heads and of the KV.

The ranks exchange activations with gloo. The first rank of each worker runs in the test's process,
and every second rank in a process of its own.
"""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, distributed

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.slices import rank_checkpoint
from runtime.core.options import EngineOptions
from runtime.core.plan import StepPlan
from runtime.core.sequence import SequenceState
from runtime.engine import Executor, ExecutorShape, LocalExecutor
from runtime.models.build import build_model
from runtime.parallel.group import DistributedGroup
from runtime.parallel.partition import Partition
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress
from tests.runtime.tiny import tiny_checkpoint

RANKS = 2
LIMIT_S = 120


def whole() -> Checkpoint:
    """Return a model with dense linears and factor pairs."""
    return tiny_checkpoint(bias=True, ranks=(None, 12, None, 20, 16, None, None))


def whole_executor(options: EngineOptions) -> LocalExecutor:
    """Return the executor of a worker of one rank."""
    return LocalExecutor(build_model(whole()), options)


def _rank_executor(
    options: EngineOptions, rank: int, group: distributed.ProcessGroup
) -> LocalExecutor:
    checkpoint = whole()
    part = rank_checkpoint(checkpoint, Partition.of(checkpoint.config, rank, RANKS))
    model = build_model(part, group=DistributedGroup(group))
    return LocalExecutor(model, options)


def _join(rendezvous: str, member: int, workers: int) -> list[distributed.ProcessGroup]:
    """Join the processes of all workers; return the group of each worker.

    Args:
        member: 0 for the test's process, else the number of the worker, from 1.
    """
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=member, world_size=1 + workers
    )
    return [distributed.new_group([0, 1 + worker]) for worker in range(workers)]


Start = Callable[[LocalExecutor], None]


def _serve(
    commands: Connection,
    rendezvous: str,
    member: int,
    workers: int,
    options: EngineOptions,
    start: Start,
) -> None:
    """Run the second rank of a worker: execute calls until the parent sends None."""
    group = _join(rendezvous, member, workers)[member - 1]
    rank = _rank_executor(options, 1, group)
    commands.send(rank.shape)
    start(rank)
    steps: list[Any] = []
    while call := commands.recv():
        match call:
            case ("launch", plan):
                steps.append(rank.launch(plan))
            case ("read",):
                commands.send(steps.pop(0).read())
            case ("record_event",):
                rank.record_event()
            case ("copy_pages", *arguments):
                rank.copy_pages(*arguments)
            case ("planes",):
                commands.send([plane.float().numpy() for plane in rank.cache.planes])
    distributed.destroy_process_group()


@dataclass(frozen=True)
class RemoteStep:
    commands: Connection
    ready: int

    def read(self) -> list[Draw | None]:
        self.commands.send(("read",))
        draws: list[Draw | None] = receive(self.commands)
        return draws


def receive(commands: Connection) -> Any:
    assert commands.poll(LIMIT_S), "the second rank does not answer"
    return commands.recv()


class RemoteExecutor(Executor):
    """The executor of the second rank."""

    device = torch.device("cpu")

    def __init__(self, commands: Connection) -> None:
        self.commands = commands
        self._events = itertools.count()
        self.shape: ExecutorShape = receive(commands)

    def planes(self) -> list[Tensor]:
        """Return a copy of all planes, in float32."""
        self.commands.send(("planes",))
        return list(map(torch.from_numpy, receive(self.commands)))

    def warm_up(self, progress: Progress) -> None:
        """A CPU has nothing to warm up."""

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        return False

    def launch(self, plan: StepPlan) -> RemoteStep:
        self.commands.send(("launch", plan))
        return RemoteStep(self.commands, next(self._events))

    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.commands.send(("copy_pages", group, sources, targets))

    def record_event(self) -> int:
        self.commands.send(("record_event",))
        return next(self._events)


Pair = tuple[LocalExecutor, RemoteExecutor]


@contextmanager
def two_rank_workers(
    rendezvous: str, options: EngineOptions, *starts: Start
) -> Iterator[list[Pair]]:
    """Start the second rank of one worker for each of ``starts``; yield the ranks of all workers.

    Set GLOO_SOCKET_IFNAME before.

    Args:
        rendezvous: a file that does not exist.
        starts: called in the process of a second rank, with its executor.
    """
    context = multiprocessing.get_context("spawn")
    workers, pipes, processes = len(starts), [], []
    for worker, start in enumerate(starts):
        commands, theirs = context.Pipe()
        arguments = (theirs, rendezvous, 1 + worker, workers, options, start)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        pipes.append(commands)
        processes.append(process)
    groups = _join(rendezvous, 0, workers)
    try:
        first = [_rank_executor(options, 0, group) for group in groups]
        yield list(zip(first, map(RemoteExecutor, pipes), strict=True))
    finally:
        for commands in pipes:
            commands.send(None)
        distributed.destroy_process_group()
        for process in processes:
            process.join(LIMIT_S)
            assert process.exitcode == 0


def nothing(executor: LocalExecutor) -> None:
    """The second rank needs its executor only."""
