"""Place calls that would wait too long are refused at once, tenant by tenant."""

from random import Random
from typing import Any

from services.common.placement import Outcome, Placement, Release, Role
from services.common.router_errors import ErrorCode
from services.router.admission import Admission, AdmissionLimits
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.fleet import Fleet, FleetLimits
from services.router.queue import PendingPlacement, PlacementQueue
from tests.services.router.samples import beat, is_refusal, place_request, registration

RATE = 10  # calls that the worker finishes in a second


class Service:
    """A dispatcher with one worker that always has room for one more call every 1 / `RATE` s."""

    def __init__(self, *, bound: int = 1000, shed_after_s: float = 2.0, ratio: float = 0.0) -> None:
        self.now = 0.0
        self.router = Dispatcher(
            Fleet(FleetLimits(suspect_after_s=1e9, gone_after_s=2e9)),
            PlacementQueue(bound),
            PolicyName.SHORTEST_QUEUE,
            Random(0),
            output_reserve=256,
            max_wait_s=60.0,
            admission=Admission(AdmissionLimits(shed_after_s, ratio)),
        )
        self.router.register(registration("c0", Role.COLOCATED), 0.0)
        self.router.heartbeat(beat("c0", pages_free=0), 0.0)
        self.waits: dict[PendingPlacement, float] = {}
        self._calls: list[PendingPlacement] = []
        self._admitted: list[str] = []

    def submit(self, **changes: Any) -> PendingPlacement:
        call = self.router.submit(place_request(**({"wait_s": 60} | changes)), self.now)
        self._calls.append(call)
        return call

    def advance(self) -> None:
        """Let the worker take one more call."""
        self.now += 1 / RATE
        self.router.heartbeat(beat("c0", pages_free=2, admitted=self._admitted), self.now)
        placed = [call for call in self._calls if isinstance(call.answer, Placement)]
        self._admitted = [c.answer.placement_id for c in placed if isinstance(c.answer, Placement)]
        self._calls = [call for call in self._calls if call.answer is None]
        self.waits |= {call: self.now - call.arrived for call in placed}

    def overload(self, seconds: float, times: int, tenant: str | None) -> list[PendingPlacement]:
        """Submit ``times`` as many calls as the worker finishes."""
        calls = []
        for _ in range(round(seconds * RATE)):
            calls += [self.submit(tenant=tenant) for _ in range(times)]
            self.advance()
        return calls


def test_wait_stays_under_the_limit_at_three_times_the_capacity() -> None:
    service = Service()
    service.overload(10, 3, "a")
    probes = []
    for _ in range(50):
        probes += [service.submit(tenant="a") for _ in range(3)]
        service.advance()
    refused = [call for call in probes if is_refusal(call.answer, ErrorCode.QUEUE_FULL)]
    assert 80 <= len(refused) <= 120, "two of three calls are refused, at once"
    while len(service.router.queue):
        service.advance()
    assert max(service.waits[call] for call in probes if call not in refused) <= 2.5


def test_refusal_says_when_to_retry() -> None:
    service = Service(shed_after_s=5.0)
    calls = service.overload(20, 3, "a")
    refusal = calls[-1].answer
    assert is_refusal(refusal, ErrorCode.QUEUE_FULL)
    assert refusal.retry_after_s in (5, 6), "the time after which the queue is empty"


def test_first_overload_is_shed_although_the_rate_is_unknown() -> None:
    service = Service()
    service.submit(tenant="a")
    service.now = 0.5
    assert service.submit(tenant="a").answer is None
    service.now = 2.1
    assert is_refusal(service.submit(tenant="a").answer, ErrorCode.QUEUE_FULL), (
        "the first waits for 2.1 s"
    )


def test_overload_of_one_tenant_does_not_shed_another() -> None:
    service = Service()
    service.overload(10, 3, "flood")
    others: list[PendingPlacement] = []
    for step in range(100):
        for _ in range(3):
            service.submit(tenant="flood")
        if step % 10 == 0:  # a tenth of the capacity
            others.append(service.submit(tenant="other"))
        service.advance()
    assert all(isinstance(call.answer, Placement) for call in others)
    assert max(service.waits[call] for call in others) <= 0.3


