"""A worker of two ranks on the CPU, each with half of the heads and of the KV, in two processes."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import SamplingParams
from runtime.engine import Add, Engine, Executor, LocalExecutor
from runtime.grammar.spec import GrammarKind
from runtime.pages.plan import PageCount
from tests.runtime.grammar.words import END, decode, grammar
from tests.runtime.tiny import Record, drive, request_of
from tests.runtime.two_ranks import TwoRanks, nothing, two_rank_workers, whole_executor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VOCAB = 1301
"""More tokens than a draw considers on the device."""


@pytest.fixture(params=[False, True], ids=["direct", "replay"])
def options(request: pytest.FixtureRequest) -> EngineOptions:
    """The pages are so few that a sequence is preempted. With replay, steps are launched ahead."""
    return EngineOptions(
        pages=PageCount(14),
        limits=Limits(max_running=4, max_waiting=8, step_tokens=64, chunk_tokens=32),
        kv_eviction=0.5,
        replay=request.param,
    )


@dataclass(frozen=True)
class Result:
    """Output, and the executor that computed it."""

    executor: LocalExecutor
    record: Record


@pytest.fixture
def expected(options: EngineOptions) -> Result:
    """The output of one rank. It compiles the loops before processes wait for each other."""
    one = whole_executor(options, VOCAB)
    return Result(one, run(one))


@pytest.fixture
def ranks(
    options: EngineOptions, expected: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TwoRanks]:
    """Two ranks: the first in this process, the second in another one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous = str(tmp_path / "rendezvous")
    with two_rank_workers(rendezvous, options, nothing, vocab=VOCAB) as (two,):
        yield two


def run(executor: Executor) -> Record:
    """Prefill in chunks, decode in a batch with several choices, evict, and preempt a sequence.

    With replay, the ranks draw tokens of the flat distribution when they read a step.
    """
    engine = Engine(executor)
    sampled = SamplingParams(temperature=0.9, seed=3)
    flat = SamplingParams(temperature=90.0, seed=4)
    record = drive(
        engine,
        Add(request_of("a", 200, 40, seed=1)),
        Add(request_of("b", 20, 40, sampling=sampled, choices=2, seed=2)),
        Add(request_of("c", 37, 20, seed=3)),
        Add(request_of("d", 9, 10, sampling=flat, seed=4)),
    )
    started = [name for step in record.steps for name in step.started]
    assert len(started) > len(set(started)), "a sequence was preempted"
    evicted = {chunk.id: chunk.evicted for step in record.steps for chunk in step.computed}
    assert sorted(name for name, tokens in evicted.items() if tokens) == ["a"]
    assert engine.scheduler.pages.free == engine.scheduler.pages.total
    return record


@pytest.mark.few(1)
def test_two_ranks_give_the_tokens_and_the_kv_of_one(expected: Result, ranks: TwoRanks) -> None:
    found = run(ranks.executor)
    assert found.tokens == expected.record.tokens
    assert found.finished == expected.record.finished

    own = ranks.first.cache.planes
    one = expected.executor.cache.planes
    for mine, rest, all_heads in zip(own, ranks.planes(), one, strict=True):
        heads = torch.cat([mine.float(), rest], dim=1)  # [page, kv_head, slot, dim]
        # Ranks add their outputs in another order; KV is rounded to bf16.
        torch.testing.assert_close(heads, all_heads.float(), rtol=0.02, atol=0.02)


@pytest.mark.few(1)
def test_two_ranks_sample_the_constrained_tokens_of_one(
    options: EngineOptions, ranks: TwoRanks
) -> None:
    """Each rank applies its part of the masks; a request without a grammar runs beside."""
    words = json.dumps({"enum": ["ein Wort", "größer", "😀"]})
    found = {
        "a": grammar(GrammarKind.JSON_SCHEMA, words, VOCAB),
        "b": grammar(GrammarKind.REGEX, "([a-z]{3,9} ){3}", VOCAB),
    }

    def requests() -> list[Add]:
        return [
            Add(
                replace(
                    request_of(name, 20, 30, sampling=sampling, choices=2, stop=[END], seed=seed),
                    grammar=found[name].start() if name in found else None,
                )
            )
            for seed, (name, sampling) in enumerate(
                {
                    "a": SamplingParams(constrained=True),
                    "b": SamplingParams(temperature=0.9, seed=3, constrained=True),
                    "c": SamplingParams(temperature=0.9, seed=4),
                }.items()
            )
        ]

    one = drive(Engine(whole_executor(options, VOCAB)), *requests())
    record = drive(Engine(ranks.executor), *requests())
    assert record.refused == one.refused == {}
    assert record.tokens == one.tokens
    assert decode(record.output("a"), VOCAB) in ('"ein Wort"', '"größer"', '"😀"')
    assert re.fullmatch("([a-z]{3,9} ){3}", decode(record.output("b", 1), VOCAB))
