"""Accounting is exact under any interleaving, lives do not mix, and time ends what it should."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from services.common.placement import Outcome, Placement, Release, Role, WorkerState
from services.router.errors import QueueFull, StaleEpoch
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import Demand, Pair, Standing, WorkerSnapshot
from tests.services.router.samples import beat, registration

LIMITS = FleetLimits(
    suspect_after_s=1.0,
    gone_after_s=4.0,
    probation_s=0.5,
    probation_max_s=2.0,
    placement_ttl_s=3.0,
    max_placements=50,
    max_workers=3,
)
DEMAND = Demand(prompt_tokens=17, max_tokens=16)  # 17 tokens of prefill; 32 tokens, 2 pages


def fleet_of(*names: str, limits: FleetLimits = LIMITS, now: float = 0.0) -> Fleet:
    """Ready workers; the first letter of a name is that of its role."""
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
    return worker.queue_tokens, worker.pages_free, worker.seats


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


def test_every_choice_takes_a_seat_and_pages_of_its_own() -> None:
    fleet = fleet_of("p0", "d0")
    demand = Demand(prompt_tokens=17, max_tokens=16, choices=3)
    pair = Pair(snapshot(fleet, "p0"), snapshot(fleet, "d0"))
    fleet.promise(pair, demand, "a", 0.0)
    assert load(fleet, "d0") == (96, 64 - 4, 3)
    assert load(fleet, "p0") == (17, 64 - 2, 1)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_released_placement_counts_no_more_and_is_released_once(outcome: Outcome) -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    for _ in range(2):
        fleet.release(Release(placement_id="a", outcome=outcome), 0.1)
        assert load(fleet, "d0") == load(fleet, "p0") == (0, 64, 0)
    fleet.heartbeat(beat("d0", admitted=["a"]), 0.2)
    assert load(fleet, "d0") == (0, 64, 0)


def test_a_placement_nobody_confirms_expires() -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a", now=0.0)
    promise(fleet, "b", now=1.0)
    fleet.expire(2.9)
    assert load(fleet, "d0")[0] == 64
    fleet.expire(3.0)
    assert load(fleet, "d0")[0] == load(fleet, "p0")[0] + 15 == 32


def test_placements_are_bounded_and_the_oldest_gives_way() -> None:
    fleet = fleet_of("p0", "d0")
    for index in range(60):
        promise(fleet, f"a{index}")
    assert load(fleet, "d0") == (50 * 32, 64 - 100, 50)


def test_a_new_epoch_drops_the_old_life() -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    fleet.register(registration("d0", Role.DECODE, epoch="e2"), 1.0)
    assert snapshot(fleet, "d0", 1.0).standing is Standing.STARTING
    fleet.heartbeat(beat("d0", epoch="e2"), 1.0)
    assert load(fleet, "d0") == (0, 64, 0)
    fleet.release(Release(placement_id="a", outcome=Outcome.FAILED, blame="d0"), 1.1)
    assert snapshot(fleet, "d0", 1.1).standing is Standing.READY, "the new life did not fail"
    for stale in (
        lambda: fleet.heartbeat(beat("d0"), 1.2),
        lambda: fleet.register(registration("d0", Role.DECODE), 1.2),
    ):
        with pytest.raises(StaleEpoch):
            stale()
    fleet.deregister("d0", "e1")
    assert snapshot(fleet, "d0", 1.2).epoch == "e2", "an old life cannot sign off the new one"


def test_a_zombie_cannot_replace_a_life_that_began_while_it_was_gone() -> None:
    fleet = fleet_of("d0")
    assert [w.worker_id for w in fleet.expire(4.1)] == ["d0"]
    fleet.register(registration("d0", Role.DECODE, epoch="e2"), 5.0)
    with pytest.raises(StaleEpoch):
        fleet.register(registration("d0", Role.DECODE, epoch="e1"), 6.0)


def test_one_that_was_only_silent_may_return_in_the_same_epoch() -> None:
    fleet = fleet_of("d0")
    fleet.expire(4.1)
    assert not fleet.heartbeat(beat("d0"), 5.0), "told to register again"
    fleet.register(registration("d0", Role.DECODE), 5.0)
    assert fleet.heartbeat(beat("d0"), 5.0)


def test_registering_twice_keeps_what_was_promised() -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    fleet.register(registration("d0", Role.DECODE), 0.5)
    assert load(fleet, "d0") == (32, 62, 1)


def test_silence_makes_suspect_then_gone() -> None:
    fleet = fleet_of("d0")
    assert snapshot(fleet, "d0", 1.0).standing is Standing.READY
    assert snapshot(fleet, "d0", 1.001).standing is Standing.SUSPECT
    assert fleet.expire(4.0) == []
    fleet.heartbeat(beat("d0"), 4.0)
    assert snapshot(fleet, "d0", 4.0).standing is Standing.READY
    assert [w.worker_id for w in fleet.expire(8.001)] == ["d0"]
    assert fleet.snapshots(8.001) == []


def test_a_workers_own_state_and_reason_show() -> None:
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


def standing(fleet: Fleet, now: float) -> Standing:
    for name in ("p0", "d0"):
        fleet.heartbeat(beat(name), now)
    return snapshot(fleet, "d0", now).standing


def test_failures_double_the_probation_up_to_a_bound_and_success_clears_it() -> None:
    fleet, now = fleet_of("p0", "d0"), 10.0
    for number, pause_s in enumerate((0.5, 1.0, 2.0, 2.0)):
        fail(fleet, f"f{number}", now, now)
        assert standing(fleet, now + pause_s - 0.001) is Standing.PROBATION
        now += pause_s
        assert standing(fleet, now) is Standing.READY
    promise(fleet, "good", now)
    fleet.release(Release(placement_id="good", outcome=Outcome.OK), now)
    fail(fleet, "again", now, now)
    assert standing(fleet, now + 0.5) is Standing.READY
    assert snapshot(fleet, "p0", now).standing is Standing.READY, "it was not to blame"


def test_many_requests_that_one_fault_ends_count_once() -> None:
    fleet = fleet_of("p0", "d0")
    for index in range(10):
        promise(fleet, f"a{index}")
    for index in range(10):
        release = Release(placement_id=f"a{index}", outcome=Outcome.FAILED, blame="d0")
        fleet.release(release, 0.1)
    assert standing(fleet, 0.6) is Standing.READY


@pytest.mark.parametrize(
    ("outcome", "blame"),
    [
        (Outcome.REFUSED, "d0"),
        (Outcome.CANCELLED, "d0"),
        (Outcome.FAILED, None),
        (Outcome.FAILED, "d9"),
    ],
)
def test_only_a_blamed_failure_of_its_own_puts_a_worker_on_probation(
    outcome: Outcome, blame: str | None
) -> None:
    fleet = fleet_of("p0", "d0")
    promise(fleet, "a")
    fleet.release(Release(placement_id="a", outcome=outcome, blame=blame), 0.1)
    assert standing(fleet, 0.1) is Standing.READY


def test_workers_are_bounded_but_a_restart_always_finds_its_place() -> None:
    fleet = fleet_of("p0", "d0", "c0")
    with pytest.raises(QueueFull):
        fleet.register(registration("d1", Role.DECODE), 0.0)
    fleet.register(registration("d0", Role.DECODE, epoch="e2"), 0.0)
    fleet.deregister("c0", "e1")
    fleet.register(registration("d1", Role.DECODE), 0.0)


class Accounting(RuleBasedStateMachine):
    """Any order of placing, admitting, releasing and restarting, against a plain model."""

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
    def counts_exactly_what_is_open(self) -> None:
        for worker, tokens in (("p0", 17), ("d0", 32)):
            count = len(self.open[worker])
            assert load(self.fleet, worker) == (tokens * count, 64 - 2 * count, count)


Accounting.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAccounting = Accounting.TestCase
