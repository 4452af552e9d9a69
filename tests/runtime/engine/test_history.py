"""KV of a prompt's beginning that another worker sends: pins on one side, arrivals on the other."""

import pytest
import torch

from runtime.core.request import Request, SampledToken
from runtime.core.sequence import Purpose
from runtime.engine import (
    Add,
    Arrived,
    Cancel,
    Engine,
    HistoryArrived,
    Pin,
    Reserve,
    StepOutput,
)
from runtime.errors import InvalidRequest, NotCached
from runtime.kv.names import COMPRESSED, DENSE, LOWRANK
from runtime.models.model import Model
from tests.runtime.engine.by_hand import all_free
from tests.runtime.engine.test_prefixes import (
    PAGE,
    SLIDING,
    cache_of,
    engine_of,
    model_of,
    request,
    reused,
)
from tests.runtime.tiny import Record, drive, prompt_of

HISTORY = 96


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(DENSE)


def pin_of(name: str, tokens: list[int] | tuple[int, ...], end: int = HISTORY) -> Pin:
    return Pin(request(name, tokens[: end + 1]))


def pinned_table(output: StepOutput, at: int = 0) -> list[int]:
    """Return the pages of the first request of a step; pins come before prompts."""
    name = output.computed[0].id
    chunks = [chunk for chunk in output.computed if chunk.id == name]
    return [page for chunk in chunks for page in chunk.page_tables[at]]


