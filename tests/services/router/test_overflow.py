"""Prefill workers that decode: overflow by load, fallback, accounting, and queued requests."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from runtime.pages.plan import PageCount
from services.common.placement import Outcome, Placement, Release, Role
from services.common.router_errors import ErrorCode
from services.router.capacity import Demand, WorkerHealth, WorkerSnapshot
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import Pair
from services.router.queue import PendingPlacement, PlacementQueue
from services.router.roster import Claim, Reason
from tests.services.router.samples import (
    COMPATIBLE,
    beat,
    is_refusal,
    place,
    place_request,
    registration,
    worker,
)

BOUND = 100  # overflow_tokens of the decode workers
DEMAND = Demand(prompt_tokens=17, max_tokens=16)  # prefill: 17 tokens; decode: 32 tokens, 2 pages
OTHER = COMPATIBLE.model_copy(update={"codec": "raw"})
NOT_BY_LOAD = [policy for policy in PolicyName if policy is not PolicyName.SHORTEST_QUEUE]


def prefill(worker_id: str, queue_tokens: int = 0, **changes: Any) -> WorkerSnapshot:
    """Return a prefill worker that decodes. It has 64 pages and 4 batch slots."""
    changes = {"decodes": True} | changes
    return replace(worker(worker_id, Role.PREFILL, queue_tokens), **changes)


def decode(worker_id: str, queue_tokens: int = 0, **changes: Any) -> WorkerSnapshot:
    changes = {"overflow_tokens": BOUND} | changes
    return replace(worker(worker_id, Role.DECODE, queue_tokens), **changes)


def chosen(
    *workers: WorkerSnapshot,
    demand: Demand = DEMAND,
    policy: PolicyName = PolicyName.SHORTEST_QUEUE,
    reserved: frozenset[str] = frozenset(),
) -> str | Reason:
    """Return the ids of the chosen workers, as ``prefill+decode`` or ``alone``."""
    result = place(demand, workers, policy, Random(0), reserved=reserved)
    if isinstance(result, Claim):
        return result.reason
    return "+".join(w.worker_id for w, _ in result.roles)


@pytest.mark.parametrize(
    ("prefill_tokens", "decode_tokens", "expected"),
    [
        (0, 0, "p0+d0"),
        (0, BOUND, "p0+d0"),
        (0, BOUND + 1, "p0"),
        (50, BOUND + 50, "p0+d0"),
        (50, BOUND + 51, "p0"),
        (5000, 5000, "p0+d0"),
    ],
)
def test_prefill_worker_takes_over_if_its_queue_is_shorter_than_the_excess(
    prefill_tokens: int, decode_tokens: int, expected: str
) -> None:
    assert chosen(prefill("p0", prefill_tokens), decode("d0", decode_tokens)) == expected


def test_overflow_needs_a_bound_and_a_prefill_worker_that_decodes() -> None:
    loaded = decode("d0", 5000)
    assert chosen(prefill("p0"), loaded) == "p0"
    assert chosen(prefill("p0"), replace(loaded, overflow_tokens=None)) == "p0+d0"
    assert chosen(prefill("p0", decodes=False), loaded) == "p0+d0"
    assert chosen(prefill("p0"), replace(loaded, overflow_tokens=5000)) == "p0+d0"


def test_prefill_worker_with_the_fewest_tokens_takes_over() -> None:
    loaded = decode("d0", BOUND + 50)
    assert chosen(prefill("p0", 40), prefill("p1", 30), loaded) == "p1"
    # The prefill worker of the pair may be another one.
    assert chosen(prefill("p0", 10, decodes=False), prefill("p1", 49), loaded) == "p1"
    assert chosen(prefill("p0", 10, decodes=False), prefill("p1", 50), loaded) == "p0+d0"
    ties = {
        pair.decode.worker_id
        for seed in range(30)
        if isinstance(
            pair := place(
                DEMAND,
                [prefill("p0"), prefill("p1"), loaded],
                PolicyName.SHORTEST_QUEUE,
                Random(seed),
            ),
            Pair,
        )
    }
    assert ties == {"p0", "p1"}


def test_least_loaded_decode_worker_decides_on_overflow() -> None:
    assert chosen(prefill("p0"), decode("d0", 5000), decode("d1", BOUND)) == "p0+d1"
    full = decode("d1", slots=8)
    assert chosen(prefill("p0"), decode("d0", 5000), full) == "p0"


@pytest.mark.parametrize("policy", NOT_BY_LOAD)
def test_other_policies_do_not_overflow_by_load(policy: PolicyName) -> None:
    assert chosen(prefill("p0"), decode("d0", 5000), policy=policy) == "p0+d0"


@pytest.mark.parametrize(
    ("changes", "demand"),
    [
        ({"pages_free": PageCount(1)}, DEMAND),
        ({"slots": 4}, DEMAND),
        ({"slots": 2}, Demand(17, 16, choices=3)),
        ({"pages_total": PageCount(4)}, Demand(17, 1000, output_reserve=16)),
    ],
)
def test_prefill_worker_without_capacity_does_not_take_over(
    changes: dict[str, Any], demand: Demand
) -> None:
    """It can still compute the prompt."""
    assert chosen(prefill("p0", **changes), decode("d0", 5000), demand=demand) == "p0+d0"


@pytest.mark.parametrize("policy", PolicyName)
def test_incompatible_prefill_worker_does_not_take_over(policy: PolicyName) -> None:
    other = prefill("p1", compatibility=OTHER)
    for tokens in (0, 5000):
        fleet = [prefill("p0", decodes=False), decode("d0", tokens), other]
        assert chosen(*fleet, policy=policy) == "p0+d0"
    assert chosen(worker("c0", Role.COLOCATED, 5000), other, policy=policy) == "c0"


def test_idle_prefill_worker_with_slots_for_all_choices_takes_over() -> None:
    demand = Demand(17, 16, choices=4)
    assert chosen(prefill("p0"), decode("d0", 5000), demand=demand) == "p0"
    assert chosen(prefill("p0", slots=1), decode("d0", 5000), demand=demand) == "p0+d0"


UNAVAILABLE = [
    {"slots": 8},
    {"pages_free": PageCount(1)},
    {"pages_total": PageCount(1)},
    {"health": WorkerHealth.SUSPECT},
    {"health": WorkerHealth.PROBATION},
    {"health": WorkerHealth.DRAINING},
    {"health": WorkerHealth.STARTING},
    {"compatibility": OTHER},
]


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("changes", UNAVAILABLE)
def test_prefill_worker_serves_alone_without_an_available_decode_worker(
    policy: PolicyName, changes: dict[str, Any]
) -> None:
    lost = decode("d0", overflow_tokens=None, **changes)
    assert chosen(prefill("p0"), lost, policy=policy) == "p0"
    assert chosen(prefill("p0"), policy=policy) == "p0", "no decode worker is registered"
    able = decode("d1", 5000, overflow_tokens=None)
    assert chosen(prefill("p0"), lost, able, policy=policy) == "p0+d1"


def test_excluded_and_reserved_workers() -> None:
    loaded = decode("d0", 5000)
    assert chosen(prefill("p0"), loaded, demand=replace(DEMAND, exclude=frozenset({"d0"}))) == "p0"
    without = replace(DEMAND, exclude=frozenset({"p0"}))
    assert chosen(prefill("p0"), loaded, demand=without) is Reason.NO_WORKERS
    assert chosen(prefill("p0"), prefill("p1", 10), loaded, demand=without) == "p1"
    assert chosen(prefill("p0"), loaded, reserved=frozenset({"d0"})) == "p0"
    assert chosen(prefill("p0"), loaded, reserved=frozenset({"p0"})) == "p0+d0"
    assert chosen(prefill("p0"), loaded, reserved=frozenset({"p0", "d0"})) is Reason.BUSY


@pytest.mark.parametrize(
    ("workers", "candidates"),
    [
        ([prefill("p0", slots=4), decode("d0", slots=8)], {"p0", "d0"}),
        ([prefill("p0", decodes=False), decode("d0", slots=8)], {"d0"}),
        ([prefill("p0", pages_total=PageCount(1)), prefill("p1", pages_free=PageCount(0))], {"p1"}),
        ([prefill("p0", health=WorkerHealth.PROBATION)], {"p0"}),
        ([prefill("p0", slots=4), decode("d0", health=WorkerHealth.DRAINING)], {"p0"}),
    ],
)
def test_candidates_include_prefill_workers_that_decode(
    workers: list[WorkerSnapshot], candidates: set[str]
) -> None:
    result = place(DEMAND, workers, PolicyName.SHORTEST_QUEUE, Random(0))
    assert isinstance(result, Claim)
    assert (result.reason, result.candidates) == (Reason.BUSY, frozenset(candidates))


def test_request_is_too_large_only_if_no_worker_fits_it() -> None:
    large = Demand(prompt_tokens=17, max_tokens=64 * 16)  # its prompt fits anywhere
    assert chosen(prefill("p0"), decode("d0"), demand=large) is Reason.TOO_LARGE
    assert chosen(prefill("p0"), demand=large) is Reason.TOO_LARGE
    big: dict[str, Any] = {"pages_total": PageCount(128), "pages_free": PageCount(128)}
    assert chosen(prefill("p0"), decode("d0", **big), demand=large) == "p0+d0"
    assert chosen(prefill("p0", **big), decode("d0"), demand=large) == "p0"


def dispatcher(*, decodes: bool = True, overflow_tokens: int | None = BOUND) -> Dispatcher:
    """Return a dispatcher with workers p0 and d0. Each has 64 pages and 16 batch slots."""
    router = Dispatcher(
        Fleet(FleetLimits()),
        PlacementQueue(8),
        PolicyName.SHORTEST_QUEUE,
        Random(0),
        output_reserve=256,
        max_wait_s=60.0,
    )
    prefill = registration("p0", Role.PREFILL, max_running=16, decodes=decodes)
    decode = registration("d0", Role.DECODE, max_running=16, overflow_tokens=overflow_tokens)
    router.register(prefill, 0.0)
    router.register(decode, 0.0)
    for name in ("p0", "d0"):
        router.heartbeat(beat(name), 0.0)
    return router


def placed(call: PendingPlacement) -> str | None:
    """Return the ids of the workers, as ``prefill+decode`` or ``alone``; None if queued."""
    if call.answer is None:
        return None
    assert isinstance(call.answer, Placement)
    ids = [w.worker_id for w in (call.answer.prefill, call.answer.decode) if w is not None]
    return "+".join(ids)


def load(router: Dispatcher, worker_id: str) -> tuple[int, int, int]:
    found = next(w for w in router.fleet.snapshots(0.0) if w.worker_id == worker_id)
    return found.queue_tokens, found.pages_free[0], found.slots


def test_promise_of_a_prefill_worker_alone_counts_prompt_and_output() -> None:
    router = dispatcher()
    router.heartbeat(beat("d0", queue_tokens=BOUND + 1), 0.0)
    call = router.submit(place_request(17, 16, choices=3), 0.0)
    assert placed(call) == "p0"
    assert load(router, "p0") == (3 * 32, 64 - 4, 3)
    assert load(router, "d0") == (BOUND + 1, 64, 0)
    assert isinstance(call.answer, Placement)
    router.heartbeat(beat("p0", queue_tokens=51, admitted=[call.answer.placement_id]), 0.0)
    assert load(router, "p0") == (51, 64, 0)


@pytest.mark.parametrize("end", ["release", "expire"])
def test_promise_of_a_prefill_worker_alone_ends(end: str) -> None:
    router = dispatcher(overflow_tokens=0)
    router.heartbeat(beat("d0", queue_tokens=1), 0.0)
    call = router.submit(place_request(), 0.0)
    assert isinstance(call.answer, Placement)
    if end == "release":
        failed = Release(placement_id=call.answer.placement_id, outcome=Outcome.FAILED, blame="p0")
        router.release(failed, 0.0)
    else:
        expiry = FleetLimits().placement_ttl_s
        router.heartbeat(beat("p0"), expiry)
        router.fleet.expire(expiry)
    assert load(router, "p0") == (0, 64, 0)
    state = {view.worker_id: view.state for view in router.fleet.views(0.0)}
    assert state["p0"] == ("probation" if end == "release" else "ready")


def test_requests_beyond_the_bound_are_shared_equally() -> None:
    router = dispatcher(overflow_tokens=4 * 32)
    calls = [router.submit(place_request(1, 32), 0.0) for _ in range(10)]
    assert [placed(call) for call in calls[:5]] == ["p0+d0"] * 5
    # From then on, p0's 5 prompt tokens and its own sequences are compared with d0's excess.
    assert [placed(call) for call in calls[5:]] == ["p0", "p0+d0"] * 2 + ["p0"]


def test_prefill_worker_takes_a_queued_request() -> None:
    router = dispatcher(overflow_tokens=None)
    router.heartbeat(beat("p0", running=16), 0.0)
    router.heartbeat(beat("d0", pages_free=0), 0.0)
    first, second = (router.submit(place_request(wait_s=9), 0.0) for _ in range(2))
    assert placed(first) is placed(second) is None
    router.heartbeat(beat("p0", running=15), 0.1)
    assert (placed(first), placed(second)) == ("p0", None)
    router.heartbeat(beat("d0", pages_free=2), 0.2)
    assert placed(second) == "p0+d0"


def test_small_requests_do_not_overtake_a_large_one_on_a_prefill_worker() -> None:
    router = dispatcher()
    router.heartbeat(beat("p0", pages_free=2), 0.0)
    router.heartbeat(beat("d0", pages_free=2), 0.0)
    large = router.submit(place_request(100, 12, wait_s=9), 0.0)
    small = router.submit(place_request(wait_s=9), 0.0)
    assert placed(large) is placed(small) is None
    router.heartbeat(beat("p0", pages_free=7), 0.1)
    assert placed(large) == "p0"
    assert placed(small) == "p0+d0", "the reservation ends with the placement"


def test_reserved_prefill_worker_still_computes_prompts() -> None:
    router = dispatcher()
    router.register(registration("d1", Role.DECODE), 0.0)
    router.heartbeat(beat("d1"), 0.0)
    for name in ("p0", "d0"):
        router.heartbeat(beat(name, pages_free=0), 0.0)
    waiting = router.submit(place_request(wait_s=9, exclude=["d1"]), 0.0)
    assert placed(waiting) is None
    assert placed(router.submit(place_request(), 0.0)) == "p0+d1"
    assert placed(waiting) is None


def test_service_continues_without_its_decode_worker() -> None:
    router, without = dispatcher(), dispatcher(decodes=False)
    for fleet in (router, without):
        fleet.fleet.deregister("d0", "e1")
    assert placed(router.submit(place_request(), 0.0)) == "p0"
    assert is_refusal(without.submit(place_request(), 0.0).answer, ErrorCode.NO_WORKERS)
    assert is_refusal(router.submit(place_request(17, 64 * 16), 0.0).answer, ErrorCode.TOO_LARGE)


def test_view_has_whether_a_prefill_worker_decodes() -> None:
    views = {view.worker_id: view.decodes for view in dispatcher().fleet.views(0.0)}
    assert views == {"p0": True, "d0": False}
