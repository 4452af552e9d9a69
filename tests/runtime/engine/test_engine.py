"""Engine output equals that of full forward passes, for any batches, chunks and pages."""

from dataclasses import replace

import pytest
import torch

from runtime.checkpoint import Checkpoint
from runtime.core.request import FinishReason, SamplingParams
from runtime.engine import Add, Reserve, StepOutput
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.offline.compress.forward import forward
from tests.runtime.tiny import (
    CONFIG,
    drive,
    engine_of,
    executor_of,
    replayed,
    request_of,
    tiny_checkpoint,
    tiny_model,
)

MIXED_RANKS = (5, None, 17, 9, 11, None, 23)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7)


def greedy(checkpoint: Checkpoint, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return the greedy continuation, computed by full forward passes without a KV cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(forward(checkpoint, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def margin(checkpoint: Checkpoint, tokens: list[int]) -> float:
    """Return the difference of the two largest logits after ``tokens``."""
    best = forward(checkpoint, torch.tensor([tokens]))[0, -1].topk(2).values
    return float(best[0] - best[1])


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"bias": True},
        {"head_norms": True},
        {"ranks": (7,) * 7},
        {"ranks": MIXED_RANKS, "bias": True},
    ],
    ids=["llama", "qwen2", "qwen3", "factorized", "mixed"],
)
def test_greedy_output_equals_full_forward_passes(kinds: dict[str, object]) -> None:
    checkpoint = tiny_checkpoint(**kinds)  # type: ignore[arg-type]
    engine = engine_of(build_model(checkpoint))
    for length in (1, 15, 16, 17, 63):
        request = request_of(f"r{length}", length, 12)
        output = drive(engine, Add(request)).output(request.id)
        expected = greedy(checkpoint, request.tokens, 12)
        if output != expected:  # pages hold bf16: only near ties may differ
            same = next(
                i for i, pair in enumerate(zip(output, expected, strict=True)) if len(set(pair)) > 1
            )
            assert margin(checkpoint, [*request.tokens, *expected[:same]]) < 0.05
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


@pytest.mark.parametrize("kinds", [{}, {"ranks": MIXED_RANKS, "bias": True}, {"head_norms": True}])
def test_output_bits_do_not_depend_on_batch_or_chunks(kinds: dict[str, object]) -> None:
    """Log probabilities are compared exactly, to detect changes of the logits' bits."""
    model = tiny_model(**kinds)
    sampling = SamplingParams(logprobs=3)
    requests = [request_of(f"r{n}", n, 20, sampling=sampling) for n in (1, 2, 15, 33, 100, 150)]
    alone = {r.id: drive(engine_of(model), Add(r)).tokens[r.id, 0] for r in requests}
    shapes = [(64, 32), (16, 16), (512, 256), (48, 16)]
    for step_tokens, chunk_tokens in shapes:
        engine = engine_of(model, step_tokens=step_tokens, chunk_tokens=chunk_tokens)
        together = drive(engine, *(Add(r) for r in requests))
        assert {r.id: together.tokens[r.id, 0] for r in requests} == alone


def test_chunks_are_reported_with_their_pages_as_they_are_computed(model: Model) -> None:
    engine = engine_of(model, step_tokens=64, chunk_tokens=32)
    record = drive(engine, Add(request_of("r", 75), hold=True))
    chunks = [chunk for output in record.steps for chunk in output.computed]
    assert [(c.first_token, c.num_tokens, len(c.page_tables[0])) for c in chunks] == [
        (0, 32, 2),
        (32, 32, 2),
        (64, 11, 1),
    ]
    assert len({page for chunk in chunks for page in chunk.page_tables[0]}) == 5
    assert [(c.completes, c.samples) for c in chunks] == [(False, False)] * 2 + [(True, True)]
    assert record.steps[2].tokens[0][1].index == 0


def test_plan_reports_decisions_before_compute(model: Model) -> None:
    engine = engine_of(model, step_tokens=64, chunk_tokens=32, pages=16)
    held, reserved = request_of("held", 75), request_of("reserved", 20)
    planned = engine.plan([Add(held, hold=True), Reserve(reserved), Reserve(request_of("no", 300))])
    assert planned.started == ["held"]
    assert [reserved.id for reserved in planned.reserved] == ["reserved"]
    assert [name for name, _ in planned.refused] == ["no"]
    assert planned == replace(planned, computed=[], tokens=[], finished=[], ended=[])
    computed = engine.compute()
    assert computed.computed
    assert computed == StepOutput(computed=computed.computed)
    assert engine.compute() == StepOutput(), "a plan is computed only once"
    assert drive(engine).steps[0].started == [], "reported once, with its first chunk"


@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("delivered", [1, 5, 13])
def test_replayed_request_continues_with_the_same_tokens(
    model: Model, sampling: SamplingParams, delivered: int
) -> None:
    request = request_of("r", 21, 20, sampling=replace(sampling, frequency_penalty=0.3))
    whole = drive(engine_of(model), Add(request)).tokens["r", 0]
    again = replayed(request, [token.token for token in whole[:delivered]])
    assert drive(engine_of(model), Add(again)).tokens["r", 0] == whole[delivered:]


@pytest.mark.parametrize("delivered", [1, 3, 4, 5])
def test_replayed_request_suppresses_stop_tokens_up_to_the_same_index(
    model: Model, delivered: int
) -> None:
    stops = frozenset(range(180))  # the model samples them often
    sampling = SamplingParams(temperature=0.9, seed=3, min_tokens=5, suppressed=stops)
    request = request_of("r", 21, 8, sampling=sampling)
    whole = drive(engine_of(model), Add(request)).tokens["r", 0]
    assert [token.token in stops for token in whole][:6] == [False] * 5 + [True]
    again = replayed(request, [token.token for token in whole[:delivered]])
    assert drive(engine_of(model), Add(again)).tokens["r", 0] == whole[delivered:]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_greedy_choices_equal_a_single_choice(model: Model, length: int) -> None:
    """Each choice appends to its own copy of the prompt's last page."""
    alone = drive(engine_of(model), Add(request_of("r", length, 20))).output("r")
    record = drive(engine_of(model), Add(request_of("r", length, 20, choices=3)))
    assert [record.output("r", choice) for choice in range(3)] == [alone] * 3


def test_stop_token_is_emitted_and_ends_the_choice(model: Model) -> None:
    request = request_of("r", 20, 30)
    whole = drive(engine_of(model), Add(request)).output("r")
    stop = whole[4]
    record = drive(engine_of(model), Add(replace(request, stop_token_ids=frozenset({stop}))))
    assert record.output("r") == whole[: whole.index(stop) + 1]
    assert record.finished["r", 0] is FinishReason.STOP


def test_full_context_ends_the_sequence() -> None:
    config = replace(CONFIG, context_length=40)
    engine = engine_of(tiny_model(config=config))
    record = drive(engine, Add(request_of("r", 31, 1000)))
    assert len(record.output("r")) == 9
    assert record.finished["r", 0] is FinishReason.LENGTH


def test_stale_page_contents_are_never_read(model: Model) -> None:
    """NaN left in free pages does not affect a new sequence."""
    request = request_of("r", 37, 30)
    engine = engine_of(model)
    expected = drive(engine, Add(request)).tokens
    for plane in executor_of(engine).cache.planes:
        plane.fill_(torch.nan)
    assert drive(engine, Add(request)).tokens == expected
