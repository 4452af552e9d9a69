"""Requests that accept fewer output tokens than their maximum get as many as workers can hold."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from runtime.core.request import FinishReason
from runtime.engine import Add
from runtime.errors import InvalidRequest
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from services.common.placement import Placement, PlaceRequest, Role
from services.common.router_errors import ErrorCode
from services.router.app import build_dispatcher
from services.router.capacity import READY, Demand, WorkerHealth, WorkerSnapshot
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.policy import Pair
from services.router.roster import Claim, Reason
from services.router.settings import RouterSettings
from tests.runtime.tiny import Record, drive, engine_of, request_of, tiny_checkpoint
from tests.services.router.samples import (
    COMPATIBLE,
    beat,
    is_refusal,
    place,
    place_request,
    registration,
    worker,
)

CONTEXT = 32_768
POOL = 16_384  # tokens
CHAT = Demand(20, CONTEXT - 20, required_tokens=1)
MODELS = {name: build_model(tiny_checkpoint(), kv_format=name) for name in ("dense", "int4")}


def chat(prompt_tokens: int = 20, **changes: object) -> PlaceRequest:
    """Return the request of a chat without ``max_tokens``."""
    output = CONTEXT - prompt_tokens
    return place_request(prompt_tokens, output, **({"required_tokens": 1} | changes))


def dispatcher(*pools: int, context: int = CONTEXT) -> Dispatcher:
    """Return a dispatcher with a colocated worker for each number of tokens in ``pools``."""
    router = build_dispatcher(RouterSettings.model_validate({"gone_after_s": 3}), -10.0)
    compatibility = COMPATIBLE.model_copy(update={"context_length": context})
    for number, tokens in enumerate(pools):
        router.register(
            registration(
                f"c{number}",
                Role.COLOCATED,
                pages_total=tokens // 16,
                compatibility=compatibility,
            ),
            0.0,
        )
        router.heartbeat(beat(f"c{number}", pages_free=tokens // 16), 0.0)
    return router


def placed(router: Dispatcher, request: PlaceRequest) -> Placement:
    answer = router.submit(request, 0.1).answer
    assert isinstance(answer, Placement), answer
    return answer


def test_context_that_exceeds_the_pages_is_no_demand() -> None:
    assert placed(dispatcher(POOL), chat()).max_tokens == POOL + 1 - 20
    refused = dispatcher(POOL).submit(chat(required_tokens=None), 0.1).answer
    assert is_refusal(refused, ErrorCode.TOO_LARGE)


def test_placement_limits_output_to_the_context_of_the_workers() -> None:
    assert placed(dispatcher(POOL, context=4096), chat()).max_tokens == 4096 - 20
    refused = dispatcher(POOL, context=4096).submit(place_request(20, 4077), 0.1).answer
    assert is_refusal(refused, ErrorCode.TOO_LARGE)


def test_explicit_output_is_placed_unchanged() -> None:
    assert placed(dispatcher(POOL), place_request(20, 100)).max_tokens == 100
    assert placed(dispatcher(POOL), place_request(20, 100, required_tokens=1)).max_tokens == 100


def test_prompt_that_fills_the_pages_gets_its_last_tokens() -> None:
    """Placement counts 256 output tokens, more than fit."""
    assert placed(dispatcher(POOL), chat(POOL - 1)).max_tokens == 2
    assert placed(dispatcher(POOL), chat(POOL)).max_tokens == 1
    assert is_refusal(dispatcher(POOL).submit(chat(POOL + 1), 0.1).answer, ErrorCode.TOO_LARGE)


def test_load_of_a_placement_is_that_of_the_output_that_fits() -> None:
    router = dispatcher(POOL)
    placed(router, chat(POOL - 15))
    (view,) = router.fleet.views(0.1)
    assert view.promised_pages == view.pages_total


def test_busy_workers_are_awaited() -> None:
    router = dispatcher(POOL)
    router.heartbeat(beat("c0", pages_free=0), 0.1)
    call = router.submit(chat(wait_s=5), 0.2)
    assert call.answer is None
    router.heartbeat(beat("c0", pages_free=POOL // 16), 0.3)
    assert isinstance(call.answer, Placement)
    assert call.answer.max_tokens == POOL + 1 - 20


@pytest.mark.parametrize(
    ("pools", "used"),
    [
        ((16_384, 16_000), {"c0", "c1"}),
        ((16_384, 8_400), {"c0", "c1"}),
        ((16_384, 2_048), {"c0"}),
        ((65_536, 16_384), {"c0"}),
        ((65_536, 40_000), {"c0", "c1"}),
    ],
)
def test_workers_with_less_than_half_of_the_space_are_not_used(
    pools: tuple[int, ...], used: set[str]
) -> None:
    workers = [sized(f"c{number}", tokens) for number, tokens in enumerate(pools)]
    found = set()
    for seed in range(16):
        pair = place(CHAT, workers, PolicyName.SHORTEST_QUEUE, Random(seed))
        assert isinstance(pair, Pair)
        found.add(pair.decode.worker_id)
    assert found == used


UNAVAILABLE: list[dict[str, Any]] = [
    *({"health": health} for health in set(WorkerHealth) - READY),
    {"pages_free": PageCount(0)},
    {"slots": 8},
    {"max_pending_prompt_tokens": 1.0, "pending_prompt_tokens": 1},
]


@pytest.mark.parametrize("state", UNAVAILABLE)
def test_small_worker_serves_while_the_larger_one_takes_no_requests(state: dict[str, Any]) -> None:
    large = replace(sized("c0", 65_536), **state)
    small = sized("c1", 2_048)
    assert decoder(chosen(CHAT, large, small)) == (Role.COLOCATED, "c1")


@pytest.mark.parametrize("state", UNAVAILABLE[:-1])
def test_small_prefill_worker_replaces_the_decode_worker(state: dict[str, Any]) -> None:
    prefill = replace(sized("p0", 1_024, Role.PREFILL), decodes=True)
    decode = replace(sized("d0", POOL, Role.DECODE), **state)
    assert decoder(chosen(CHAT, prefill, decode)) == (Role.COLOCATED, "p0")


def test_large_prefill_worker_does_not_replace_a_smaller_decode_worker() -> None:
    """Prefill workers decode if no other worker can, whatever their size."""
    prefill = replace(sized("p0", POOL, Role.PREFILL), decodes=True)
    decode = sized("d0", 1_024, Role.DECODE)
    assert decoder(chosen(CHAT, prefill, decode)) == (Role.DECODE, "d0")
    other = replace(sized("c0", 1_024), queue_tokens=500)
    full = replace(decode, slots=8)
    assert decoder(chosen(CHAT, prefill, full, other)) == (Role.COLOCATED, "c0")


def test_small_prefill_worker_does_not_take_over_from_a_larger_decode_worker() -> None:
    prefill = replace(sized("p0", 1_024, Role.PREFILL), decodes=True)
    decode = replace(sized("d0", POOL, Role.DECODE), overflow_tokens=0, queue_tokens=500)
    assert decoder(chosen(CHAT, prefill, decode)) == (Role.DECODE, "d0")
    explicit = replace(CHAT, max_tokens=16)
    assert decoder(chosen(explicit, prefill, decode)) == (Role.COLOCATED, "p0")


def test_excluded_large_worker_does_not_count() -> None:
    excluding = replace(CHAT, exclude=frozenset({"c0"}))
    found = chosen(excluding, sized("c0", 65_536), sized("c1", 2_048))
    assert decoder(found) == (Role.COLOCATED, "c1")


def test_chat_is_answered_by_the_small_worker_when_the_large_one_is_lost() -> None:
    router = dispatcher(8_192, 1_024)
    router.heartbeat(beat("c1"), 2.0)  # the last heartbeat of the other one was at 0
    answer = router.submit(chat(wait_s=5), 2.1).answer
    assert isinstance(answer, Placement)
    assert (answer.decode.worker_id, answer.max_tokens) == ("c1", 1_024 + 1 - 20)


def test_space_of_the_decode_worker_counts() -> None:
    """A prefill worker needs pages for the prompt alone."""
    prefill, decode = sized("p0", 2_048, Role.PREFILL), sized("d0", 16_384, Role.DECODE)
    pair = chosen(Demand(2_000, CONTEXT, required_tokens=1), prefill, decode)
    assert isinstance(pair, Pair)
    demand = Demand(2_000, CONTEXT, required_tokens=1)
    assert pair.decode.need(demand, Role.DECODE)[0] == 16_384 + 1 - 2_000


def decoder(found: Pair | Claim) -> tuple[Role, str]:
    """Return the worker that decodes, and its role."""
    assert isinstance(found, Pair), found
    return found.roles[-1][1], found.decode.worker_id


def sized(worker_id: str, tokens: int, role: Role = Role.COLOCATED) -> WorkerSnapshot:
    pages = PageCount(tokens // 16)
    return replace(worker(worker_id, role), pages_total=pages, pages_free=pages)


def chosen(demand: Demand, *workers: WorkerSnapshot) -> Pair | Claim:
    return place(demand, workers, PolicyName.SHORTEST_QUEUE, Random(0))


@pytest.mark.parametrize(
    ("kv_format", "pages", "prompt", "choices"),
    [
        ("dense", PageCount(4), 1, 1),
        ("dense", PageCount(4), 50, 1),
        ("dense", PageCount(4), 64, 1),
        ("dense", PageCount(9), 50, 3),
        ("int4", PageCount(5, 9), 50, 1),
        ("int4", PageCount(9, 3), 100, 1),
        ("int4", PageCount(9, 3), 140, 1),
        ("int4", PageCount(24, 3), 100, 3),
    ],
)
def test_engine_generates_exactly_what_fits(
    kv_format: str, pages: PageCount, prompt: int, choices: int
) -> None:
    """One more token exceeds the pages of the engine. Choices may run one after another."""
    model = MODELS[kv_format]
    snapshot = replace(
        worker("c0", Role.COLOCATED),
        compatibility=COMPATIBLE.model_copy(
            update={"context_length": model.context_length, "page_plan": model.layout.plan}
        ),
        pages_total=pages,
    )
    demand = Demand(prompt, CONTEXT, choices, output_reserve=8, required_tokens=1)
    output = snapshot.need(demand, Role.COLOCATED)[0]
    record = generate(model, pages, prompt, output, choices)
    assert not record.refused
    assert [len(record.output("r", choice)) for choice in range(choices)] == [output] * choices
    assert set(record.finished.values()) == {FinishReason.LENGTH}
    assert prompt + output < model.context_length
    assert "r" in generate(model, pages, prompt, output + 1, choices).refused


def test_worker_with_fewer_batch_slots_than_choices_is_not_used() -> None:
    """Its engine refuses the request. Others may have more slots."""
    demand = Demand(20, 8, choices=5)
    small = sized("c0", POOL)
    large = replace(sized("c1", POOL), max_running=5)
    refusal = chosen(demand, small)
    assert isinstance(refusal, Claim)
    assert refusal.reason is Reason.TOO_LARGE
    pair = chosen(demand, replace(small, queue_tokens=0), replace(large, queue_tokens=500))
    assert isinstance(pair, Pair)
    assert pair.decode.worker_id == "c1"
    engine = engine_of(MODELS["dense"], max_running=4)
    refused = drive(engine, Add(request_of("r", 20, choices=5))).refused
    assert isinstance(refused["r"], InvalidRequest)


def generate(model: Model, pages: PageCount, prompt: int, output: int, choices: int) -> Record:
    engine = engine_of(model, pages=pages)
    return drive(engine, Add(request_of("r", prompt, output, choices=choices)))
