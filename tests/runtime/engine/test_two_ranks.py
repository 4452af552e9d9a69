"""A worker of two ranks on the CPU, each with half of the heads and of the KV, in two processes.

The model family is defined in this file: Llama layers whose attention is split by heads. Its output
projection gives a part of a sum, which the ranks add with an all-reduce of gloo.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from runtime.checkpoint import Checkpoint, Dense, LayerWeights
from runtime.checkpoint import family as registry
from runtime.core.limits import Limits
from runtime.core.plan import StepPlan
from runtime.core.request import SamplingParams
from runtime.core.sequence import SequenceState
from runtime.engine import Add, Engine, Executor, ExecutorShape, LocalExecutor, Ranks
from runtime.models.build import build_model
from runtime.models.family import LayerBuilder
from runtime.models.llama import LlamaFamily, LlamaParts
from runtime.models.registry import register
from runtime.pages.plan import PageCount
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress
from tests.runtime.tiny import CONFIG, Record, drive, request_of, tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = 2
WHOLE = replace(CONFIG, architecture="SplitForCausalLM")
LIMITS = Limits(max_running=4, max_waiting=8, step_tokens=64, chunk_tokens=32)
PAGES = 14
"""Number of pages, so few that a sequence is preempted."""
SHARES = (0.0, 0.5)
"""Fractions of the tokens of prompts to evict."""
LIMIT_S = 120


class SplitFamily(LlamaFamily):
    """Llama with attention split by heads over the ranks of the default process group."""

    name = "Split"
    architectures = ("SplitForCausalLM",)
    packed_gemm = False

    def parts(self, build: LayerBuilder) -> LlamaParts:
        part_of_o = build.linear("o")

        def o(attended: Tensor, hidden: Tensor) -> Tensor:
            partial = part_of_o(attended)
            if distributed.is_initialized():
                distributed.all_reduce(partial)
            return hidden + partial

        return replace(super().parts(build), o=o)


def rank_of(checkpoint: Checkpoint, rank: int) -> Checkpoint:
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


def executor(checkpoint: Checkpoint) -> LocalExecutor:
    return LocalExecutor(build_model(checkpoint), pages=PageCount(PAGES), limits=LIMITS)


def join(rendezvous: str, rank: int) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS
    )


def serve(commands: Connection, rendezvous: str) -> None:
    """Run the second rank: execute calls until the parent closes the connection."""
    register(SplitFamily())
    join(rendezvous, 1)
    rank = executor(rank_of(tiny_checkpoint(config=WHOLE), 1))
    commands.send(rank.shape)
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
    """The executor of the second rank, to which it sends the calls."""

    lookahead = False
    device = torch.device("cpu")

    def __init__(self, commands: Connection) -> None:
        self.commands = commands
        self.shape: ExecutorShape = receive(commands)

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


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    register(SplitFamily())


@dataclass(frozen=True)
class Result:
    """Output without and with eviction, and the executor that computed it."""

    executor: LocalExecutor
    records: list[Record]


@pytest.fixture
def expected(registered: None) -> Result:
    """The output of one rank. It compiles the loops before processes wait for each other."""
    one = executor(tiny_checkpoint(config=WHOLE))
    return Result(one, [run(one, share) for share in SHARES])


@pytest.fixture
def ranks(
    expected: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Executor]]:
    """Two executors: the first in this process, the second in another one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    commands, theirs = context.Pipe()
    rendezvous = str(tmp_path / "rendezvous")
    process = context.Process(target=serve, args=(theirs, rendezvous), daemon=True)
    process.start()
    join(rendezvous, 0)
    try:
        own = executor(rank_of(tiny_checkpoint(config=WHOLE), 0))
        yield [own, RemoteExecutor(commands)]
    finally:
        commands.send(None)
        distributed.destroy_process_group()
        process.join(LIMIT_S)
        assert process.exitcode == 0


def run(executor: Executor, kv_eviction: float) -> Record:
    """Prefill in chunks, decode in a batch with several choices, evict, and preempt a sequence."""
    engine = Engine(executor, kv_eviction=kv_eviction)
    sampled = SamplingParams(temperature=0.9, seed=3)
    record = drive(
        engine,
        Add(request_of("a", 200 if kv_eviction else 70, 40, seed=1)),
        Add(request_of("b", 20, 40, sampling=sampled, choices=2, seed=2)),
        Add(request_of("c", 37, 20, seed=3)),
    )
    started = [name for step in record.steps for name in step.started]
    assert len(started) > len(set(started)), "a sequence was preempted"
    assert engine.pages_free == engine.pages_total
    return record


def test_two_ranks_give_the_tokens_and_the_kv_of_one(
    expected: Result, ranks: list[Executor]
) -> None:
    for share, record in zip(SHARES, expected.records, strict=True):
        found = run(Ranks(ranks), share)
        assert found.tokens == record.tokens
        assert found.finished == record.finished
        evicted = {chunk.evicted for step in found.steps for chunk in step.computed}
        assert any(evicted) is bool(share)

    own, other = ranks
    assert isinstance(own, LocalExecutor)
    assert isinstance(other, RemoteExecutor)
    other.commands.send(("planes",))
    theirs = map(torch.from_numpy, receive(other.commands))
    one = expected.executor.cache.planes
    for mine, rest, whole in zip(own.cache.planes, theirs, one, strict=True):
        heads = torch.cat([mine.float(), rest], dim=1)  # [page, kv_head, slot, dim]
        # Ranks add the output of their heads in another order; KV is rounded to bf16.
        torch.testing.assert_close(heads, whole.float(), rtol=0.02, atol=0.02)
