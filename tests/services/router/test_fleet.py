"""Fleet: accounting of placements, epochs and expiry."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from services.common.placement import Outcome, Placement, Release, Role, WorkerState
from services.router.capacity import Demand, WorkerHealth, WorkerSnapshot
from services.router.errors import Refusal
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import Pair
from tests.services.router.samples import beat, has_capacity, registration

LIMITS = FleetLimits(
    suspect_after_s=1.0,
    gone_after_s=4.0,
    probation_s=0.5,
    probation_max_s=2.0,
    placement_ttl_s=3.0,
    max_placements=50,
    max_workers=3,
)
DEMAND = Demand(prompt_tokens=17, max_tokens=16)  # prefill: 17 tokens; decode: 32 tokens, 2 pages


def fleet_of(*names: str, limits: FleetLimits = LIMITS, now: float = 0.0) -> Fleet:
    """Return a fleet of ready workers. The first letter of a name selects the role."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}
    fleet = Fleet(limits)
    for name in names:
        fleet.register(registration(name, roles[name[0]]), now)
        assert fleet.heartbeat(beat(name), now)
    return fleet


def snapshot(fleet: Fleet, worker_id: str, now: float = 0.0) -> WorkerSnapshot:
    return next(w for w in fleet.snapshots(now) if w.worker_id == worker_id)


def promise(fleet: Fleet, placement_id: str, now: float = 0.0) -> Placement:
    pair = Pair(snapshot(fleet, "p0"), snapshot(fleet, "d0"))
    return fleet.promise(pair, DEMAND, placement_id, now)


def load(fleet: Fleet, worker_id: str, now: float = 0.0) -> tuple[int, int, int]:
    worker = snapshot(fleet, worker_id, now)
    return worker.queue_tokens, worker.pages_free[0], worker.slots


@pytest.mark.parametrize(
    ("name", "role", "taken"),
    [("p0", Role.PREFILL, False), ("c0", Role.COLOCATED, False), ("d0", Role.DECODE, True)],
)
def test_prompts_wait_in_the_router_while_a_worker_has_enough_to_compute(
    name: str, role: Role, taken: bool
) -> None:
    fleet = fleet_of(name, limits=FleetLimits(prompt_backlog_s=0.5))
    assert has_capacity(snapshot(fleet, name), DEMAND, role)
    fleet.heartbeat(beat(name, pending_prompt_tokens=900), 0.1)
    assert has_capacity(snapshot(fleet, name), DEMAND, role), "the rate is unknown"
    fleet.heartbeat(beat(name, pending_prompt_tokens=499, prompt_tokens_per_s=1000), 0.1)
    assert has_capacity(snapshot(fleet, name), DEMAND, role)
    fleet.heartbeat(beat(name, pending_prompt_tokens=500, prompt_tokens_per_s=1000), 0.1)
    assert has_capacity(snapshot(fleet, name), DEMAND, role) is taken
    fleet.heartbeat(beat(name, pending_prompt_tokens=0, prompt_tokens_per_s=1e-3), 0.1)
    assert has_capacity(snapshot(fleet, name), DEMAND, role), "an idle worker is slow, but free"


def test_released_placements_are_not_remembered_until_they_would_expire() -> None:
    limits = FleetLimits(placement_ttl_s=3600.0, max_placements=2)
    fleet = fleet_of("p0", "d0", limits=limits)
    for number in range(9):
        placed = promise(fleet, str(number))
        release = Release(placement_id=placed.placement_id, outcome=Outcome.CANCELLED)
        fleet.release(release, 1.0)
    assert not fleet._expiries
    for number in range(9):
        promise(fleet, f"dropped-{number}")
    assert len(fleet._expiries) == limits.max_placements
    fleet.expire(3600.0)
    assert not fleet._expiries


def test_promised_prompts_count_until_they_are_admitted() -> None:
    fleet = fleet_of("p0", "d0", limits=FleetLimits(prompt_backlog_s=0.5))
    fleet.heartbeat(beat("p0", prompt_tokens_per_s=60), 0.1)
    for placement_id in "ab":
        assert has_capacity(snapshot(fleet, "p0"), DEMAND, Role.PREFILL)
        promise(fleet, placement_id)
    assert not has_capacity(snapshot(fleet, "p0"), DEMAND, Role.PREFILL), "34 of 30 tokens"
    fleet.heartbeat(
        beat("p0", prompt_tokens_per_s=60, pending_prompt_tokens=3, admitted=["a", "b"]), 0.2
    )
    assert has_capacity(snapshot(fleet, "p0"), DEMAND, Role.PREFILL)
    promise(fleet, "c")
    fleet.release(Release(placement_id="c", outcome=Outcome.CANCELLED), 0.3)
    assert snapshot(fleet, "p0").pending_prompt_tokens == 3


