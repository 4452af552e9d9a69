"""Queueing of placement requests: order, limits, wake-ups, and no starvation."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.placement import Outcome, Placement, Release, Role
from services.common.router_errors import ErrorCode
from services.router.app import build_dispatcher
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.fleet import Fleet, FleetLimits
from services.router.queue import PendingPlacement, PlacementQueue
from services.router.settings import RouterSettings
from tests.services.router.samples import beat, is_refusal, place_request, registration

PAGES = 8  # of each worker; `place_request()` needs 2 pages of 16 tokens


def dispatcher(
    *names: str, bound: int = 4, pages_free: int = PAGES, settled_at: float = 0.0
) -> Dispatcher:
    """Return a dispatcher with colocated workers of `PAGES` pages each."""
    router = Dispatcher(
        Fleet(FleetLimits()),
        PlacementQueue(bound),
        PolicyName.SHORTEST_QUEUE,
        Random(0),
        output_reserve=256,
        max_wait_s=60.0,
        settled_at=settled_at,
    )
    for name in names:
        router.register(registration(name, Role.COLOCATED, pages_total=PAGES), 0.0)
        router.heartbeat(beat(name, pages_free=pages_free), 0.0)
    return router


def placed_on(call: PendingPlacement) -> str:
    assert isinstance(call.answer, Placement)
    return call.answer.decode.worker_id


@pytest.mark.parametrize(
    ("workers", "changes", "refusal"),
    [
        ((), {}, ErrorCode.NO_WORKERS),
        (("c0",), {"model": "unknown"}, ErrorCode.UNKNOWN_MODEL),
        (("c0",), {"prompt_tokens": 16 * PAGES + 1}, ErrorCode.TOO_LARGE),
    ],
)
def test_call_is_not_refused_for_good_before_workers_have_registered(
    workers: tuple[str, ...], changes: dict[str, Any], refusal: ErrorCode
) -> None:
    router = dispatcher(*workers, settled_at=10.0)
    assert is_refusal(router.submit(place_request(**changes), 9.9).answer, ErrorCode.STARTING)
    excluding = place_request(**changes, exclude=["c1"])
    assert is_refusal(router.submit(excluding, 9.9).answer, refusal)
    assert is_refusal(router.submit(place_request(**changes), 10.0).answer, refusal)


def test_router_waits_for_workers_until_silent_ones_would_be_removed() -> None:
    given = RouterSettings.model_validate({"gone_after_s": 7})
    router = build_dispatcher(given, now=100.0)
    assert is_refusal(router.submit(place_request(), 106.9).answer, ErrorCode.STARTING)
    assert is_refusal(router.submit(place_request(), 107.0).answer, ErrorCode.NO_WORKERS)


def test_placements_since_the_last_heartbeat_count() -> None:
    router = dispatcher("c0", "c1")
    calls = [router.submit(place_request(), 0.0) for _ in range(8)]
    assert sorted(map(placed_on, calls)) == ["c0"] * 4 + ["c1"] * 4
    late = router.submit(place_request(wait_s=1), 0.0)
    assert late.answer is None
    assert len(router.queue) == 1


def test_heartbeat_release_and_cancellation_wake_queued_calls() -> None:
    router = dispatcher("c0", pages_free=2)
    first = router.submit(place_request(), 0.0)
    assert isinstance(first.answer, Placement)
    second, third, fourth, fifth = (router.submit(place_request(wait_s=9), 0.0) for _ in range(4))
    router.release(
        Release(placement_id=first.answer.placement_id, outcome=Outcome.OK),
        0.1,
    )
    assert placed_on(second) == "c0"
    assert third.answer is None
    router.cancel(second, 0.2)
    assert placed_on(third) == "c0"
    assert isinstance(third.answer, Placement)
    router.heartbeat(beat("c0", pages_free=2, admitted=[third.answer.placement_id]), 0.3)
    assert placed_on(fourth) == "c0"
    assert fifth.answer is None


def test_queue_order_is_priority_then_arrival() -> None:
    router = dispatcher("c0", pages_free=0)
    low, normal, high, normal_too = (
        router.submit(place_request(wait_s=9, priority=priority), 0.0) for priority in (-1, 0, 5, 0)
    )
    order = []
    for _ in range(4):
        router.heartbeat(beat("c0", pages_free=2), 0.1)
        order += [t for t in (low, normal, high, normal_too) if t.answer and t not in order]
        admitted = [t.answer.placement_id for t in order if isinstance(t.answer, Placement)]
        router.heartbeat(beat("c0", pages_free=0, admitted=admitted), 0.1)
    assert order == [high, normal, normal_too, low]


def test_small_request_does_not_overtake_large_one_queued_for_the_same_worker() -> None:
    router = dispatcher("c0", pages_free=2)
    large = router.submit(place_request(100, 12, wait_s=9), 0.0)
    small = router.submit(place_request(wait_s=9), 0.0)
    assert large.answer is small.answer is None, (
        "the two free pages are reserved for the large request"
    )
    router.heartbeat(beat("c0", pages_free=7), 0.1)
    assert placed_on(large) == "c0"
    assert small.answer is None
    router.heartbeat(beat("c0", pages_free=9), 0.1)
    assert placed_on(small) == "c0"


def test_queued_request_does_not_block_a_worker_it_excludes() -> None:
    router = dispatcher("c0", "c1", pages_free=0)
    picky = router.submit(place_request(wait_s=9, exclude=["c1"]), 0.0)
    router.heartbeat(beat("c1"), 0.1)
    assert picky.answer is None
    assert placed_on(router.submit(place_request(), 0.2)) == "c1"


def test_id_of_a_queued_call_is_is_refusal() -> None:
    """Two placements with one id would count on a worker, of which a release ends only one."""
    router = dispatcher("c0", pages_free=0)
    first = place_request(wait_s=9)
    queued = router.submit(first, 0.0)
    assert is_refusal(router.submit(first, 0.0).answer, ErrorCode.RELEASED)
    router.heartbeat(beat("c0"), 0.1)
    assert placed_on(queued) == "c0"
    router.release(Release(placement_id=first.placement_id, outcome=Outcome.OK), 0.2)
    assert router.fleet.views(0.2)[0].promised_tokens == 0


def test_queue_length_is_bounded() -> None:
    router = dispatcher("c0", bound=2, pages_free=0)
    kept = [router.submit(place_request(wait_s=9), 0.0) for _ in range(2)]
    assert is_refusal(router.submit(place_request(wait_s=9), 0.0).answer, ErrorCode.QUEUE_FULL)
    assert is_refusal(
        router.submit(place_request(wait_s=9, priority=9), 0.0).answer, ErrorCode.QUEUE_FULL
    )
    assert [call.answer for call in kept] == [None, None]
    assert len(router.queue) == 2


def test_call_without_wait_time_is_refused_at_once() -> None:
    router = dispatcher("c0", pages_free=0)
    assert is_refusal(router.submit(place_request(wait_s=0), 0.0).answer, ErrorCode.QUEUE_FULL)
    assert len(router.queue) == 0


def test_waiting_ends_at_the_callers_or_the_routers_limit() -> None:
    router = dispatcher("c0", pages_free=0)
    short, long = (router.submit(place_request(wait_s=wait_s), 0.0) for wait_s in (1.5, 3600))
    router.advance(1.49)
    assert short.answer is None
    router.advance(1.5)
    assert is_refusal(short.answer, ErrorCode.QUEUE_TIMEOUT)
    for now in range(2, 60):
        router.heartbeat(beat("c0", pages_free=0), float(now))
        router.advance(float(now))
    assert long.answer is None
    router.heartbeat(beat("c0", pages_free=0), 60.0)
    router.advance(60.0)
    assert is_refusal(long.answer, ErrorCode.QUEUE_TIMEOUT)


def test_queued_calls_are_refused_when_the_last_worker_is_removed() -> None:
    router = dispatcher("c0", pages_free=0)
    call = router.submit(place_request(wait_s=50), 0.0)
    router.advance(10.0)
    assert call.answer is None, "the worker is suspect, but may return"
    assert [w.worker_id for w in router.advance(10.1)] == ["c0"]
    assert is_refusal(call.answer, ErrorCode.NO_WORKERS)


def test_end_of_a_probation_places_queued_calls() -> None:
    router = dispatcher("c0")
    first = router.submit(place_request(), 0.0)
    assert isinstance(first.answer, Placement)
    failed = Release(placement_id=first.answer.placement_id, outcome=Outcome.FAILED, blame="c0")
    router.release(failed, 1.0)
    second = router.submit(place_request(wait_s=9), 1.0)
    router.advance(1.49)
    assert second.answer is None
    router.advance(1.5)
    assert placed_on(second) == "c0"


def test_unplaceable_calls_are_refused_without_waiting() -> None:
    router = dispatcher("c0")
    assert is_refusal(
        router.submit(place_request(model="x", wait_s=9), 0.0).answer, ErrorCode.UNKNOWN_MODEL
    )
    assert is_refusal(
        router.submit(place_request(PAGES * 16, 2, wait_s=9), 0.0).answer, ErrorCode.TOO_LARGE
    )
    assert is_refusal(
        router.submit(place_request(exclude=["c0"], wait_s=9), 0.0).answer, ErrorCode.NO_WORKERS
    )
    assert is_refusal(
        dispatcher().submit(place_request(wait_s=9), 0.0).answer, ErrorCode.NO_WORKERS
    )


def test_closing_refuses_queued_and_new_calls() -> None:
    router = dispatcher("c0", pages_free=0)
    waiting = router.submit(place_request(wait_s=9), 0.0)
    router.close()
    assert is_refusal(waiting.answer, ErrorCode.CLOSING)
    assert is_refusal(router.submit(place_request(wait_s=9), 0.0).answer, ErrorCode.CLOSING)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "free", "cancel", "release", "tick"]), st.integers(0, 9)
        ),
        max_size=40,
    )
)
def test_every_call_is_answered_once_and_all_promises_end(steps: list[tuple[str, int]]) -> None:
    router = dispatcher("c0", "c1")
    now = 0.0
    calls = list[PendingPlacement]()
    for action, number in steps:
        now += 0.1
        if action == "submit":
            calls.append(router.submit(place_request(1 + 10 * number, 1, wait_s=0.5 * number), now))
        elif action == "free":
            router.heartbeat(beat(f"c{number % 2}", pages_free=number % (PAGES + 1)), now)
        elif action == "tick":
            router.advance(now)
        elif calls:
            call = calls[number % len(calls)]
            if action == "cancel" and not isinstance(call.answer, Placement):
                router.cancel(call, now)
                calls.remove(call)
            elif isinstance(call.answer, Placement):
                end = Release(placement_id=call.answer.placement_id, outcome=Outcome.OK)
                router.release(end, now)
        waiting = [call for call in calls if call.answer is None]
        assert set(waiting) == set(router.queue)
        assert len(waiting) <= 4
    for name in ("c0", "c1"):
        router.heartbeat(beat(name, pages_free=0), now + 5)
    router.advance(now + 5)
    assert len(router.queue) == 0
    for call in calls:
        assert call.answered.is_set()
        if isinstance(call.answer, Placement):
            end = Release(placement_id=call.answer.placement_id, outcome=Outcome.OK)
            router.release(end, now + 5)
    for view in router.fleet.views(now):
        assert (view.promised_tokens, view.promised_pages) == (0, {"kv": 0})


@pytest.mark.parametrize("priority", [0, 1])
def test_second_removal_from_the_queue_returns_false(priority: int) -> None:
    queue = PlacementQueue(4)
    router = dispatcher("c0", pages_free=0)
    call = router.submit(place_request(wait_s=1, priority=priority), 0.0)
    queue.add(call)
    assert queue.remove(call)
    assert not queue.remove(call)
