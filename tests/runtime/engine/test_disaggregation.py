"""A prefill and a decode engine together give the same output as one colocated engine."""

from dataclasses import replace

import pytest

from runtime.core.request import FinishReason, Request, SampledToken, SamplingParams
from runtime.engine import Add, Arrived, Cancel, Engine, Reserve
from runtime.kv.names import LOWRANK
from runtime.models.build import build_model
from runtime.models.model import Model
from tests.runtime.tiny import (
    Record,
    checkpoint_for,
    drive,
    engine_of,
    executor_of,
    request_of,
)


@pytest.fixture(scope="module", params=["dense", LOWRANK])
def model(request: pytest.FixtureRequest) -> Model:
    return build_model(checkpoint_for(request.param), kv_format=request.param)


SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7)


def transfer(prefill: Engine, decode: Engine, record: Record, name: str) -> None:
    """Copy held KV from the prefill to the decode engine, in place of the network transfer."""
    target = list(record.reserved[name])
    for output in record.steps:
        for chunk in output.computed:
            first = chunk.first_token // 16
            pages = target[first : first + len(chunk.page_tables[0])]
            for source, plane in zip(
                executor_of(prefill).cache.planes, executor_of(decode).cache.planes, strict=True
            ):
                plane[pages] = source[list(chunk.page_tables[0])]


def disaggregate(model: Model, request: Request) -> Record:
    """Prefill on one engine, decode on another, and check that both free all pages."""
    prefill, decode = engine_of(model), engine_of(model)
    record = Record()
    drive(decode, Reserve(request), record=record)
    assert not decode.has_work, "waiting for KV takes no steps"
    first = drive(prefill, Add(request, hold=True))
    assert prefill.scheduler.pages.free[0] < prefill.scheduler.pages.total[0], (
        "held pages stay allocated"
    )
    record.steps += first.steps
    transfer(prefill, decode, record, request.id)
    record.tokens |= first.tokens
    record.finished |= first.finished
    tokens = tuple(first.tokens[request.id, choice][0] for choice in range(request.choices))
    drive(decode, Arrived(request.id, tokens), record=record)
    drive(prefill, Cancel(request.id))
    for engine in (prefill, decode):
        assert engine.scheduler.pages.free == engine.scheduler.pages.total
        assert engine.scheduler.queue_tokens == 0
    return record


@pytest.mark.few(10)
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_disaggregated_output_equals_colocated_output(
    model: Model, length: int, sampling: SamplingParams, choices: int
) -> None:
    request = request_of("r", length, 20, sampling=sampling, choices=choices)
    colocated = drive(engine_of(model), Add(request))
    disaggregated = disaggregate(model, request)
    assert disaggregated.tokens == colocated.tokens
    assert disaggregated.finished == colocated.finished
    assert disaggregated.ended == colocated.ended


def test_choice_that_ends_with_its_first_token_is_not_decoded(model: Model) -> None:
    request = request_of("r", 20, 5, sampling=SEEDED, choices=3)
    whole = drive(engine_of(model), Add(request))
    stop = whole.tokens["r", 1][0].token
    stopping = replace(request, stop_token_ids=frozenset({stop}))
    record = disaggregate(model, stopping)
    assert record.output("r", 1) == [stop]
    assert record.finished["r", 1] is FinishReason.STOP
    assert record.ended == ["r"]
    once = replace(request, max_tokens=1)
    assert drive(engine_of(model), Add(once, hold=True), Cancel("r")).ended == []
    assert drive(engine_of(model), Add(once, hold=True)).ended == ["r"]


def test_suppressed_stop_tokens_end_no_choice_before_min_tokens(model: Model) -> None:
    """The prefill engine samples the first tokens, the decode engine the others."""
    stops = frozenset(range(180))  # the model samples them often
    plain = request_of("r", 20, 12, sampling=SEEDED, choices=3)
    stopping = replace(plain, stop_token_ids=stops)
    assert any(len(disaggregate(model, stopping).output("r", choice)) < 6 for choice in range(3))
    suppressing = replace(SEEDED, min_tokens=6, suppressed=stops)
    record = disaggregate(model, replace(stopping, sampling=suppressing))
    assert (
        record.tokens
        == drive(engine_of(model), Add(replace(stopping, sampling=suppressing))).tokens
    )
    for choice in range(3):
        output = record.output("r", choice)
        assert not stops & set(output[:6])
        assert len(output) > 6


def test_kv_arrival_is_ignored_after_cancel_and_raises_without_reservation(model: Model) -> None:
    engine = engine_of(model)
    drive(engine, Reserve(request_of("r", 20)), Cancel("r"))
    drive(engine, Arrived("r", (SampledToken(0, 0, 3),)), Cancel("unknown"), Cancel("r"))
    assert engine.scheduler.pages.free == engine.scheduler.pages.total
    engine.step([Add(request_of("r", 20))])
    with pytest.raises(ValueError, match="no reservation"):
        engine.step([Arrived("r", (SampledToken(0, 0, 3),))])
    with pytest.raises(ValueError, match="already exists"):
        engine.step([Add(request_of("r", 20))])