def test_prompts_on_their_way_to_a_worker_do_not_let_it_idle() -> None:
    fleet = fleet_of("p0", "d0", limits=FleetLimits(prompt_backlog_s=0.5))
    fleet.heartbeat(beat("p0", prompt_tokens_per_s=60), 0.0)
    assert snapshot(fleet, "p0").max_pending_prompt_tokens == 30
    for number in range(200):  # each is admitted after a second
        promise(fleet, str(number), now=float(number))
        fleet.heartbeat(beat("p0", prompt_tokens_per_s=60, admitted=[str(number)]), number + 1.0)
    assert snapshot(fleet, "p0").max_pending_prompt_tokens == pytest.approx(60 * 1.5, rel=0.01)


def test_a_prompt_that_its_decode_worker_computes_is_not_expected_by_the_prefill_worker() -> None:
    fleet = fleet_of("p0", "d0", "d1")
    for placement_id in "ab":
        promise(fleet, placement_id)
    assert load(fleet, "p0")[0] == 34
    fleet.heartbeat(beat("d1", computed_here=["a"]), 0.1)
    assert load(fleet, "p0")[0] == 34, "another worker's placement"
    for _ in range(2):
        fleet.heartbeat(beat("d0", computed_here=["a", "unknown"]), 0.1)
        assert load(fleet, "p0") == (17, 62, 1)
        assert load(fleet, "d0")[0] == 64, "it is not admitted yet"
    fleet.heartbeat(beat("d0", queue_tokens=32, admitted=["a"]), 0.2)
    assert load(fleet, "d0")[0] == 64
    fleet.release(Release(placement_id="a", outcome=Outcome.OK), 0.3)
    fleet.heartbeat(beat("d0", computed_here=["a"]), 0.4)
    assert load(fleet, "p0")[0] == 17


def test_prompt_that_its_decode_worker_postpones_does_not_occupy_the_prefill_worker() -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    fleet.heartbeat(beat("d0", admitted=["a"], postponed=["a"]), 0.1)
    assert load(fleet, "p0") == (0, 64, 0)
    fleet.heartbeat(beat("p0", admitted=["a"], queue_tokens=100), 0.2)
    assert load(fleet, "p0")[0] == 100


def test_placement_whose_stream_has_ended_counts_no_longer() -> None:
    """Its gateway may have been killed before the prefill worker was asked."""
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    fleet.heartbeat(beat("d0", admitted=["a"], ended=["a", "unknown"]), 0.1)
    assert load(fleet, "p0") == load(fleet, "d0") == (0, 64, 0)
    assert fleet.idle
    gone = Release(placement_id="a", outcome=Outcome.FAILED, blame="d0")
    assert fleet.release(gone, 0.2) == 0.2
    assert snapshot(fleet, "d0", 0.2).health is WorkerHealth.PROBATION


def test_placements_of_another_router_count_with_the_next_heartbeat() -> None:
    one, other = fleet_of("p0", "d0"), fleet_of("p0", "d0")
    for placement_id in "abc":
        promise(one, placement_id)
    assert load(other, "d0") == (0, 64, 0)
    report = beat("d0", queue_tokens=96, pages_free=58, running=3, admitted=["a", "b", "c"])
    for fleet in (one, other):
        fleet.heartbeat(report, 0.25)
        assert load(fleet, "d0") == (96, 58, 3)


def test_a_placement_counts_until_each_worker_admits_it() -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    promise(fleet, "b")
    assert load(fleet, "p0") == (34, 60, 2)
    assert load(fleet, "d0") == (64, 60, 2)
    fleet.heartbeat(beat("d0", queue_tokens=40, pages_free=61, running=1, admitted=["a"]), 0.1)
    assert load(fleet, "d0") == (40 + 32, 61 - 2, 2)
    assert load(fleet, "p0") == (34, 60, 2), "the prefill worker has not admitted it yet"
    fleet.heartbeat(beat("p0", queue_tokens=5, admitted=["a", "a", "from-another-router"]), 0.2)
    assert load(fleet, "p0") == (5 + 17, 62, 1)


def test_every_choice_takes_a_slot_and_its_own_pages() -> None:
    fleet = fleet_of("p0", "d0")
    demand = Demand(prompt_tokens=17, max_tokens=16, choices=3)
    pair = Pair(snapshot(fleet, "p0"), snapshot(fleet, "d0"))
    fleet.promise(pair, demand, "a", 0.0)
    assert load(fleet, "d0") == (96, 64 - 4, 3)
    assert load(fleet, "p0") == (17, 64 - 2, 1)


