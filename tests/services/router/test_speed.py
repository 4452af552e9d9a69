"""Measured speed: what larger steps explain is not slowness, and slowness is forgotten."""

from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.placement import Role, StepPace
from services.router.capacity import Demand, WorkerSnapshot
from services.router.choice import PolicyName
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import Pair
from services.router.roster import Claim, Reason
from services.router.speed import HALF_LIFE_S, NOTICEABLE, noticeable, slowdown
from tests.services.router.samples import beat, place, registration, worker
from tests.services.router.test_policy import demands, fleets

CLOSE = 1e-6  # relative error of products of floats


@dataclass(frozen=True)
class Machine:
    """Duration of a step as a linear function of its size, in seconds."""

    fixed: float
    per_token: float
    per_context: float

    def pace(self, tokens: float, context: float, factor: float = 1.0) -> StepPace:
        step_s = self.fixed + self.per_token * tokens + self.per_context * context
        return StepPace(step_s=factor * step_s, tokens=tokens, context=context)


machines = st.builds(
    Machine,
    fixed=st.floats(1e-4, 0.1),
    per_token=st.floats(0, 1e-2),
    per_context=st.floats(0, 1e-4),
)
sizes = st.tuples(st.floats(1, 2048), st.floats(1, 1e6))
factors = st.floats(1, 100)


@given(machines, sizes, st.lists(sizes, max_size=5))
def test_workers_of_equal_speed_are_never_slow_however_their_steps_differ(
    machine: Machine, own: tuple[float, float], others: list[tuple[float, float]]
) -> None:
    found = slowdown(machine.pace(*own), [machine.pace(*size) for size in others])
    assert 1.0 <= found <= 1.0 + CLOSE


@given(machines, factors, sizes, st.lists(sizes, min_size=1, max_size=5))
def test_slowdown_is_at_most_the_factor_and_equal_to_it_for_steps_of_one_size(
    machine: Machine, factor: float, own: tuple[float, float], others: list[tuple[float, float]]
) -> None:
    slow = machine.pace(*own, factor)
    beside = [machine.pace(*size) for size in others]
    assert slowdown(slow, beside) <= factor * (1 + CLOSE)
    assert slowdown(slow, [*beside, machine.pace(*own)]) == pytest.approx(factor)


@given(factors, st.floats(0, 1000), st.floats(0, 1000))
def test_slowdown_of_an_idle_worker_decays_towards_that_of_a_new_one(
    factor: float, idle_s: float, longer_s: float
) -> None:
    machine = Machine(0.01, 0.0, 0.0)

    def after(seconds: float) -> float:
        pace = machine.pace(1, 1, factor).model_copy(update={"idle_s": seconds})
        return slowdown(pace, [machine.pace(1, 1)])

    assert after(idle_s + longer_s) <= after(idle_s) * (1 + CLOSE)
    assert after(HALF_LIFE_S) == pytest.approx(factor**0.5)
    assert noticeable(after(20 * HALF_LIFE_S)) == slowdown(None, [machine.pace(1, 1)]) == 1.0


@settings(max_examples=200)
@given(fleets(), demands, st.sampled_from(PolicyName), st.integers(0, 9))
def test_paces_of_equal_workers_change_no_placement(
    fleet: list[WorkerSnapshot], demand: Demand, policy: PolicyName, seed: int
) -> None:
    """Small differences are not noticeable, so that random choices stay the same as well."""
    fleet = [replace(w, slowdown=noticeable(1.0 + 0.9 * (i % 2))) for i, w in enumerate(fleet)]
    unmeasured = [replace(w, slowdown=1.0) for w in fleet]
    found = (place(demand, each, policy, Random(seed)) for each in (fleet, unmeasured))
    assert len({_names(result) for result in found}) == 1


@settings(max_examples=60)
@given(fleets(), demands, st.integers(0, 9), st.floats(NOTICEABLE, 100))
def test_worker_that_becomes_slower_gets_no_request_that_it_did_not_get_before(
    fleet: list[WorkerSnapshot], demand: Demand, seed: int, factor: float
) -> None:
    for index, changed in enumerate(fleet):
        slow = [*fleet[:index], replace(changed, slowdown=factor), *fleet[index + 1 :]]
        before, after = (
            {_names(place(demand, each, PolicyName.SHORTEST_QUEUE, Random(seed + i)))
             for i in range(8)}
            for each in (fleet, slow)
        )  # fmt: skip
        own = {(changed.worker_id, "prefill"), (changed.worker_id, "decode")}
        gained = (_tasks(after) - _tasks(before)) & own
        assert not gained or len(before) > 1


def _tasks(placements: set[tuple[str, ...] | None]) -> set[tuple[str, str]]:
    """Return the workers that prefill and decode. A worker may do both for a request."""
    ends = [(pair[0], pair[-1]) for pair in placements if pair]
    return {(first, "prefill") for first, _ in ends} | {(last, "decode") for _, last in ends}


