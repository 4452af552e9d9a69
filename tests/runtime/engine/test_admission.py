"""Admission order, page allocation, preemption and queue length."""

import pytest

from runtime.core.request import SamplingParams
from runtime.engine import Add, Cancel, Command, Reserve
from runtime.models.model import Model
from tests.runtime.tiny import Record, drive, engine_of, request_of

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7)


def test_choices_share_full_pages(model: Model) -> None:
    engine = engine_of(model)
    engine.step([Add(request_of("r", 40, 30, choices=4))])
    assert engine.scheduler.pages.total.minus(engine.scheduler.pages.free) == (2 + 4,)
    drive(engine, Cancel("r"))
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


def test_prompts_are_admitted_first_come_first_served(model: Model) -> None:
    engine = engine_of(model, pages=8)
    adds: list[Command] = [Add(request_of("a", 60, 60)), Add(request_of("b", 100, 4))]
    record = drive(engine, *adds, Add(request_of("c", 30, 4)))
    computed = [chunk.id for output in record.steps for chunk in output.computed]
    assert computed[:2] == ["a", "a"]
    assert computed.index("b") < computed.index("c"), (
        "c fits beside a, not beside b, which arrived first"
    )


def test_order_of_prompts_depends_on_length_and_on_tokens_admitted_before(model: Model) -> None:
    engine = engine_of(model, step_tokens=16, chunk_tokens=16)
    lengths = {"long": 120, "short": 16, "late": 64}
    record = drive(engine, *(Add(request_of(name, count, 1)) for name, count in lengths.items()))
    computed = [chunk.id for output in record.steps for chunk in output.computed]
    assert computed == ["short"] + 4 * ["late"] + 8 * ["long"]
    record = drive(engine, Add(request_of("a", 48, 1)), Add(request_of("b", 40, 1)))
    computed = [chunk.id for output in record.steps for chunk in output.computed]
    assert computed == 3 * ["a"] + 3 * ["b"], "b is shorter, but 48 tokens were admitted before it"


def test_reserved_sequences_are_queued_and_hold_a_batch_slot(model: Model) -> None:
    engine = engine_of(model, max_running=2)
    record = drive(engine, *(Reserve(request_of(n, 20)) for n in "abc"))
    assert list(record.reserved) == ["a", "b"]
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    drive(engine, Cancel("a"), record=record)
    assert list(record.reserved) == ["a", "b", "c"]
    assert len(set(record.reserved["b"]) & set(record.reserved["c"])) == 0


def test_queue_tokens_count_accepted_and_unfinished_tokens(model: Model) -> None:
    engine = engine_of(model, step_tokens=32, chunk_tokens=32)
    engine.step([Add(request_of("h", 100), hold=True)])
    assert engine.scheduler.queue_tokens == 68
    drive(engine)
    assert engine.scheduler.queue_tokens == 0
    engine.step([Reserve(request_of("r", 50))])
    assert engine.scheduler.queue_tokens == 50


@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED], ids=["greedy", "seeded"])
def test_preempted_sequences_produce_the_same_tokens(
    model: Model, sampling: SamplingParams
) -> None:
    requests = [request_of(f"r{n}", 20 + n, 60, sampling=sampling) for n in range(5)]
    adds = [Add(request) for request in requests]
    roomy, tight = engine_of(model, pages=64), engine_of(model, pages=14)
    expected = drive(roomy, *adds)
    record = Record()
    record.add(tight.step(adds))
    max_waiting = 0
    while tight.has_work:
        record.add(tight.step([]))
        max_waiting = max(max_waiting, tight.scheduler.num_waiting)
    assert max_waiting > 1, "sequences were preempted"
    assert record.tokens == expected.tokens
    assert record.finished == expected.finished
    assert tight.scheduler.pages.free == tight.scheduler.pages.total


def test_preempted_sequence_is_computed_before_prompts_admitted_after_it(model: Model) -> None:
    """``b`` is preempted while the prompt of ``c`` is computed, and readmitted once ``d`` ends."""
    engine = engine_of(model, pages=2 + 2 + 24 + 7, step_tokens=16, chunk_tokens=16)
    prompts = {"a": request_of("a", 16, 40), "b": request_of("b", 16, 40)}
    long = Add(request_of("c", 384, 1), hold=True)
    record = Record()
    record.add(engine.step([Reserve(request_of("d", 100)), *map(Add, prompts.values()), long]))
    while not engine.scheduler.num_waiting:
        record.add(engine.step([]))
    drive(engine, Cancel("d"), record=record)
    computed = [chunk.id for output in record.steps for chunk in output.computed]
    preempted_at = computed.index("c") + 16  # `a` then needs its third page
    assert computed[preempted_at:] == 2 * ["b"] + 8 * ["c"]


def test_choices_are_preempted_individually(model: Model) -> None:
    request = request_of("r", 40, 50, sampling=SEEDED, choices=4)
    expected = drive(engine_of(model), Add(request))
    tight = engine_of(model, pages=12)
    assert drive(tight, Add(request)).tokens == expected.tokens
    assert tight.scheduler.pages.free == tight.scheduler.pages.total


def test_prompt_tokens_count_what_is_left_to_compute_here(model: Model) -> None:
    engine = engine_of(model, step_tokens=32, chunk_tokens=32)
    engine.step([Add(request_of("r", 100)), Reserve(request_of("other", 50))])
    assert engine.scheduler.pending_prompt_tokens == 68
    engine.step([Add(request_of("h", 30), hold=True)])
    assert engine.scheduler.pending_prompt_tokens < 68 + 30
    drive(engine)
    assert engine.scheduler.pending_prompt_tokens == 0


def test_reservation_that_must_wait_is_reported_once_as_deferred(model: Model) -> None:
    engine = engine_of(model, pages=4)
    output = engine.step([Reserve(request_of(n, 20)) for n in "abc"])
    assert [reserved.id for reserved in output.reserved] == ["a", "b"]
    assert output.deferred == ["c"]
    output = engine.step([Reserve(request_of("d", 20))])
    assert output.deferred == ["d"]
    output = engine.step([Cancel("a"), Add(request_of("e", 20))])
    assert [reserved.id for reserved in output.reserved] == ["c"]
    assert output.deferred == []