@pytest.mark.parametrize("outcome", Outcome)
def test_released_placement_no_longer_counts_and_is_released_once(outcome: Outcome) -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    for _ in range(2):
        fleet.release(Release(placement_id="a", outcome=outcome), 0.1)
        assert load(fleet, "d0") == load(fleet, "p0") == (0, 64, 0)
    fleet.heartbeat(beat("d0", admitted=["a"]), 0.2)
    assert load(fleet, "d0") == (0, 64, 0)


def test_unconfirmed_placement_expires() -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a", now=0.0)
    promise(fleet, "b", now=1.0)
    fleet.expire(2.9)
    assert load(fleet, "d0")[0] == 64
    fleet.expire(3.0)
    assert load(fleet, "d0")[0] == load(fleet, "p0")[0] + 15 == 32


def test_placements_are_bounded_and_the_oldest_is_dropped() -> None:
    fleet = fleet_of("p0", "d0")
    for index in range(60):
        promise(fleet, f"a{index}")
    assert load(fleet, "d0") == (50 * 32, 64 - 100, 50)


def test_new_epoch_replaces_the_old_one() -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    fleet.register(registration("d0", Role.DECODE, epoch="e2"), 1.0)
    assert snapshot(fleet, "d0", 1.0).health is WorkerHealth.STARTING
    fleet.heartbeat(beat("d0", epoch="e2"), 1.0)
    assert load(fleet, "d0") == (0, 64, 0)
    fleet.release(Release(placement_id="a", outcome=Outcome.FAILED, blame="d0"), 1.1)
    assert snapshot(fleet, "d0", 1.1).health is WorkerHealth.READY, "the new epoch did not fail"
    for stale in (
        lambda: fleet.heartbeat(beat("d0"), 1.2),
        lambda: fleet.register(registration("d0", Role.DECODE), 1.2),
    ):
        with pytest.raises(Refusal, match="has ended"):
            stale()
    fleet.deregister("d0", "e1")
    assert fleet.views(1.2)[-1].epoch == "e2", "an old epoch cannot deregister the new one"


def test_worker_that_is_not_ready_keeps_its_reason_and_gets_no_requests() -> None:
    fleet = fleet_of("d0")
    blocked = beat("d0", state=WorkerState.NOT_READY, reason="no landing slots")
    fleet.heartbeat(blocked, 1.0)
    assert snapshot(fleet, "d0", 1.0).health is WorkerHealth.NOT_READY
    demand = Demand(prompt_tokens=1, max_tokens=1)
    assert not has_capacity(snapshot(fleet, "d0", 1.0), demand, Role.DECODE)
    (view,) = fleet.views(1.0)
    assert (view.state, view.reason) == ("not_ready", "no landing slots")
    fleet.heartbeat(beat("d0"), 2.0)
    assert snapshot(fleet, "d0", 2.0).health is WorkerHealth.READY


def test_stale_epoch_cannot_replace_a_newer_one() -> None:
    fleet = fleet_of("d0")
    assert [w.worker_id for w in fleet.expire(4.1)] == ["d0"]
    fleet.register(registration("d0", Role.DECODE, epoch="e2"), 5.0)
    with pytest.raises(Refusal, match="has ended"):
        fleet.register(registration("d0", Role.DECODE, epoch="e1"), 6.0)


def test_silent_worker_may_return_in_the_same_epoch() -> None:
    fleet = fleet_of("d0")
    fleet.expire(4.1)
    assert not fleet.heartbeat(beat("d0"), 5.0), "the worker must register again"
    fleet.register(registration("d0", Role.DECODE), 5.0)
    assert fleet.heartbeat(beat("d0"), 5.0)


def test_registering_twice_keeps_the_promises() -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    fleet.register(registration("d0", Role.DECODE), 0.5)
    assert load(fleet, "d0") == (32, 62, 1)


def test_silent_worker_becomes_suspect_then_is_removed() -> None:
    fleet = fleet_of("d0")
    assert snapshot(fleet, "d0", 1.0).health is WorkerHealth.READY
    assert snapshot(fleet, "d0", 1.001).health is WorkerHealth.SUSPECT
    assert fleet.expire(4.0) == []
    fleet.heartbeat(beat("d0"), 4.0)
    assert snapshot(fleet, "d0", 4.0).health is WorkerHealth.READY
    assert [w.worker_id for w in fleet.expire(8.001)] == ["d0"]
    assert fleet.snapshots(8.001) == []


def test_view_has_the_reported_state_and_reason() -> None:
    fleet = Fleet(LIMITS)
    fleet.register(registration("d0", Role.DECODE), 0.0)
    assert fleet.views(0.0)[0].state == "starting"
    fleet.heartbeat(beat("d0", state=WorkerState.STARTING, reason="codebook differs"), 0.0)
    assert (fleet.views(0.0)[0].state, fleet.views(0.0)[0].reason) == (
        "starting",
        "codebook differs",
    )
    fleet.heartbeat(beat("d0", state=WorkerState.DRAINING), 0.0)
    assert fleet.views(0.0)[0].state == "draining"


