"""Policies choose eligible pairs only. `shortest_queue` chooses the one with fewest tokens."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.pages.plan import PageCount, PagePlan
from services.common.placement import Role
from services.router.capacity import USABLE, Demand, WorkerHealth, WorkerSnapshot
from services.router.choice import PolicyName
from services.router.policy import Pair
from services.router.roster import Claim, Reason
from tests.services.router.samples import COMPATIBLE, model_info, place, worker

OTHER = COMPATIBLE.model_copy(update={"codec": "raw"})
ALL_POLICIES = list(PolicyName)


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerSnapshot]:
    count = draw(st.sampled_from([0, 1, 2, 4, 6, 6, 6, 8]))
    return [
        replace(
            worker(f"w{index}", draw(st.sampled_from(Role)), draw(st.integers(0, 3))),
            compatibility=draw(st.sampled_from([COMPATIBLE, COMPATIBLE, OTHER])),
            health=draw(st.sampled_from([*WorkerHealth, *[WorkerHealth.READY] * 8])),
            pages_total=PageCount(draw(st.sampled_from([4, 63, 200]))),
            pages_free=PageCount(draw(st.sampled_from([-1, 0, 1, 2, 3, 8, 60]))),
            slots=draw(st.sampled_from([0, 2, 4, 6, 7, 8, 9])),
            decodes=draw(st.booleans()),
            overflow_tokens=draw(st.sampled_from([None, 0, 1])),
            last_placement=draw(st.integers(0, 3)),
        )
        for index in range(count)
    ]


demands = st.builds(
    Demand,
    prompt_tokens=st.sampled_from([1, 15, 16, 17, 63, 63, 1000]),
    max_tokens=st.sampled_from([1, 16, 1000]),
    choices=st.integers(1, 3),
    model=st.sampled_from([None, *["small"] * 8, "large"]),
    exclude=st.frozensets(st.sampled_from(["w0", "w1", "w2"]), max_size=2),
    output_reserve=st.sampled_from([0, 1, 256]),
)


def takes(demand: Demand, w: WorkerSnapshot, reserved: frozenset[str], role: Role) -> bool:
    """Return whether a worker is eligible, by an independent implementation of the rules."""
    if role is not w.role and not (w.role is Role.PREFILL and role is Role.COLOCATED and w.decodes):
        return False
    kept = demand.prompt_tokens + min(demand.max_tokens - 1, demand.output_reserve)
    own = (kept + 15) // 16 - demand.prompt_tokens // 16
    now = demand.prompt_tokens // 16 + demand.choices * own
    whole = (demand.prompt_tokens + demand.max_tokens - 1 + 15) // 16
    if role is Role.PREFILL:
        fits = (demand.prompt_tokens + 15) // 16 <= w.pages_total[0]
    else:
        fits = now <= w.pages_free[0] and max(now, whole) <= w.pages_total[0]
        if w.role is Role.PREFILL and w.slots + demand.choices > w.max_running:
            fits = False
    return (
        fits
        and w.health in (WorkerHealth.READY, WorkerHealth.UNMATCHED)
        and w.slots < w.max_slots
        and w.worker_id not in demand.exclude
        and (role is Role.PREFILL or w.worker_id not in reserved)
        and demand.model in (None, w.model.name)
    )


def allowed_pairs(
    demand: Demand, fleet: list[WorkerSnapshot], policy: PolicyName, reserved: frozenset[str]
) -> set[tuple[str | None, str]]:
    def able(role: Role) -> list[WorkerSnapshot]:
        return [w for w in fleet if takes(demand, w, reserved, role)]

    pairs = [
        (p, d)
        for p in able(Role.PREFILL)
        for d in able(Role.DECODE)
        if p.compatibility == d.compatibility
    ]
    alone = able(Role.COLOCATED)
    if pairs or any(w.role is Role.COLOCATED for w in alone):
        alone = [
            w
            for w in alone
            if w.role is Role.COLOCATED
            or any(policy is PolicyName.SHORTEST_QUEUE and takes_over(w, d) for _, d in pairs)
        ]
    return {(None, w.worker_id) for w in alone} | {(p.worker_id, d.worker_id) for p, d in pairs}


def takes_over(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> bool:
    return (
        prefill.compatibility == decode.compatibility
        and decode.overflow_tokens is not None
        and prefill.queue_tokens + decode.overflow_tokens < decode.queue_tokens
    )


@settings(max_examples=400)
@given(
    fleets(),
    demands,
    st.sampled_from(PolicyName),
    st.integers(0, 9),
    st.frozensets(st.sampled_from(["w0", "w3", "w4"]), max_size=2),
)
def test_places_exactly_where_the_rules_allow(
    fleet: list[WorkerSnapshot],
    demand: Demand,
    policy: PolicyName,
    seed: int,
    reserved: frozenset[str],
) -> None:
    allowed = allowed_pairs(demand, fleet, policy, reserved)
    result = place(demand, fleet, policy, Random(seed), reserved=reserved)
    if isinstance(result, Pair):
        prefill = result.prefill.worker_id if result.prefill else None
        assert (prefill, result.decode.worker_id) in allowed
    else:
        assert not allowed
        by_id = {w.worker_id: w for w in fleet}
        assert (result.reason is Reason.BUSY) == bool(result.candidates)
        assert all(by_id[name].health in USABLE for name in result.candidates)
        assert not result.candidates & demand.exclude


@settings(max_examples=200)
@given(fleets(), st.integers(0, 9))
def test_no_allowed_pair_has_a_shorter_queue(fleet: list[WorkerSnapshot], seed: int) -> None:
    fleet = [replace(w, overflow_tokens=None) for w in fleet]
    demand = Demand(prompt_tokens=16, max_tokens=16)
    policy = PolicyName.SHORTEST_QUEUE
    result = place(demand, fleet, policy, Random(seed))
    queue = {w.worker_id: w.queue_tokens for w in fleet} | {None: 0}
    queues = [queue[p] + queue[d] for p, d in allowed_pairs(demand, fleet, policy, frozenset())]
    if isinstance(result, Pair):
        assert result.delay(demand) == min(queues)


def some_pairs() -> list[WorkerSnapshot]:
    return [
        *(worker(f"p{i}", Role.PREFILL) for i in range(2)),
        *(worker(f"d{i}", Role.DECODE) for i in range(3)),
    ]


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_ties_are_spread_over_all_pairs(policy: PolicyName) -> None:
    rng = Random(7)
    chosen = Counter[tuple[str, str]]()
    for _ in range(600):
        pair = place(Demand(1, 1), some_pairs(), policy, rng)
        assert isinstance(pair, Pair)
        assert pair.prefill is not None
        chosen[pair.prefill.worker_id, pair.decode.worker_id] += 1
    assert len(chosen) == 6
    assert min(chosen.values()) > 60, "each of six pairs expects 100; 60 is 4.4 sigma below"


def test_same_seed_makes_the_same_choices() -> None:
    def run(seed: int) -> list[str]:
        rng = Random(seed)
        pairs = (place(Demand(1, 1), some_pairs(), PolicyName.RANDOM, rng) for _ in range(20))
        return [pair.decode.worker_id for pair in pairs if isinstance(pair, Pair)]

    assert run(1) == run(1) != run(2)


def test_round_robin_takes_the_least_recently_used() -> None:
    fleet = [
        replace(w, last_placement=turn)
        for w, turn in zip(some_pairs(), (4, 5, 5, 3, 4), strict=True)
    ]
    pair = place(Demand(1, 1), fleet, PolicyName.ROUND_ROBIN, Random(0))
    assert isinstance(pair, Pair)
    assert pair.prefill is not None
    assert (pair.prefill.worker_id, pair.decode.worker_id) == ("p0", "d1")


def test_power_of_two_never_takes_the_longest_of_three() -> None:
    fleet = [
        worker("p0", Role.PREFILL),
        *(worker(f"d{i}", Role.DECODE, queue_tokens=i) for i in range(3)),
    ]
    chosen = {
        pair.decode.worker_id
        for seed in range(60)
        if isinstance(
            pair := place(Demand(1, 1), fleet, PolicyName.POWER_OF_TWO, Random(seed)), Pair
        )
    }
    assert chosen == {"d0", "d1"}


@pytest.mark.parametrize(
    ("demand", "fleet", "reason"),
    [
        (Demand(1, 1, model="x"), some_pairs(), Reason.UNKNOWN_MODEL),
        (Demand(1, 1, model="x"), [], Reason.NO_WORKERS),
        (Demand(1, 1), [], Reason.NO_WORKERS),
        (Demand(1, 1), some_pairs()[:2], Reason.NO_WORKERS),
        (
            Demand(1, 1),
            [*some_pairs(), replace(worker("q", Role.PREFILL), model=model_info("y"))],
            Reason.AMBIGUOUS_MODEL,
        ),
        (Demand(64 * 16, 2), some_pairs(), Reason.TOO_LARGE),
        (Demand(64 * 16 + 1, 1), [worker("c", Role.COLOCATED)], Reason.TOO_LARGE),
        (Demand(1, 255, choices=5), some_pairs(), Reason.TOO_LARGE),
        (
            Demand(1, 1),
            [replace(w, health=WorkerHealth.DRAINING) for w in some_pairs()],
            Reason.NO_WORKERS,
        ),
        (
            Demand(1, 1),
            [replace(w, health=WorkerHealth.PROBATION) for w in some_pairs()],
            Reason.BUSY,
        ),
        (Demand(1, 1), [replace(w, pages_free=PageCount(0)) for w in some_pairs()], Reason.BUSY),
    ],
)
def test_reason_of_no_placement(
    demand: Demand, fleet: list[WorkerSnapshot], reason: Reason
) -> None:
    result = place(demand, fleet, PolicyName.SHORTEST_QUEUE, Random(0))
    assert isinstance(result, Claim)
    assert result.reason is reason


def test_largest_request_that_fits_is_placed() -> None:
    result = place(Demand(64 * 16, 1), some_pairs(), PolicyName.SHORTEST_QUEUE, Random(0))
    assert isinstance(result, Pair)


def test_reserved_worker_counts_as_full() -> None:
    for reserved, placed in (
        (frozenset({"d0", "d1"}), "d2"),
        (frozenset({"d0", "d1", "d2"}), None),
    ):
        result = place(Demand(1, 1), some_pairs(), PolicyName.RANDOM, Random(0), reserved=reserved)
        if isinstance(result, Pair):
            assert result.decode.worker_id == placed
        else:
            assert (result.reason, result.candidates, placed) == (Reason.BUSY, reserved, None)


def test_choices_share_the_full_pages_of_the_prompt() -> None:
    demand = Demand(prompt_tokens=40, max_tokens=9, choices=3)
    assert demand.pages(Role.DECODE, PagePlan(16)) == (2 + 3 * 1,)
    assert demand.pages(Role.PREFILL, PagePlan(16)) == (3,)
    assert (demand.tokens(Role.DECODE), demand.tokens(Role.PREFILL)) == (3 * 48, 40)
    assert (demand.slots(Role.DECODE), demand.slots(Role.PREFILL)) == (3, 1)
