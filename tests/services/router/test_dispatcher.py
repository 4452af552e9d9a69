"""Who waits, for how long, in which order; and that nobody is overtaken to starvation."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.placement import Outcome, Placement, Release, Role
from services.router.dispatcher import Dispatcher
from services.router.errors import NoWorkers, QueueFull, QueueTimeout, TooLarge, UnknownModel
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import PolicyName
from services.router.queue import Ticket, WaitingRoom
from tests.services.router.samples import beat, registration, wanted

PAGES = 8  # of each worker; `wanted()` takes 2 of 16 tokens


def dispatcher(*names: str, bound: int = 4, pages_free: int = PAGES) -> Dispatcher:
    """Colocated workers of 8 pages."""
    router = Dispatcher(
        Fleet(FleetLimits()),
        WaitingRoom(bound),
        PolicyName.SHORTEST_QUEUE,
        Random(0),
        output_reserve=256,
        max_wait_s=60.0,
    )
    for name in names:
        router.register(registration(name, Role.COLOCATED, pages_total=PAGES), 0.0)
        router.heartbeat(beat(name, pages_free=pages_free), 0.0)
    return router


def placed_on(ticket: Ticket) -> str:
    assert isinstance(ticket.answer, Placement)
    return ticket.answer.decode.worker_id


def test_placements_since_the_last_heartbeat_count() -> None:
    router = dispatcher("c0", "c1")
    tickets = [router.submit(wanted(), 0.0) for _ in range(8)]
    assert sorted(map(placed_on, tickets)) == ["c0"] * 4 + ["c1"] * 4
    late = router.submit(wanted(wait_s=1), 0.0)
    assert late.answer is None
    assert len(router.room) == 1


def test_a_heartbeat_a_release_and_a_leaver_wake_those_who_wait() -> None:
    router = dispatcher("c0", pages_free=2)
    first = router.submit(wanted(), 0.0)
    assert isinstance(first.answer, Placement)
    second, third, fourth, fifth = (router.submit(wanted(wait_s=9), 0.0) for _ in range(4))
    router.release(
        Release(placement_id=first.answer.placement_id, outcome=Outcome.OK),
        0.1,
    )
    assert placed_on(second) == "c0"
    assert third.answer is None
    router.abandon(second, 0.2)
    assert placed_on(third) == "c0"
    assert isinstance(third.answer, Placement)
    router.heartbeat(beat("c0", pages_free=2, admitted=[third.answer.placement_id]), 0.3)
    assert placed_on(fourth) == "c0"
    assert fifth.answer is None


def test_priority_then_arrival() -> None:
    router = dispatcher("c0", pages_free=0)
    low, normal, high, normal_too = (
        router.submit(wanted(wait_s=9, priority=priority), 0.0) for priority in (-1, 0, 5, 0)
    )
    order = []
    for _ in range(4):
        router.heartbeat(beat("c0", pages_free=2), 0.1)
        order += [t for t in (low, normal, high, normal_too) if t.answer and t not in order]
        admitted = [t.answer.placement_id for t in order if isinstance(t.answer, Placement)]
        router.heartbeat(beat("c0", pages_free=0, admitted=admitted), 0.1)
    assert order == [high, normal, normal_too, low]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_the_same_worker() -> None:
    router = dispatcher("c0", pages_free=2)
    large = router.submit(wanted(100, 12, wait_s=9), 0.0)
    small = router.submit(wanted(wait_s=9), 0.0)
    assert large.answer is small.answer is None, "two pages are free, and kept for the large one"
    router.heartbeat(beat("c0", pages_free=7), 0.1)
    assert placed_on(large) == "c0"
    assert small.answer is None
    router.heartbeat(beat("c0", pages_free=9), 0.1)
    assert placed_on(small) == "c0"


def test_one_that_cannot_use_the_free_worker_does_not_block_it() -> None:
    router = dispatcher("c0", "c1", pages_free=0)
    picky = router.submit(wanted(wait_s=9, exclude=["c1"]), 0.0)
    router.heartbeat(beat("c1"), 0.1)
    assert picky.answer is None
    assert placed_on(router.submit(wanted(), 0.2)) == "c1"


def test_the_room_is_bounded() -> None:
    router = dispatcher("c0", bound=2, pages_free=0)
    kept = [router.submit(wanted(wait_s=9), 0.0) for _ in range(2)]
    assert isinstance(router.submit(wanted(wait_s=9), 0.0).answer, QueueFull)
    assert isinstance(router.submit(wanted(wait_s=9, priority=9), 0.0).answer, QueueFull)
    assert [ticket.answer for ticket in kept] == [None, None]
    assert len(router.room) == 2


def test_who_will_not_wait_is_told_at_once() -> None:
    router = dispatcher("c0", pages_free=0)
    assert isinstance(router.submit(wanted(wait_s=0), 0.0).answer, QueueFull)
    assert len(router.room) == 0


def test_waiting_ends_at_its_deadline_or_at_the_routers_bound() -> None:
    router = dispatcher("c0", pages_free=0)
    short, long = (router.submit(wanted(wait_s=wait_s), 0.0) for wait_s in (1.5, 3600))
    router.settle(1.49)
    assert short.answer is None
    router.settle(1.5)
    assert isinstance(short.answer, QueueTimeout)
    for now in range(2, 60):
        router.heartbeat(beat("c0", pages_free=0), float(now))
        router.settle(float(now))
    assert long.answer is None
    router.heartbeat(beat("c0", pages_free=0), 60.0)
    router.settle(60.0)
    assert isinstance(long.answer, QueueTimeout)


def test_those_who_wait_learn_that_the_last_worker_is_gone() -> None:
    router = dispatcher("c0", pages_free=0)
    ticket = router.submit(wanted(wait_s=50), 0.0)
    router.settle(10.0)
    assert ticket.answer is None, "suspect, but it may come back"
    assert [w.worker_id for w in router.settle(10.1)] == ["c0"]
    assert isinstance(ticket.answer, NoWorkers)


def test_the_end_of_a_probation_wakes() -> None:
    router = dispatcher("c0")
    first = router.submit(wanted(), 0.0)
    assert isinstance(first.answer, Placement)
    failed = Release(placement_id=first.answer.placement_id, outcome=Outcome.FAILED, blame="c0")
    router.release(failed, 1.0)
    second = router.submit(wanted(wait_s=9), 1.0)
    router.settle(1.49)
    assert second.answer is None
    router.settle(1.5)
    assert placed_on(second) == "c0"


def test_refusals_do_not_wait() -> None:
    router = dispatcher("c0")
    assert isinstance(router.submit(wanted(model="x", wait_s=9), 0.0).answer, UnknownModel)
    assert isinstance(router.submit(wanted(PAGES * 16, 2, wait_s=9), 0.0).answer, TooLarge)
    assert isinstance(router.submit(wanted(exclude=["c0"], wait_s=9), 0.0).answer, NoWorkers)
    assert isinstance(dispatcher().submit(wanted(wait_s=9), 0.0).answer, NoWorkers)


def test_closing_sends_all_away() -> None:
    router = dispatcher("c0", pages_free=0)
    waiting = router.submit(wanted(wait_s=9), 0.0)
    router.close()
    assert isinstance(waiting.answer, NoWorkers)
    assert isinstance(router.submit(wanted(wait_s=9), 0.0).answer, NoWorkers)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "free", "abandon", "release", "tick"]), st.integers(0, 9)
        ),
        max_size=40,
    )
)
def test_every_call_is_answered_once_and_nothing_stays(steps: list[tuple[str, int]]) -> None:
    router, now, tickets = dispatcher("c0", "c1"), 0.0, list[Ticket]()
    for action, number in steps:
        now += 0.1
        if action == "submit":
            tickets.append(router.submit(wanted(1 + 10 * number, 1, wait_s=0.5 * number), now))
        elif action == "free":
            router.heartbeat(beat(f"c{number % 2}", pages_free=number % (PAGES + 1)), now)
        elif action == "tick":
            router.settle(now)
        elif tickets:
            ticket = tickets[number % len(tickets)]
            if action == "abandon" and not isinstance(ticket.answer, Placement):
                router.abandon(ticket, now)
                tickets.remove(ticket)
            elif isinstance(ticket.answer, Placement):
                end = Release(placement_id=ticket.answer.placement_id, outcome=Outcome.OK)
                router.release(end, now)
        waiting = [ticket for ticket in tickets if ticket.answer is None]
        assert set(waiting) == set(router.room)
        assert len(waiting) <= 4
    for name in ("c0", "c1"):
        router.heartbeat(beat(name, pages_free=0), now + 5)
    router.settle(now + 5)
    assert len(router.room) == 0
    for ticket in tickets:
        assert ticket.answered.is_set()
        if isinstance(ticket.answer, Placement):
            end = Release(placement_id=ticket.answer.placement_id, outcome=Outcome.OK)
            router.release(end, now + 5)
    assert all(view.promised_pages == view.promised_tokens == 0 for view in router.fleet.views(now))


@pytest.mark.parametrize("priority", [0, 1])
def test_leaving_twice_is_harmless(priority: int) -> None:
    room = WaitingRoom(4)
    router = dispatcher("c0", pages_free=0)
    ticket = router.submit(wanted(wait_s=1, priority=priority), 0.0)
    room.enter(ticket)
    assert room.leave(ticket)
    assert not room.leave(ticket)
