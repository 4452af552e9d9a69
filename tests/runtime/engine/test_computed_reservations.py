"""Reservations whose few uncached tokens the engine computes itself: `Reserve.may_compute`."""

import pytest

from runtime.engine import Add, Cancel, Command, Engine, Reserve
from runtime.kv.names import DENSE
from runtime.models.model import Model
from tests.runtime.engine.by_hand import all_free
from tests.runtime.engine.mirrored import Mirrored
from tests.runtime.engine.test_prefixes import (
    SLIDING,
    carry,
    engine_of,
    model_of,
    play,
    request,
    reused,
    script_of,
)
from tests.runtime.tiny import Record, drive, prompt_of


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(DENSE)


@pytest.mark.parametrize("choices", [1, 3])
def test_a_reservation_computes_the_few_tokens_that_are_not_cached(
    model: Model, choices: int
) -> None:
    engine, prompt = engine_of(model), prompt_of(100)
    drive(engine, Add(request("history", prompt[:80])))
    one = request("a", prompt, choices=choices)
    assert engine.scheduler.uncached_tokens(one) == 20
    record = drive(engine, Reserve(one, may_compute=20))
    assert [name for step in record.steps for name in step.started] == ["a"]
    assert reused(record) == {"a": 80}
    assert not any(step.reserved or step.deferred for step in record.steps)
    assert record.tokens == drive(engine_of(model, cache=False), Add(one)).tokens
    assert all_free(engine)


def test_a_reservation_does_not_compute_more_tokens_than_it_may(model: Model) -> None:
    engine, prompt = engine_of(model), prompt_of(100)
    assert engine.scheduler.uncached_tokens(request("a", prompt)) is None, "no page is cached"
    drive(engine, Add(request("history", prompt[:80])))
    output = engine.step([Reserve(request("a", prompt), may_compute=19)])
    assert [(each.id, each.first_token) for each in output.reserved] == [("a", 80)]
    assert not output.started
    engine.step([Cancel("a")])
    assert all_free(engine)


def test_a_reservation_whose_pages_are_evicted_meanwhile_waits_for_kv(model: Model) -> None:
    """The prompt waits for the pages of a long sequence, for which its prefix is evicted."""
    engine, prompt = engine_of(model, pages=8), prompt_of(100)
    drive(engine, Add(request("history", prompt[:64], 2)))
    engine.step([Add(request("long", prompt_of(90, seed=1), 30))])
    assert engine.scheduler.uncached_tokens(request("a", prompt)) == 68
    first = engine.step([Reserve(request("a", prompt), may_compute=68)])
    assert first.deferred == ["a"]
    record = drive(engine)
    [reserved] = [each for step in record.steps for each in step.reserved]
    assert (reserved.id, reserved.first_token) == ("a", 0)
    assert not any("a" in step.started for step in record.steps)
    engine.step([Cancel("a")])
    assert all_free(engine)


def test_a_preempted_prompt_of_a_reservation_is_computed_again(model: Model) -> None:
    """Nobody sends its KV, whatever is still cached."""
    engine, prompt = engine_of(model, pages=12), prompt_of(60)
    drive(engine, Add(request("history", prompt[:48], 2)))
    record = Record()
    record.add(engine.step([Add(request("old", prompt_of(60, seed=1), 60))]))
    record.add(engine.step([Reserve(request("a", prompt, 60), may_compute=12)]))
    drive(engine, record=record)
    assert [name for step in record.steps for name in step.started].count("a") > 1, "preempted"
    assert not any(step.reserved for step in record.steps)
    cold = drive(engine_of(model, cache=False), Add(request("a", prompt, 60)))
    assert record.output("a") == cold.output("a")
    assert all_free(engine)


@pytest.mark.parametrize("name", [SLIDING, "fp8"])
def test_a_prompt_is_computed_only_after_pages_to_which_it_attends(name: str) -> None:
    """Prompts of compressed formats attend to pages that are not sent: all but the first one."""
    model = model_of(name)
    sender, receiver = engine_of(model, pages=80), engine_of(model, pages=80)
    record = Record()
    first = request("first", prompt_of(150), 30)
    carry(sender, receiver, first, record)
    one = request("second", [*first.tokens, *record.output("first"), *prompt_of(9)])
    encodes = model.layout.plan.encodes
    assert receiver.scheduler.uncached_tokens(one) == 189 - (16 if encodes else 176)
    output = receiver.step([Reserve(one, may_compute=64)])
    assert bool(output.reserved) is encodes
    assert bool(output.started) is not encodes
    receiver.step([Cancel("second")])
    drive(receiver)
    assert all_free(receiver)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [DENSE, SLIDING, "fp8", "k4v2"])
@pytest.mark.parametrize("length", [40, 70, 99, 150])
def test_a_prompt_computed_after_received_kv_has_the_tokens_of_a_cold_engine(
    name: str, length: int
) -> None:
    model = model_of(name)
    sender, receiver = engine_of(model, pages=80), engine_of(model, pages=80)
    record = Record()
    first = request("first", prompt_of(length), 20)
    carry(sender, receiver, first, record)
    one = request("second", [*first.tokens, *record.output("first"), *prompt_of(9)], 40, choices=2)
    drive(receiver, Reserve(one, may_compute=999), record=record)
    cold = drive(engine_of(model, cache=False), Add(one))
    assert [record.output("second", choice) for choice in (0, 1)] == [
        cold.output("second", choice) for choice in (0, 1)
    ]
    sender.step([Cancel("first")])
    assert all_free(receiver)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", [DENSE, SLIDING, "k4v2"])
def test_random_chats_are_computed_with_the_tokens_of_a_cold_engine(
    name: str, replay: bool
) -> None:
    """The pool has few pages, so that sequences are preempted. Other ranks get copied plans."""
    model = model_of(name)
    script = script_of(model, 5, 120)
    engine = engine_of(model, pages=30, replay=replay)
    executor = Mirrored(model, engine.executor.shape.options)
    cold = play(engine_of(model, cache=False, pages=30, replay=replay), script)
    warm = play(Engine(executor), [list(map(reserving, commands)) for commands in script])
    executor.check_equal()
    assert len(reused(warm)) > 5
    for one in (c.request for commands in script for c in commands if isinstance(c, Add)):
        for choice in range(one.choices):
            expected, found = cold.output(one.id, choice), warm.output(one.id, choice)
            least = min(len(expected), len(found))  # one of them may be cancelled earlier
            assert found[:least] == expected[:least]


def reserving(command: Command) -> Command:
    """Return a reservation that computes all tokens, in place of `Add`."""
    return Reserve(command.request, may_compute=999) if isinstance(command, Add) else command