def fail(fleet: Fleet, placement_id: str, placed: float, failed: float) -> None:
    promise(fleet, placement_id, placed)
    failure = Release(placement_id=placement_id, outcome=Outcome.FAILED, blame="d0")
    fleet.release(failure, failed)


def health(fleet: Fleet, now: float) -> WorkerHealth:
    for name in ("p0", "d0"):
        fleet.heartbeat(beat(name), now)
    return snapshot(fleet, "d0", now).health


def test_failures_double_the_probation_and_success_resets_it() -> None:
    fleet = fleet_of("p0", "d0")
    now = 10.0
    for number, pause_s in enumerate((0.5, 1.0, 2.0, 2.0)):
        fail(fleet, f"f{number}", now, now)
        assert health(fleet, now + pause_s - 0.001) is WorkerHealth.PROBATION
        now += pause_s
        assert health(fleet, now) is WorkerHealth.READY
    promise(fleet, "good", now)
    fleet.release(Release(placement_id="good", outcome=Outcome.OK), now)
    fail(fleet, "again", now, now)
    assert health(fleet, now + 0.5) is WorkerHealth.READY
    assert snapshot(fleet, "p0", now).health is WorkerHealth.READY, "it was not blamed"


def test_requests_that_fail_together_count_once() -> None:
    fleet = fleet_of("p0", "d0")
    for index in range(10):
        promise(fleet, f"a{index}")
    for index in range(10):
        release = Release(placement_id=f"a{index}", outcome=Outcome.FAILED, blame="d0")
        fleet.release(release, 0.1)
    assert health(fleet, 0.6) is WorkerHealth.READY


@pytest.mark.parametrize(
    ("outcome", "blame"),
    [
        (Outcome.REFUSED, "d0"),
        (Outcome.CANCELLED, "d0"),
        (Outcome.FAILED, None),
        (Outcome.FAILED, "d9"),
    ],
)
def test_only_a_blamed_failure_puts_a_worker_on_probation(
    outcome: Outcome, blame: str | None
) -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    fleet.release(Release(placement_id="a", outcome=outcome, blame=blame), 0.1)
    assert health(fleet, 0.1) is WorkerHealth.READY


def test_workers_are_bounded_but_a_restart_is_accepted() -> None:
    fleet = fleet_of("p0", "d0", "c0")
    with pytest.raises(Refusal, match="the limit is max_workers"):
        fleet.register(registration("d1", Role.DECODE), 0.0)
    fleet.register(registration("d0", Role.DECODE, epoch="e2"), 0.0)
    fleet.deregister("c0", "e1")
    fleet.register(registration("d1", Role.DECODE), 0.0)


class Accounting(RuleBasedStateMachine):
    """Stateful test: random placements, heartbeats, releases and restarts.

    The load of each worker must equal that of its open placements.
    """

    placements = Bundle("placements")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = fleet_of("p0", "d0", limits=FleetLimits())
        self.epochs = {"p0": 1, "d0": 1}
        self.open: dict[str, set[str]] = {"p0": set(), "d0": set()}
        self.count = 0

    @rule(target=placements)
    def place(self) -> str:
        self.count += 1
        name = f"a{self.count}"
        promise(self.fleet, name)
        for ids in self.open.values():
            ids.add(name)
        return name

    @rule(worker=st.sampled_from(["p0", "d0"]), admitted=st.lists(placements, max_size=3))
    def heartbeat(self, worker: str, admitted: list[str]) -> None:
        epoch = f"e{self.epochs[worker]}"
        assert self.fleet.heartbeat(beat(worker, epoch=epoch, admitted=admitted), 0.0)
        self.open[worker] -= set(admitted)

    @rule(placement=placements, outcome=st.sampled_from([Outcome.OK, Outcome.CANCELLED]))
    def release(self, placement: str, outcome: Outcome) -> None:
        self.fleet.release(Release(placement_id=placement, outcome=outcome), 0.0)
        for ids in self.open.values():
            ids.discard(placement)

    @rule(worker=st.sampled_from(["p0", "d0"]))
    def restart(self, worker: str) -> None:
        self.epochs[worker] += 1
        role = Role.PREFILL if worker == "p0" else Role.DECODE
        epoch = f"e{self.epochs[worker]}"
        self.fleet.register(registration(worker, role, epoch=epoch), 0.0)
        self.fleet.heartbeat(beat(worker, epoch=epoch), 0.0)
        self.open[worker].clear()

    @invariant()
    def load_matches_open_placements(self) -> None:
        for worker, tokens in (("p0", 17), ("d0", 32)):
            count = len(self.open[worker])
            assert load(self.fleet, worker) == (tokens * count, 64 - 2 * count, count)


Accounting.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAccounting = Accounting.TestCase
