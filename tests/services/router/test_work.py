"""Work of an event, in calls of Python functions: independent of workers and queued requests."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import FrameType

import pytest

from services.common.placement import Outcome, Placement, Release, Role, WorkerState
from services.router.admission import Admission, AdmissionLimits
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.fleet import Fleet, FleetLimits
from services.router.queue import MAX_RECLAIMED, PendingPlacement, PlacementQueue
from tests.services.router.samples import beat, place_request, registration

FREE = 20  # pages, which one of the requests needs
TOO_MUCH = 400  # tokens of a prompt for which no worker has free pages


def calls_of(event: Callable[[], object]) -> int:
    """Return the number of calls of Python functions during an event."""
    count = 0

    def profile(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        event()
    finally:
        sys.setprofile(None)
    return count


class Loaded:
    """A dispatcher with pairs of workers and queued requests, none of which fits now."""

    def __init__(self, pairs: int, queued: int) -> None:
        self.router = Dispatcher(
            Fleet(FleetLimits()),
            PlacementQueue(10_000),
            PolicyName.SHORTEST_QUEUE,
            Random(0),
            output_reserve=256,
            max_wait_s=99,
            admission=Admission(AdmissionLimits(3600, 100)),
        )
        for index in range(pairs):
            for name, role in ((f"p{index}", Role.PREFILL), (f"d{index}", Role.DECODE)):
                worker = registration(name, role, pages_total=1024, max_running=64)
                self.router.register(worker, 0.0)
                self.router.heartbeat(beat(name, pages_free=FREE), 0.1)
        call = self.submit(16 * (FREE - 1))
        assert isinstance(call, Placement)
        self.placed = call
        for number in range(queued):
            self.submit(TOO_MUCH + number % 7, tenant=f"t{number % 4}")
        assert len(self.router.queue) == queued

    def submit(self, prompt: int, tenant: str = "t0") -> object:
        request = place_request(prompt, 16, tenant=tenant, wait_s=99)
        return self.router.submit(request, 0.2).answer

    def event(self, name: str) -> Callable[[], object]:
        """Return an event after which no queued request fits either."""
        router = self.router
        done = Release(placement_id=self.placed.placement_id, outcome=Outcome.OK)
        unknown = Release(placement_id="unknown", outcome=Outcome.CANCELLED)
        full = beat("d0", pages_free=FREE)
        return {
            "heartbeat": lambda: router.heartbeat(full, 0.3),
            "release": lambda: router.release(done, 0.3),
            "release of an unknown placement": lambda: router.release(unknown, 0.3),
            "submit": lambda: self.submit(TOO_MUCH),
            "tick": lambda: router.advance(0.3),
        }[name]


@pytest.mark.parametrize(
    "name", ["heartbeat", "release", "release of an unknown placement", "submit", "tick"]
)
def test_work_of_an_event_does_not_grow_with_workers_and_queue(name: str) -> None:
    few, many = (calls_of(Loaded(*size).event(name)) for size in ((4, 16), (32, 256)))
    assert many <= 1.2 * few, f"{few} calls with 8 workers, {many} with 64"


@pytest.mark.parametrize("name", ["registration", "removal", "not ready"])
def test_work_of_a_change_of_the_workers_does_not_grow_with_the_queue(name: str) -> None:
    """Equal workers remain, so that the same workers can serve each queued request."""

    def calls(queued: int) -> int:
        router = Loaded(4, queued).router
        new = registration("d9", Role.DECODE, pages_total=1024, max_running=64)

        def join() -> None:
            router.register(new, 0.3)
            router.heartbeat(beat("d9", pages_free=FREE), 0.3)

        def leave() -> None:
            router.fleet.deregister("d0", "e1")
            router.advance(0.3)

        blocked = beat("d0", state=WorkerState.NOT_READY, pages_free=FREE, reason="why")
        events = {
            "registration": join,
            "removal": leave,
            "not ready": lambda: router.heartbeat(blocked, 0.3),
        }
        return calls_of(events[name])

    few, many = calls(16), calls(256)
    assert many <= 1.2 * few, f"{few} calls with 16 queued requests, {many} with 256"


def test_claims_are_computed_again_over_several_events() -> None:
    """The only decode worker leaves, so that no worker can serve the queued requests."""
    queued = 3 * MAX_RECLAIMED
    router = Loaded(1, queued).router
    router.fleet.deregister("d0", "e1")
    left = []
    while len(router.queue):
        router.advance(0.3)
        left.append(len(router.queue))
    assert left == [2 * MAX_RECLAIMED, MAX_RECLAIMED, 0]


def test_requests_that_wait_for_other_workers_are_not_examined() -> None:
    """Small workers stay open while only large requests are queued."""

    def router(queued: int) -> Dispatcher:
        loaded = Loaded(4, 0)
        for number in range(queued):
            loaded.submit(TOO_MUCH, tenant=f"t{number % 4}")
        for role, name in ((Role.PREFILL, "q0"), (Role.DECODE, "e0")):
            small = registration(name, role, pages_total=8)
            loaded.router.register(small, 0.2)
            loaded.router.heartbeat(beat(name, pages_free=8), 0.2)
        for _ in range(queued // MAX_RECLAIMED):
            loaded.router.advance(0.2)
        return loaded.router

    few, many = map(router, (16, 256))
    full = beat("e0", pages_free=8)
    first, second = (calls_of(partial(one.heartbeat, full, 0.3)) for one in (few, many))
    assert second <= 1.2 * first


def test_queue_is_examined_only_after_a_change_of_the_workers_or_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = Loaded(2, 16)
    router, examined = loaded.router, 0

    def ordered(wanted: Callable[[PendingPlacement], bool]) -> Iterator[PendingPlacement]:
        nonlocal examined
        examined += 1
        return PlacementQueue.ordered(router.queue, wanted)

    monkeypatch.setattr(router.queue, "ordered", ordered)
    router.advance(0.3)
    examined = 0
    router.advance(0.4)
    assert examined == 0
    loaded.event("heartbeat")()
    assert examined == 1
    loaded.event("submit")()
    assert examined == 2
    loaded.event("tick")()
    assert examined == 2
