"""Placement of inputs on encoder workers: queue, fairness, refusals and epochs."""

from typing import Any

import pytest

from services.common.placement import Outcome, Release
from services.common.router_errors import ErrorCode
from services.router.encoders.dispatcher import EncoderDispatcher
from tests.services.router.encoders.samples import (
    NOW,
    beat,
    code_of,
    dispatcher,
    registration,
    request,
    worker_of,
)


def release(router: EncoderDispatcher, placement_id: str, outcome: Outcome = Outcome.OK) -> None:
    router.release(Release(placement_id=placement_id, outcome=outcome), NOW)


def test_inputs_go_to_the_shortest_queue() -> None:
    router = dispatcher("a", "b")
    first = worker_of(router.submit(request("p1", 100), NOW))
    second = worker_of(router.submit(request("p2", 10), NOW))
    assert {first, second} == {"a", "b"}
    assert worker_of(router.submit(request("p3", 10), NOW)) == second


def test_request_waits_for_capacity_and_is_placed_at_a_release() -> None:
    router = dispatcher("a")
    assert worker_of(router.submit(request("p1", 500), NOW)) == "a"
    waiting = router.submit(request("p2", 10), NOW)
    assert worker_of(waiting) is None
    release(router, "p1")
    assert worker_of(waiting) == "a"


def test_large_request_does_not_starve_behind_small_ones() -> None:
    router = dispatcher("a")
    router.submit(request("p1", 500), NOW)
    large = router.submit(request("large", 900), NOW)
    small = router.submit(request("small", 10), NOW)
    release(router, "p1")
    assert worker_of(large) == "a"
    assert worker_of(small) is None


def test_further_parts_of_a_request_do_not_overtake_others_but_repeated_ones_do() -> None:
    """Otherwise, a long list delays all other requests of its tenant until it is computed."""
    router = dispatcher("a")
    router.submit(request("part-1", 500), NOW)
    other = router.submit(request("other", 10), NOW)
    part = router.submit(request("part-2", 500, admitted=True), NOW)
    repeated = router.submit(request("part-0", 500, admitted=True, attempt=1), NOW)
    release(router, "part-1")
    assert (worker_of(repeated), worker_of(other), worker_of(part)) == ("a", None, None)
    release(router, "part-0")
    assert (worker_of(other), worker_of(part)) == ("a", "a")


def test_tenants_share_in_proportion_to_their_weights() -> None:
    router = dispatcher("a")
    router.submit(request("first", 500), NOW)
    calls = [
        router.submit(request(f"{tenant}{n}", 200, tenant=tenant, weight=weight), NOW)
        for tenant, weight in (("x", 1), ("y", 3))
        for n in range(4)
    ]
    order: list[str] = []
    running = "first"
    for _ in range(4):
        release(router, running)
        placed = [call for call in calls if worker_of(call)]
        running = next(
            c.request.placement_id for c in placed if c.request.placement_id not in order
        )
        order.append(running)
    assert sum(name.startswith("y") for name in order) == 3


def test_other_models_are_not_blocked() -> None:
    router = dispatcher("a")
    router.register(registration("b", model="other"), NOW)
    router.heartbeat(beat("b"), NOW)
    router.submit(request("p1", 500), NOW)
    assert worker_of(router.submit(request("p2", 10), NOW)) is None
    assert worker_of(router.submit(request("p3", 10, model="other"), NOW)) == "b"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"model": "unknown"}, ErrorCode.UNKNOWN_MODEL),
        ({"exclude": ["a"]}, ErrorCode.NO_WORKERS),
    ],
)
def test_request_that_no_worker_takes_is_refused(values: dict[str, Any], code: ErrorCode) -> None:
    assert code_of(dispatcher("a").submit(request("p", **values), NOW)) is code


def test_without_workers_a_settled_router_refuses() -> None:
    assert code_of(dispatcher().submit(request("p"), NOW)) is ErrorCode.NO_WORKERS
    starting = dispatcher(settled_at=NOW + 10)
    assert code_of(starting.submit(request("p"), NOW)) is ErrorCode.STARTING


def test_request_that_may_not_wait_is_refused() -> None:
    router = dispatcher("a")
    router.submit(request("p1", 500), NOW)
    assert code_of(router.submit(request("p2", wait_s=0), NOW)) is ErrorCode.QUEUE_FULL


def test_overdue_request_is_refused() -> None:
    router = dispatcher("a")
    router.submit(request("p1", 500), NOW)
    waiting = router.submit(request("p2", wait_s=1), NOW)
    router.advance(NOW + 1)
    assert code_of(waiting) is ErrorCode.QUEUE_TIMEOUT


def test_full_queue_refuses_the_tenant_with_the_most_tokens() -> None:
    router = dispatcher("a", max_waiting=2)
    router.submit(request("p1", 500), NOW)
    greedy = [router.submit(request(f"g{n}", 300, tenant="x"), NOW) for n in range(2)]
    modest = router.submit(request("m", 10, tenant="y"), NOW)
    assert code_of(greedy[1]) is ErrorCode.QUEUE_FULL
    assert (greedy[0].answer, modest.answer) == (None, None)


def test_release_before_the_placement_cancels_it() -> None:
    router = dispatcher("a")
    release(router, "early")
    assert code_of(router.submit(request("early"), NOW)) is ErrorCode.RELEASED
    router.submit(request("p1", 500), NOW)
    waiting = router.submit(request("p2"), NOW)
    release(router, "p2", Outcome.CANCELLED)
    assert code_of(waiting) is ErrorCode.RELEASED


def test_cancelled_call_frees_its_worker() -> None:
    router = dispatcher("a")
    first = router.submit(request("p1", 500), NOW)
    second = router.submit(request("p2", 500), NOW)
    router.cancel(first, NOW)
    assert worker_of(second) == "a"
    assert len(router.queue) == 0


def test_waiting_call_fails_when_the_last_worker_is_gone() -> None:
    router = dispatcher("a")
    router.submit(request("p1", 500), NOW)
    waiting = router.submit(request("p2"), NOW)
    assert [gone.worker_id for gone in router.advance(NOW + 11)] == ["a"]
    assert code_of(waiting) is ErrorCode.NO_WORKERS


def test_closed_router_refuses() -> None:
    router = dispatcher("a")
    router.submit(request("p1", 500), NOW)
    waiting = router.submit(request("p2"), NOW)
    router.close()
    assert code_of(waiting) is ErrorCode.CLOSING
    assert code_of(router.submit(request("p3"), NOW)) is ErrorCode.CLOSING