def copy_history(source: Engine, pinned: StepOutput, target: Engine, waiting: StepOutput) -> None:
    """Copy the pages that a transfer would write, from those that the other engine has pinned."""
    [reserved] = waiting.reserved
    layout = cache_of(source).layout
    end = pinned.computed[-1].first_token + pinned.computed[-1].num_tokens
    for layer, planes in enumerate(layout.layers):
        stored = zip(
            planes, cache_of(source).layer(layer), cache_of(target).layer(layer), strict=True
        )
        for plane, mine, theirs in stored:
            at = layout.plan.groups.index(plane.group)
            table = pinned_table(pinned, at)
            for part in layout.plan.sent(end, at):
                for page in range(max(part.start, reserved.first_token // PAGE), part.stop):
                    theirs[reserved.page_tables[at][page]] = mine[table[page]]


@pytest.mark.parametrize("name", [DENSE, LOWRANK, SLIDING])
def test_received_history_gives_the_tokens_of_a_cold_engine(name: str) -> None:
    """The holder has decoded a part of the history; the receiver computes only what follows."""
    model = model_of(name)
    holder, receiver = engine_of(model), engine_of(model)
    first = request("first", prompt_of(80), 40)
    answer = drive(holder, Add(first)).output("first")
    tokens = (*first.tokens, *answer, *prompt_of(20, seed=3))
    end = (len(first.tokens) + len(answer) - 1) // PAGE * PAGE
    one = request("next", tokens)
    waiting = receiver.step([Add(one, hold=True, receives=end)])
    assert (waiting.started, waiting.computed) == ([], [])
    assert [reserved.first_token for reserved in waiting.reserved] == [0]
    assert receiver.scheduler.num_running == 1
    assert not receiver.has_work, "it waits for the KV"
    pinned = holder.step([pin_of("pin", tokens, end)])
    assert (pinned.started, pinned.refused) == (["pin"], [])
    assert [chunk.completes for chunk in pinned.computed].count(True) == 1
    assert not any(chunk.samples for chunk in pinned.computed)
    copy_history(holder, pinned, receiver, waiting)
    record = drive(receiver, HistoryArrived("next", complete=True))
    assert reused(record) == {"next": end}
    assert sum(chunk.num_tokens for step in record.steps for chunk in step.computed) == len(tokens)
    cold = drive(engine_of(model, cache=False), Add(one, hold=True))
    assert record.tokens == cold.tokens
    assert receiver.scheduler.cached_tokens(one, Purpose.HOLD) == len(tokens) // PAGE * PAGE
    receiver.step([Cancel("next")])
    holder.step([Cancel("pin")])
    assert all_free(receiver)
    assert all_free(holder)


def test_history_that_does_not_arrive_is_computed(model: Model) -> None:
    engine = engine_of(model)
    one = request("one", prompt_of(130))
    [reserved] = engine.step([Add(one, hold=True, receives=HISTORY)]).reserved
    for plane in cache_of(engine).planes:  # what a failed transfer has left
        plane[list(reserved.page_tables[0])] = float("nan")
    record = drive(engine, HistoryArrived("one", complete=False))
    assert reused(record) == {}
    cold = drive(engine_of(model, cache=False), Add(one, hold=True))
    assert record.tokens == cold.tokens
    engine.step([Cancel("one")])
    assert all_free(engine)


def test_own_pages_are_not_received(model: Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(130)
    drive(engine, Add(request("own", prompt[:50])))
    [reserved] = engine.step([Add(request("a", prompt), hold=True, receives=HISTORY)]).reserved
    assert reserved.first_token == 48
    engine.step([Cancel("a")])
    few = engine.step([Add(request("b", prompt), hold=True, receives=HISTORY, worth=49)])
    assert (few.reserved, few.started, few.reused) == ([], ["b"], [("b", 48)])
    drive(engine, Cancel("b"), Add(request("c", prompt)))
    whole = engine.step([Add(request("d", prompt), hold=True, receives=HISTORY)])
    assert (whole.reserved, whole.reused) == ([], [("d", 128)])
    drive(engine, Cancel("d"))
    assert all_free(engine)


def test_history_is_found_only_after_its_arrival(model: Model) -> None:
    engine = engine_of(model)
    one = request("one", prompt_of(130))
    engine.step([Add(one, hold=True, receives=HISTORY)])
    assert engine.scheduler.cached_tokens(one) == 0
    engine.step([Cancel("one")])
    assert all_free(engine)
    assert engine.scheduler.cached_tokens(one) == 0
    engine.step([HistoryArrived("one", complete=True)])  # too late
    assert engine.scheduler.cached_tokens(one) == 0
    engine.step([Add(one, hold=True, receives=HISTORY)])
    engine.plan([HistoryArrived("one", complete=True)])
    assert engine.scheduler.cached_tokens(request("two", one.tokens)) == HISTORY


def test_others_are_computed_while_history_arrives(model: Model) -> None:
    engine = engine_of(model)
    engine.step([Add(request("waits", prompt_of(130)), hold=True, receives=HISTORY)])
    record = drive(engine, Add(request("other", prompt_of(70, seed=9))))
    assert len(record.output("other")) == 8
    drive(engine, HistoryArrived("waits", complete=False))
    engine.step([Cancel("waits")])
    assert all_free(engine)


def test_pin_needs_no_free_pages_and_keeps_its_own(model: Model) -> None:
    engine = engine_of(model, pages=10)
    prompt = prompt_of(HISTORY + 1)
    drive(engine, Add(request("before", prompt, 2)))
    pinned = engine.step([pin_of("pin", prompt)])
    [more] = engine.step([Add(request("all", prompt_of(60, seed=8)), hold=True)]).started
    assert more == "all"
    assert engine.scheduler.pages.free == (0,)
    again = engine.step([pin_of("again", prompt)])
    assert pinned_table(again) == pinned_table(pinned)
    drive(engine, Cancel("pin"), Cancel("all"))
    drive(engine, Add(request("evicts", prompt_of(60, seed=7), 4)))
    assert pinned_table(engine.step([pin_of("third", prompt)])) == pinned_table(pinned)
    engine.step([Cancel("again"), Cancel("third")])
    assert all_free(engine)


def test_pin_of_pages_that_are_gone_is_refused(model: Model) -> None:
    engine = engine_of(model, pages=10)
    prompt = prompt_of(HISTORY + 1)
    for name, one in (
        ("unknown", request("unknown", prompt)),
        ("short", request("short", prompt[:9])),
    ):
        output = engine.step([Pin(one)])
        assert [key for key, _ in output.refused] == [name]
        assert isinstance(output.refused[0][1], NotCached)
    drive(engine, Add(request("before", prompt, 2)))
    assert not engine.step([pin_of("pin", prompt)]).refused
    engine.step([Cancel("pin")])
    drive(engine, Add(request("evicts", prompt_of(140, seed=7))))
    [(_, fault)] = engine.step([pin_of("pin", prompt)]).refused
    assert isinstance(fault, NotCached)
    [(_, fault)] = engine.step([Pin(request("bad", [1, 2, 1 << 20]))]).refused
    assert isinstance(fault, InvalidRequest)
    [(_, fault)] = engine.step([Pin(request("salted", prompt, salt=b"other"))]).refused
    assert isinstance(fault, NotCached)
    assert all_free(engine)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_pages_of_a_decode_worker_are_refused(name: str) -> None:
    """A prefill attends to KV as computed, which a decode worker does not keep."""
    engine = engine_of(model_of(name), pages=80)
    prompt = prompt_of(200)
    engine.step([Reserve(request("before", prompt, 2))])
    drive(engine, Arrived("before", (SampledToken(0, 0, 7),)))
    assert engine.scheduler.cached_tokens(request("next", prompt)) >= PAGE
    [(_, fault)] = engine.step([Pin(request("pin", prompt))]).refused
    assert isinstance(fault, NotCached)
    with pytest.raises(ValueError, match="cannot receive KV"):
        engine.step([Add(request("add", prompt), hold=True, receives=HISTORY)])


@pytest.mark.parametrize("receives", [8, 112, -16])
def test_history_off_a_page_or_without_a_token_to_compute_is_a_bug(
    model: Model, receives: int
) -> None:
    engine = engine_of(model)
    with pytest.raises(ValueError, match="cannot receive KV of its first"):
        engine.step([Add(request("one", prompt_of(112)), hold=True, receives=receives)])
    with pytest.raises(ValueError, match="cannot receive KV"):
        engine.step([Add(request("two", prompt_of(112)), receives=PAGE)])


def test_choices_of_a_prompt_with_received_history_are_sampled(model: Model) -> None:
    holder, receiver = engine_of(model), engine_of(model)
    prompt = prompt_of(130)
    drive(holder, Add(request("before", prompt, 2)))
    one: Request = request("one", prompt, choices=3)
    waiting = receiver.step([Add(one, hold=True, receives=HISTORY)])
    copy_history(holder, holder.step([pin_of("pin", prompt)]), receiver, waiting)
    record: Record = drive(receiver, HistoryArrived("one", complete=True))
    cold = drive(engine_of(model, cache=False), Add(one, hold=True))
    assert record.tokens == cold.tokens
    assert torch.isfinite(cache_of(receiver).planes[0]).all()