def test_full_queue_refuses_the_last_call_of_the_tenant_with_most_tokens() -> None:
    service = Service(bound=4)
    flood = [service.submit(tenant="flood") for _ in range(4)]
    other = service.submit(tenant="other")
    assert other.answer is None
    assert is_refusal(flood[-1].answer, ErrorCode.QUEUE_FULL)
    assert [call.answer for call in flood[:-1]] == [None] * 3
    assert is_refusal(service.submit(tenant="flood").answer, ErrorCode.QUEUE_FULL)
    assert [call.answer for call in flood[:-1]] == [None] * 3, "calls that wait are not replaced"


def test_admitted_requests_are_not_shed() -> None:
    service = Service()
    service.overload(10, 3, "a")
    assert is_refusal(
        [service.submit(tenant="a") for _ in range(3)][-1].answer, ErrorCode.QUEUE_FULL
    )
    assert service.submit(tenant="a", admitted=True).answer is None


def test_large_request_may_wait_alone() -> None:
    service = Service()
    service.overload(10, 1, "a")
    assert service.submit(tenant="a", prompt_tokens=900).answer is None


def test_limit_grows_with_the_time_of_requests_on_workers() -> None:
    limits = AdmissionLimits(shed_after_s=2.0, shed_ratio=0.5)
    admission = Admission(limits)
    assert admission.limit_s == 2.0
    for _ in range(100):
        admission.ended(20.0)
    assert admission.limit_s == 10.0


def test_time_on_workers_is_measured_from_placement_to_success() -> None:
    service = Service(ratio=0.5)
    service.router.heartbeat(beat("c0"), 0.0)
    placed = service.submit().answer
    failed = service.submit().answer
    assert isinstance(placed, Placement)
    assert isinstance(failed, Placement)
    end = Release(placement_id=failed.placement_id, outcome=Outcome.FAILED)
    service.router.release(end, 1.0)
    assert service.router.admission.limit_s == 2.0
    end = Release(placement_id=placed.placement_id, outcome=Outcome.OK)
    service.router.release(end, 20.0)
    assert service.router.admission.limit_s == 10.0


def _stall(service: Service, seconds: float) -> None:
    """Queue calls while the worker has no free pages, then let it finish all of them."""
    calls = [service.submit() for _ in range(10)]
    for _ in range(round(seconds)):
        service.now += 1.0
        service.router.heartbeat(beat("c0", pages_free=0, running=1), service.now)
        service.router.advance(service.now)
    while len(service.router.queue):
        service.advance()
    for call in calls:
        if isinstance(call.answer, Placement):
            ended = Release(placement_id=call.answer.placement_id, outcome=Outcome.OK)
            service.router.release(ended, service.now)


def test_requests_are_not_shed_after_a_stall_once_workers_are_idle() -> None:
    service = Service()
    _stall(service, 20)
    service.router.heartbeat(beat("c0", pages_free=2), service.now)
    service.router.advance(service.now)  # all workers are idle
    burst = [service.submit() for _ in range(15)]
    assert not any(is_refusal(call.answer, ErrorCode.QUEUE_FULL) for call in burst)


def test_rate_of_a_stall_is_forgotten_while_nothing_is_queued() -> None:
    service = Service()
    _stall(service, 20)
    assert is_refusal([service.submit() for _ in range(15)][-1].answer, ErrorCode.QUEUE_FULL)
    while len(service.router.queue):
        service.advance()
    service.now += 60
    service.router.heartbeat(beat("c0", pages_free=0, running=1), service.now)  # a long answer
    service.router.advance(service.now)
    burst = [service.submit() for _ in range(15)]
    assert not any(is_refusal(call.answer, ErrorCode.QUEUE_FULL) for call in burst)
