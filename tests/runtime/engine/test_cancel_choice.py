"""One choice of a request ends while its other choices are decoded."""

from collections.abc import Callable

import pytest

from runtime.core.request import SampledToken
from runtime.engine import Add, Arrived, CancelChoice, Engine, Reserve
from runtime.models.model import Model
from tests.runtime.tiny import Record, drive, engine_of, request_of, tiny_model

MakeEngine = Callable[..., Engine]


@pytest.fixture(params=[False, True], ids=["direct", "replay"])
def make(request: pytest.FixtureRequest) -> MakeEngine:
    model: Model = tiny_model()
    return lambda **limits: engine_of(model, replay=request.param, **limits)


def step_until(engine: Engine, record: Record, condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        record.add(engine.step([]))
    raise AssertionError("the condition never holds")


def test_cancelled_choice_returns_its_batch_slot_and_pages(make: MakeEngine) -> None:
    request = request_of("r", 20, 40, choices=3)
    whole = drive(make(), Add(request))
    engine = make()
    record = Record()
    record.add(engine.step([Add(request)]))
    step_until(engine, record, lambda: len(record.output("r", 1)) >= 4)
    free = engine.scheduler.pages.free
    record.add(engine.step([CancelChoice("r", 1)]))
    step_until(engine, record, lambda: engine.scheduler.pages.free > free)
    assert engine.scheduler.num_running == 2
    drive(engine, record=record)
    assert len(record.output("r", 1)) <= 6
    assert set(record.finished) == {("r", 0), ("r", 2)}
    assert [record.output("r", c) for c in (0, 2)] == [whole.output("r", c) for c in (0, 2)]
    assert record.ended == ["r"]
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


def test_request_ends_when_its_last_choice_is_cancelled(make: MakeEngine) -> None:
    engine = make()
    record = Record()
    record.add(engine.step([Add(request_of("r", 20, 40, choices=2))]))
    step_until(engine, record, lambda: bool(record.output("r", 1)))
    record.add(engine.step([CancelChoice("r", 0), CancelChoice("r", 0), CancelChoice("r", 1)]))
    drive(engine, CancelChoice("r", 1), CancelChoice("x", 0), record=record)
    assert record.ended == ["r"]
    assert not record.finished
    assert (engine.scheduler.num_running, engine.scheduler.queue_tokens) == (0, 0)
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


def test_preempted_choice_that_is_cancelled_is_not_computed_again(make: MakeEngine) -> None:
    engine = make(pages=7)
    record = Record()
    record.add(engine.step([Add(request_of("r", 40, 40, choices=3))]))
    step_until(engine, record, lambda: engine.scheduler.num_waiting > 0)
    preempted = 3 - engine.scheduler.num_waiting  # the youngest choices wait
    before = len(record.output("r", preempted))
    drive(engine, CancelChoice("r", preempted), record=record)
    assert len(record.output("r", preempted)) == before
    assert record.ended == ["r"]
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


@pytest.mark.parametrize("arrived", [False, True])
def test_choice_cancelled_before_its_kv_arrives_is_not_decoded(
    make: MakeEngine, arrived: bool
) -> None:
    """Its pages stay allocated until then: another worker writes to them."""
    engine = make()
    record = Record()
    record.add(engine.step([Reserve(request_of("r", 20, 12, choices=2))]))
    first = tuple(SampledToken(choice, 0, 11) for choice in range(2))
    if not arrived:
        free = engine.scheduler.pages.free
        record.add(engine.step([CancelChoice("r", 0)]))
        assert engine.scheduler.pages.free == free
        drive(engine, Arrived("r", first), record=record)
    else:
        drive(engine, Arrived("r", first), CancelChoice("r", 0), record=record)
    assert not record.output("r", 0)
    assert len(record.output("r", 1)) == 11
    assert record.ended == ["r"]
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


def test_choice_cancelled_before_its_prompt_is_complete_ends_with_its_first_token(
    make: MakeEngine,
) -> None:
    engine = make(chunk_tokens=16, step_tokens=16)
    record = drive(engine, Add(request_of("r", 40, 12, choices=2)), CancelChoice("r", 0))
    assert (len(record.output("r", 0)), len(record.output("r", 1))) == (1, 12)
    assert set(record.finished) == {("r", 1)}
    assert engine.scheduler.pages.free == engine.scheduler.pages.total
