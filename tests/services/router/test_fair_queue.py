"""Fair queueing among tenants: shares in tokens, weights, priorities and predicted waits."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.admission import surplus
from services.router.capacity import Demand
from services.router.queue import PendingPlacement, PlacementQueue
from tests.services.router.samples import place_request

MAX_COST = 500
Costs = st.lists(st.integers(2, MAX_COST), min_size=1, max_size=30)


def call(tenant: str, cost: int = 2, **changes: Any) -> PendingPlacement:
    """Return a call that costs ``cost`` tokens, one of them output."""
    request = place_request(cost - 1, 1, tenant=tenant, **changes)
    demand = Demand(prompt_tokens=cost - 1, max_tokens=1)
    return PendingPlacement(request, demand, 0.0, 60.0)


def place_first(queue: PlacementQueue) -> PendingPlacement:
    first = next(iter(queue))
    assert queue.remove(first, served=True)
    return first


def order(queue: PlacementQueue) -> list[str]:
    return [str(place_first(queue).request.tenant) for _ in range(len(queue))]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 8), Costs), min_size=2, max_size=5))
def test_backlogged_tenants_differ_by_at_most_one_request_of_each(
    tenants: list[tuple[int, list[int]]],
) -> None:
    queue = PlacementQueue(1000)
    for name, (weight, costs) in enumerate(tenants):
        for cost in costs:
            queue.add(call(str(name), cost, weight=weight))
    placed = [0.0] * len(tenants)  # tokens divided by the weight
    left = [len(costs) for _, costs in tenants]
    while all(left):
        first = place_first(queue)
        name = int(first.request.tenant or "")
        left[name] -= 1
        placed[name] += first.demand.cost / tenants[name][0]
        for one, (weight, costs) in zip(placed, tenants, strict=True):
            for other, (other_weight, other_costs) in zip(placed, tenants, strict=True):
                bound = max(costs) / weight + max(other_costs) / other_weight
                assert one - other <= bound + 1e-6


@settings(max_examples=100)
@given(st.integers(0, 1 << 32))
def test_tenant_that_joins_later_gets_its_share_and_no_more(seed: int) -> None:
    rng = Random(seed)
    queue = PlacementQueue(1000)
    for _ in range(40):
        queue.add(call("early", rng.randint(2, MAX_COST)))
    for _ in range(rng.randint(0, 20)):
        place_first(queue)
    for _ in range(20):
        queue.add(call("late", rng.randint(2, MAX_COST)))
    placed: Counter[str] = Counter()
    while {each.request.tenant for each in queue} == {"early", "late"}:
        first = place_first(queue)
        placed[str(first.request.tenant)] += first.demand.cost
        assert abs(placed["early"] - placed["late"]) <= 2 * MAX_COST


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(2, MAX_COST)), min_size=1))
def test_no_more_tokens_than_predicted_are_placed_before_a_call(
    calls: list[tuple[str, int]],
) -> None:
    queue = PlacementQueue(1000)
    for tenant, cost in calls:
        queue.add(call(tenant, cost))
    last = call("a", 50)
    queue.add(last)
    predicted = queue.cost_before(last)
    placed = 0
    while (first := place_first(queue)) is not last:
        placed += first.demand.cost
    assert predicted - MAX_COST <= placed <= predicted


def test_flood_of_one_tenant_does_not_delay_another() -> None:
    queue = PlacementQueue(1000)
    for _ in range(100):
        queue.add(call("flood"))
    queue.add(call("other"))
    assert order(queue)[:3].count("other") == 1


def test_weight_multiplies_the_share() -> None:
    queue = PlacementQueue(1000)
    for _ in range(40):
        queue.add(call("paid", weight=3))
        queue.add(call("free"))
    assert Counter(order(queue)[:40])["paid"] in (29, 30, 31)


def test_shares_are_counted_in_tokens_not_in_requests() -> None:
    queue = PlacementQueue(1000)
    for _ in range(10):
        queue.add(call("long", 300))
    for _ in range(30):
        queue.add(call("short", 100))
    assert Counter(order(queue)[:20])["short"] in (14, 15, 16)


def test_idle_tenant_saves_no_tokens_for_later() -> None:
    queue = PlacementQueue(1000)
    queue.add(call("idle"))
    place_first(queue)
    for _ in range(50):
        queue.add(call("busy"))
    for _ in range(40):
        place_first(queue)
    for _ in range(10):
        queue.add(call("idle"))
    assert Counter(order(queue)[:10])["idle"] in (4, 5, 6)


def test_priority_orders_the_requests_of_one_tenant_only() -> None:
    queue = PlacementQueue(1000)
    for number in range(4):
        queue.add(call("a", request_id=f"a{number}", priority=number))
        queue.add(call("b", request_id=f"b{number}"))
    names = [place_first(queue).request.request_id for _ in range(8)]
    assert [name for name in names if name[0] == "a"] == ["a3", "a2", "a1", "a0"]
    assert [name for name in names if name[0] == "b"] == ["b0", "b1", "b2", "b3"]
    assert {name[0] for name in names[:2]} == {"a", "b"}, "each tenant is first in turn"


def test_repeated_request_precedes_new_ones_of_its_tenant() -> None:
    queue = PlacementQueue(1000)
    queue.add(call("a", request_id="new", priority=9))
    queue.add(call("a", request_id="repeated", admitted=True, attempt=1))
    assert place_first(queue).request.request_id == "repeated"


def test_further_prompt_of_a_request_does_not_precede_new_ones_of_its_tenant() -> None:
    queue = PlacementQueue(1000)
    queue.add(call("a", request_id="new"))
    queue.add(call("a", request_id="further", admitted=True))
    assert place_first(queue).request.request_id == "new"


def test_surplus_is_never_a_call_that_was_admitted_before() -> None:
    queue = PlacementQueue(1)
    admitted, new, other = call("a", 50, admitted=True), call("a", 50), call("b", 10)
    queue.add(admitted)
    assert surplus(queue, admitted) is None
    queue.add(other)
    assert surplus(queue, admitted) is other
    queue.add(new)
    assert surplus(queue, new) is new
    assert surplus(queue, other) is new


@pytest.mark.parametrize("placed", [False, True])
def test_only_placed_calls_are_charged(placed: bool) -> None:
    queue = PlacementQueue(1000)
    first = call("a", 100)
    for each in (first, call("a", 10), call("b", 50)):
        queue.add(each)
    queue.remove(first, served=placed)
    assert order(queue) == (["b", "a"] if placed else ["a", "b"])


def test_surplus_is_the_last_call_of_the_heaviest_tenant() -> None:
    queue = PlacementQueue(1000)
    for each in (call("a", 40), call("b", 30), call("b", 20), call("c", 90, weight=9)):
        queue.add(each)
    found = queue.surplus()
    assert found is not None
    assert found.demand.cost == 20
