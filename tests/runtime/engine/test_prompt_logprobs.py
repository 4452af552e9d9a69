"""Log probabilities of prompt tokens: equal to those of a pass for each prefix of the prompt."""

from dataclasses import replace

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import PromptLogprobs, SamplingParams
from runtime.engine import Add, Engine
from runtime.errors import NotFinite
from runtime.layers.vocabulary import Vocabulary
from runtime.models.model import Model
from runtime.parallel.group import RankGroup
from runtime.sampling.reductions import RankReductions, Reductions
from runtime.steps import prompt_logprobs
from tests.runtime.engine.mirrored import Mirrored
from tests.runtime.rank_threads import on_ranks
from tests.runtime.sampling.test_on_ranks import DIVISIONS, VOCAB, Parts
from tests.runtime.tiny import Record, drive, engine_of, executor_of, prompt_of, request_of

TOP = 3
SCORED = SamplingParams(prompt_logprobs=TOP)
PAGES = 16


def expected_of(model: Model, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the log probabilities `[length - 1, vocab]` after each prefix of a prompt."""
    cache = model.new_cache(model.layout.plan.each(PAGES))
    lines = []
    for end in range(1, len(tokens)):
        piece = SequenceSlice(tokens[:end], 0, range(PAGES))
        lines.append(model.forward(Batch.of([piece]), cache)[0].log_softmax(dim=-1))
    return torch.stack(lines)


def found_of(record: Record, name: str) -> list[PromptLogprobs]:
    """Return the log probabilities of a request, which must precede its tokens."""
    found = []
    sampled = False
    for step in record.steps:
        parts = [part for request, part in step.prompt_logprobs if request == name]
        assert not (parts and sampled), "log probabilities after the first token"
        found += parts
        sampled = sampled or any(request == name for request, _ in step.tokens)
    ends = [part.first + len(part.logprobs) for part in found]
    assert [part.first for part in found] == [1, *ends[:-1]]
    return found


def check(record: Record, name: str, tokens: tuple[int, ...], expected: torch.Tensor) -> None:
    found = found_of(record, name)
    logprobs = torch.tensor([value for part in found for value in part.logprobs])
    chosen = expected.gather(1, torch.tensor(tokens[1:])[:, None])
    torch.testing.assert_close(logprobs, chosen[:, 0], rtol=0, atol=1e-4)
    ranks = [rank for part in found for rank in part.ranks]
    assert ranks == (expected >= chosen).sum(dim=1).tolist()
    most = torch.tensor([value for part in found for value in part.top_logprobs]).view(-1, TOP)
    torch.testing.assert_close(most, expected.topk(TOP).values, rtol=0, atol=1e-4)
    ids = torch.tensor([token for part in found for token in part.top_tokens]).view(-1, TOP)
    assert torch.equal(ids, expected.topk(TOP).indices)


@pytest.mark.parametrize("replay", [False, True], ids=["direct", "replay"])
@pytest.mark.parametrize(("chunk", "block"), [(16, 256), (32, 5), (64, 256)])
def test_values_do_not_depend_on_chunks_and_blocks(
    model: Model, monkeypatch: pytest.MonkeyPatch, chunk: int, block: int, replay: bool
) -> None:
    """Other prompts and running sequences are computed in the same steps."""
    monkeypatch.setattr(prompt_logprobs, "_MAX_LOGITS", block * model.config.vocab_size)
    engine = engine_of(model, replay=replay, chunk_tokens=chunk)
    record = Record()
    record.add(engine.step([Add(request_of("running", 5, 30, seed=9))]))
    scored = [
        request_of("a", 71, 4, sampling=SCORED, choices=2),
        request_of("b", 2, 1, sampling=SCORED, seed=1),
        request_of("c", 1, 1, sampling=SCORED, seed=2),
        request_of("d", 33, 1, sampling=replace(SCORED, temperature=1.0), seed=3),
    ]
    plain = request_of("plain", 40, 4, seed=4)
    drive(engine, *map(Add, scored), Add(plain, hold=True), record=record)
    for request in scored:
        if len(request.tokens) > 1:
            check(record, request.id, request.tokens, expected_of(model, request.tokens))
    assert {name for step in record.steps for name, _ in step.prompt_logprobs} == {"a", "b", "d"}
    assert len(record.output("a", 1)) == 4


def test_greedy_output_is_that_of_a_request_without_log_probabilities(model: Model) -> None:
    for replay in (False, True):
        plain, scored = (
            drive(engine_of(model, replay=replay), Add(request_of("r", 70, 12, sampling=sampling)))
            for sampling in (SamplingParams(), SCORED)
        )
        assert plain.output("r") == scored.output("r")


def test_cached_pages_are_computed_again(model: Model) -> None:
    engine = engine_of(model, prefix_root=b"root")
    request = request_of("first", 50, 1)
    drive(engine, Add(request))
    record = drive(engine, Add(replace(request, id="scored", sampling=SCORED)))
    check(record, "scored", request.tokens, expected_of(model, request.tokens))
    assert not any(step.reused for step in record.steps)
    record = drive(engine, Add(replace(request, id="later")))
    assert [step.reused for step in record.steps if step.reused] == [[("later", 48)]]


@pytest.mark.parametrize("replay", [False, True], ids=["direct", "replay"])
def test_preempted_prompt_reports_each_token_once(model: Model, replay: bool) -> None:
    """The pool has space for one of the prompts beside the running sequence, which grows."""
    engine = engine_of(model, pages=9, chunk_tokens=16, step_tokens=17, replay=replay)
    record = Record()
    record.add(engine.step([Add(request_of("running", 30, 60, seed=9))]))
    requests = [request_of(name, 60, 30, sampling=SCORED, seed=at) for at, name in enumerate("ab")]
    drive(engine, *map(Add, requests), record=record)
    started = [name for step in record.steps for name in step.started]
    assert len(started) > len(set(started)), "a sequence was preempted"
    for request in requests:
        check(record, request.id, request.tokens, expected_of(model, request.tokens))


def test_only_the_prompt_of_a_replayed_request_is_scored(model: Model) -> None:
    tokens = prompt_of(40)
    request = replace(
        request_of("r", 40, 20, sampling=SCORED), tokens=(*tokens, 5, 6, 7), prompt_tokens=40
    )
    check(drive(engine_of(model), Add(request)), "r", tokens, expected_of(model, tokens))


def test_prompt_with_logits_that_are_not_finite_is_refused(model: Model) -> None:
    engine: Engine = engine_of(model, chunk_tokens=16)
    lm_head = executor_of(engine).model.lm_head
    broken = replace(model, lm_head=lambda x: lm_head(x) * torch.nan)
    engine = engine_of(broken, chunk_tokens=16)
    record = drive(engine, Add(request_of("r", 50, sampling=SCORED)))
    assert isinstance(record.refused["r"], NotFinite)
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


@pytest.mark.parametrize("replay", [False, True], ids=["direct", "replay"])
def test_other_ranks_score_the_same_positions(model: Model, replay: bool) -> None:
    """The second executor gets copies of the plans; a plan that differs fails the test."""
    limits = Limits(max_running=16, max_waiting=64, step_tokens=64, chunk_tokens=32)
    options = EngineOptions(model.layout.plan.each(PAGES), limits, replay=replay)
    mirrored = Mirrored(model, options)
    request = request_of("r", 71, 4, sampling=SCORED)
    record = drive(Engine(mirrored), Add(request))
    check(record, "r", request.tokens, expected_of(model, request.tokens))
    assert mirrored.second.launches > 2


@pytest.mark.parametrize("parts", DIVISIONS)
def test_ranks_report_the_values_of_one_rank(parts: Parts) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(9, VOCAB, generator=generator) * 3
    logits[3, 700] = logits[3, 5]  # equal logits on different ranks
    tokens = torch.tensor([0, 5, 1498, 700, *range(300, 305)])
    one = Reductions()
    expected = (*one.logprobs(logits, tokens, TOP), one.ranks(logits, tokens))

    def compute(group: RankGroup) -> list[torch.Tensor]:
        vocabulary = Vocabulary(parts, group)
        own = logits[:, vocabulary.own.start : vocabulary.own.stop]
        reductions = RankReductions(vocabulary)
        return [*reductions.logprobs(own, tokens, TOP), reductions.ranks(own, tokens)]

    for found in on_ranks(len(parts), compute):
        for value, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(value, reference, check_dtype=False, rtol=0, atol=1e-5)
            if not reference.is_floating_point():
                assert torch.equal(value, reference)