def _names(result: object) -> tuple[str, ...] | None:
    if not isinstance(result, Pair):
        return None
    return tuple(worker.worker_id for worker, _ in result.roles)


def chosen(role: Role, *workers: WorkerSnapshot) -> str:
    """Return the worker with this role that gets a request of 100 tokens."""
    other = worker("other", Role.DECODE if role is Role.PREFILL else Role.PREFILL)
    pair = place(Demand(100, 1), [other, *workers], PolicyName.SHORTEST_QUEUE, Random(0))
    assert isinstance(pair, Pair)
    return next(w.worker_id for w, served in pair.roles if served is role)


def test_prompts_are_shared_in_proportion_to_the_measured_speed() -> None:
    """The request itself counts: a fast worker with a queue may still be done first."""
    slow = replace(worker("slow", Role.PREFILL), slowdown=10.0)
    for queue_tokens, expected in ((899, "fast"), (901, "slow")):
        assert chosen(Role.PREFILL, slow, worker("fast", Role.PREFILL, queue_tokens)) == expected


@pytest.mark.parametrize(
    ("may_wait", "queued", "placed"), [(True, 0, False), (True, 901, True), (False, 0, True)]
)
def test_prompt_waits_for_a_fast_worker_unless_that_takes_longer_or_it_must_not_wait(
    may_wait: bool, queued: int, placed: bool
) -> None:
    slow = replace(worker("slow", Role.PREFILL), slowdown=10.0)
    busy = replace(
        worker("fast", Role.PREFILL), pending_prompt_tokens=100, max_pending_prompt_tokens=50.0
    )
    fleet = [slow, busy, worker("d", Role.DECODE)]
    demand = Demand(100, 1, may_wait=may_wait)
    found = place(demand, fleet, PolicyName.SHORTEST_QUEUE, Random(0), queued=queued)
    if placed:
        assert isinstance(found, Pair)
        assert found.prefill is slow
    else:
        assert isinstance(found, Claim)
        assert (found.reason, found.candidates) == (Reason.BUSY, frozenset({"d"}))


def test_slow_worker_decodes_only_if_the_batches_of_the_others_are_full() -> None:
    slow = replace(worker("slow", Role.DECODE), slowdown=2.0, max_running=4)
    for queue_tokens, expected in ((399, "fast"), (401, "slow")):
        assert chosen(Role.DECODE, slow, worker("fast", Role.DECODE, queue_tokens)) == expected


def test_overflow_counts_the_speed_of_the_decode_worker() -> None:
    prefill = replace(worker("p", Role.PREFILL), decodes=True)
    decode = replace(worker("d", Role.DECODE, 60), overflow_tokens=100)
    for factor, alone in ((1.0, False), (2.0, True)):
        fleet = [prefill, replace(decode, slowdown=factor)]
        pair = place(Demand(10, 1), fleet, PolicyName.SHORTEST_QUEUE, Random(0))
        assert isinstance(pair, Pair)
        assert (pair.prefill is None) is alone


class Heartbeats:
    """A fleet of which workers with one role and model report their pace."""

    def __init__(self) -> None:
        self.fleet = Fleet(FleetLimits())
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
            self.fleet.register(registration(name, role), 0.0)
            self.fleet.heartbeat(beat(name), 0.0)

    def report(self, name: str, step_s: float, idle_s: float = 0.0) -> None:
        pace = StepPace(step_s=step_s, tokens=1, context=10, idle_s=idle_s)
        self.fleet.heartbeat(beat(name, pace=pace, inter_token_s=step_s), 0.0)

    def slowdowns(self) -> dict[str, float]:
        return {w.worker_id: w.slowdown for w in self.fleet.snapshots(0.0)}


def test_fleet_compares_workers_with_the_same_role_and_says_why_one_gets_few_requests() -> None:
    site = Heartbeats()
    site.report("p0", 5.0)
    site.report("d0", 0.012)
    site.report("d1", 0.12)
    assert site.slowdowns() == {"p0": 1.0, "d0": 1.0, "d1": pytest.approx(10)}
    views = {view.worker_id: view for view in site.fleet.views(0.0)}
    assert views["d1"].inter_token_s == 0.12
    assert views["d1"].slowdown == pytest.approx(10)
    assert views["d1"].reason == "its steps take 10.0 times as long as on the fastest"
    assert views["d0"].reason is None
    assert views["d1"].state == "ready"


def test_slow_worker_is_tried_again_after_a_while_and_gets_its_share_once_it_is_fast() -> None:
    site = Heartbeats()
    site.report("d0", 0.012)
    site.report("d1", 0.12)
    site.report("d1", 0.12, idle_s=3 * HALF_LIFE_S)
    assert site.slowdowns()["d1"] == 1.0
    site.report("d1", 0.12)
    assert site.slowdowns()["d1"] == pytest.approx(10)
    site.report("d1", 0.013)
    assert site.slowdowns() == {"p0": 1.0, "d0": 1.0, "d1": 1.0}
