"""A model family whose attention is split by heads, and ranks of a worker in other processes.

Layers are those of Llama. The output projection of a rank gives a part of a sum, which the ranks of
a worker add with an all-reduce of gloo. The first rank of each worker runs in the test's process,
and every second rank in a process of its own.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, distributed

from runtime.checkpoint import Checkpoint, Dense, LayerWeights
from runtime.core.limits import Limits
from runtime.core.plan import StepPlan
from runtime.core.sequence import SequenceState
from runtime.engine import Executor, ExecutorShape, LocalExecutor
from runtime.models.build import build_model
from runtime.models.family import LayerBuilder
from runtime.models.llama import LlamaFamily, LlamaParts
from runtime.models.registry import register
from runtime.pages.plan import PageCount
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress
from tests.runtime.tiny import CONFIG, tiny_checkpoint

RANKS = 2
WHOLE = replace(CONFIG, architecture="SplitForCausalLM")
LIMIT_S = 120


class SplitFamily(LlamaFamily):
    """Llama with attention split by heads.

    Attributes:
        group: ranks of the models that are built from now on; None: they are not split.
    """

    name = "Split"
    architectures = ("SplitForCausalLM",)
    packed_gemm = False
    group: distributed.ProcessGroup | None = None

    def parts(self, build: LayerBuilder) -> LlamaParts:
        part_of_o = build.linear("o")
        group = self.group

        def o(attended: Tensor, hidden: Tensor) -> Tensor:
            partial = part_of_o(attended)
            if group is not None:
                distributed.all_reduce(partial, group=group)
            return hidden + partial

        return replace(super().parts(build), o=o)


_FAMILY = SplitFamily()


def _heads_of(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    """Return the heads of one rank: rows of q, k and v, and columns of o."""

    def rows(linear: Dense) -> Dense:
        return Dense(linear.weight.chunk(RANKS)[rank].contiguous())

    def layer(whole: LayerWeights) -> LayerWeights:
        assert isinstance(whole.o, Dense)
        columns = whole.o.weight.chunk(RANKS, dim=1)[rank].contiguous()
        own: dict[str, Any] = {name: rows(getattr(whole, name)) for name in ("q", "k", "v")}
        return replace(whole, **own, o=Dense(columns))

    kv_heads = checkpoint.config.num_kv_heads // RANKS
    config = replace(
        checkpoint.config,
        num_heads=checkpoint.config.num_heads // RANKS,
        num_kv_heads=kv_heads,
        first_kv_head=rank * kv_heads,
    )
    return replace(checkpoint, config=config, layers=tuple(map(layer, checkpoint.layers)))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a worker."""

    pages: int
    limits: Limits


def whole_executor(sizes: Sizes) -> LocalExecutor:
    """Return the executor of a worker of one rank."""
    register(_FAMILY)
    _FAMILY.group = None
    model = build_model(tiny_checkpoint(config=WHOLE))
    return LocalExecutor(model, pages=PageCount(sizes.pages), limits=sizes.limits)


def _rank_executor(sizes: Sizes, rank: int, group: distributed.ProcessGroup) -> LocalExecutor:
    register(_FAMILY)
    _FAMILY.group = group
    model = build_model(_heads_of(tiny_checkpoint(config=WHOLE), rank))
    return LocalExecutor(model, pages=PageCount(sizes.pages), limits=sizes.limits)


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
    commands: Connection, rendezvous: str, member: int, workers: int, sizes: Sizes, start: Start
) -> None:
    """Run the second rank of a worker: execute calls until the parent sends None."""
    group = _join(rendezvous, member, workers)[member - 1]
    rank = _rank_executor(sizes, 1, group)
    commands.send(rank.shape)
    start(rank)
    steps: list[Any] = []
    while call := commands.recv():
        match call:
            case ("launch", plan):
                steps.append(rank.launch(plan))
            case ("read",):
                commands.send(steps.pop(0).read())
            case ("copy_pages", *arguments):
                rank.copy_pages(*arguments)
            case ("planes",):
                commands.send([plane.float().numpy() for plane in rank.cache.planes])
    distributed.destroy_process_group()


@dataclass(frozen=True)
class RemoteStep:
    commands: Connection
    ready: None = None

    def read(self) -> list[Draw | None]:
        self.commands.send(("read",))
        draws: list[Draw | None] = receive(self.commands)
        return draws


def receive(commands: Connection) -> Any:
    assert commands.poll(LIMIT_S), "the second rank does not answer"
    return commands.recv()


class RemoteExecutor(Executor):
    """The executor of the second rank."""

    lookahead = False
    device = torch.device("cpu")

    def __init__(self, commands: Connection) -> None:
        self.commands = commands
        self.shape: ExecutorShape = receive(commands)

    def planes(self) -> list[Tensor]:
        """Return a copy of all planes, in float32."""
        self.commands.send(("planes",))
        return list(map(torch.from_numpy, receive(self.commands)))

    def check_eviction(self) -> None:
        """The first rank has the same KV format, and checks it."""

    def warm_up(self, progress: Progress) -> None:
        """A CPU has nothing to warm up."""

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        return False

    def launch(self, plan: StepPlan) -> RemoteStep:
        self.commands.send(("launch", plan))
        return RemoteStep(self.commands)

    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.commands.send(("copy_pages", group, sources, targets))

    def record_event(self) -> None:
        return None


Pair = tuple[LocalExecutor, RemoteExecutor]


@contextmanager
def two_rank_workers(rendezvous: str, sizes: Sizes, *starts: Start) -> Iterator[list[Pair]]:
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
        arguments = (theirs, rendezvous, 1 + worker, workers, sizes, start)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        pipes.append(commands)
        processes.append(process)
    groups = _join(rendezvous, 0, workers)
    try:
        first = [_rank_executor(sizes, 0, group) for group in groups]
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
