"""Affinity: prompts are placed where their beginning is cached, with a bound on the imbalance."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.placement import Placement, Role
from services.common.prefix_hashes import ENDS, HEADER, encode_hashes
from services.router.capacity import REUSE, Demand, WorkerSnapshot
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import Pair
from services.router.queue import PlacementQueue
from tests.services.router.app import HEADERS, Router
from tests.services.router.samples import beat, place, place_request, registration, worker

PROMPT = 500
DEMAND = Demand(prompt_tokens=PROMPT, max_tokens=16)
PREFIX = tuple(bytes([number]) for number in range(7))  # of 448 tokens
ENOUGH = 200  # pages for a prompt


def prefill(name: str, queue_tokens: int, **changes: object) -> WorkerSnapshot:
    changed = replace(worker(name, Role.PREFILL, queue_tokens), **changes)  # type: ignore[arg-type]
    return large(changed)


def large(snapshot: WorkerSnapshot) -> WorkerSnapshot:
    pages = snapshot.page_plan.each(ENOUGH)
    return replace(snapshot, pages_total=pages, pages_free=pages)


DECODE = large(worker("d", Role.DECODE))


def chosen(
    workers: list[WorkerSnapshot],
    cached: dict[str, int],
    demand: Demand = DEMAND,
    policy: PolicyName = PolicyName.SHORTEST_QUEUE,
) -> str | None:
    pair = place(demand, [*workers, DECODE], policy, Random(0), cached=cached)
    if not isinstance(pair, Pair):
        return None
    assert pair.prefill is not None
    return pair.prefill.worker_id


def test_cached_tokens_do_not_count_as_queue() -> None:
    workers = [prefill("p0", 300), prefill("p1", 0)]
    assert chosen(workers, {}) == "p1"
    assert chosen(workers, {"p0": 448}) == "p0"
    assert chosen(workers, {"p0": 128}) == "p1"
    assert chosen(workers, {"p0": 448, "p1": 448}) == "p1"


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, PROMPT - 1)), min_size=1, max_size=6),
    st.integers(0, 7),
)
def test_queue_exceeds_the_shortest_one_at_most_by_what_reuse_saves(
    loads: list[tuple[int, int]], seed: int
) -> None:
    workers = [prefill(f"p{n}", queue) for n, (queue, _) in enumerate(loads)]
    cached = {f"p{n}": tokens for n, (_, tokens) in enumerate(loads) if tokens}
    pair = place(DEMAND, [*workers, DECODE], PolicyName.SHORTEST_QUEUE, Random(seed), cached=cached)
    assert isinstance(pair, Pair)
    assert pair.prefill is not None
    shortest = min(queue for queue, _ in loads)
    saved = cached.get(pair.prefill.worker_id, 0)
    assert pair.prefill.queue_tokens - shortest <= REUSE * saved
    if not cached:
        assert pair.prefill.queue_tokens == shortest


def test_decode_worker_is_chosen_by_its_own_cache() -> None:
    decode = [large(worker(name, Role.DECODE, queue)) for name, queue in (("d0", 200), ("d1", 0))]
    for cached, name in (({}, "d1"), ({"d0": 448}, "d0"), ({"d0": 64}, "d1")):
        pair = place(
            DEMAND, [prefill("p", 0), *decode], PolicyName.SHORTEST_QUEUE, Random(0), cached=cached
        )
        assert isinstance(pair, Pair)
        assert pair.decode.worker_id == name


def test_colocated_worker_is_chosen_by_its_cache() -> None:
    workers = [large(worker(f"c{n}", Role.COLOCATED, (1 - n) * 200)) for n in (0, 1)]
    for cached, name in (({}, "c1"), ({"c0": 448}, "c0")):
        pair = place(DEMAND, workers, PolicyName.SHORTEST_QUEUE, Random(0), cached=cached)
        assert isinstance(pair, Pair)
        assert pair.decode.worker_id == name


def test_excluded_worker_is_not_used_whatever_it_has_cached() -> None:
    demand = replace(DEMAND, exclude=frozenset({"p0"}))
    assert chosen([prefill("p0", 0), prefill("p1", 900)], {"p0": 448}, demand) == "p1"


@pytest.mark.parametrize(
    "policy", [name for name in PolicyName if name is not PolicyName.SHORTEST_QUEUE]
)
def test_other_policies_ignore_caches(policy: PolicyName) -> None:
    workers = [prefill("p0", 300), prefill("p1", 0)]
    assert chosen(workers, {"p0": 448}, policy=policy) == chosen(workers, {}, policy=policy)


def test_slow_worker_is_used_only_if_its_cache_saves_enough() -> None:
    workers = [prefill("p0", 0, slowdown=4.0), prefill("p1", 0)]
    assert chosen(workers, {}) == "p1"
    assert chosen(workers, {"p0": 192}) == "p1"
    assert chosen(workers, {"p0": 448}) == "p0"


def test_prompt_backlog_does_not_bar_a_worker_that_completes_the_prompt_first() -> None:
    full = prefill("p0", 400, pending_prompt_tokens=400, max_pending_prompt_tokens=300)
    assert chosen([full, prefill("p1", 0)], {"p0": 448}) == "p0"
    assert chosen([full, prefill("p1", 0)], {"p0": 64}) == "p1"
    assert chosen([full], {"p0": 448}) is None, "the prompt waits in the queue of the router"


def dispatcher(*names: str, blocks: int = 4096) -> Dispatcher:
    """Return a dispatcher with ready workers. The first letter of a name selects the role."""
    fleet = Fleet(FleetLimits(remembered_blocks=blocks))
    router = Dispatcher(
        fleet,
        PlacementQueue(9),
        PolicyName.SHORTEST_QUEUE,
        Random(0),
        output_reserve=256,
        max_wait_s=9.0,
    )
    for name in names:
        join(router, name)
    return router


def join(router: Dispatcher, name: str, epoch: str = "e1") -> None:
    role = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}[name[0]]
    router.register(registration(name, role, epoch=epoch, pages_total=ENOUGH), 0.0)
    router.heartbeat(beat(name, epoch=epoch, pages_free=ENOUGH), 0.0)


def submit(router: Dispatcher, prefix: tuple[bytes, ...] = PREFIX) -> tuple[str, str]:
    """Place a prompt, and return the names of its prefill and decode worker."""
    answer = router.submit(place_request(PROMPT, 16), 0.0, prefix).answer
    assert isinstance(answer, Placement)
    assert answer.prefill is not None
    return answer.prefill.worker_id, answer.decode.worker_id


def test_router_expects_a_prompt_where_it_was_placed() -> None:
    router = dispatcher("p0", "p1", "p2", "d0", "d1", "d2")
    placed = submit(router)
    demand = replace(DEMAND, prefix=(*PREFIX[:4], b"other"))
    assert router.fleet.cached(demand) == dict.fromkeys(placed, ENDS[3])
    assert submit(router) == placed
    assert router.fleet.cached(replace(DEMAND, prefix=(b"other",))) == {}
    assert router.fleet.cached(DEMAND) == {}


def test_at_least_one_token_is_computed() -> None:
    router = dispatcher("p0", "d0")
    submit(router)
    demand = Demand(prompt_tokens=ENDS[6], max_tokens=16, prefix=PREFIX)
    assert set(router.fleet.cached(demand).values()) == {ENDS[6] - 1}


def test_only_tokens_to_compute_are_promised_to_a_prefill_worker() -> None:
    router = dispatcher("p0", "d0")
    for expected in (PROMPT, 2 * PROMPT - ENDS[6]):
        submit(router)
        p0, d0 = router.fleet.snapshots(0.0)
        assert p0.queue_tokens == p0.pending_prompt_tokens == expected
    assert d0.queue_tokens == 2 * (PROMPT + 15), "resident tokens include those of the cache"


def test_new_epoch_of_a_worker_has_nothing_cached() -> None:
    router = dispatcher("p0", "d0")
    submit(router)
    demand = replace(DEMAND, prefix=PREFIX)
    join(router, "p0")
    assert router.fleet.cached(demand) == {"p0": ENDS[6], "d0": ENDS[6]}, "registered again"
    join(router, "p0", epoch="e2")
    assert router.fleet.cached(demand) == {"d0": ENDS[6]}
    router.fleet.deregister("d0", "e1")
    join(router, "d0", epoch="e2")
    assert router.fleet.cached(demand) == {}


def test_removed_worker_is_forgotten() -> None:
    router = dispatcher("p0", "d0")
    submit(router)
    router.advance(3600.0)
    join(router, "p0")
    assert router.fleet.cached(replace(DEMAND, prefix=PREFIX)) == {}


@pytest.mark.parametrize(("blocks", "known"), [(0, 0), (3, ENDS[2])])
def test_number_of_remembered_blocks_is_a_setting(blocks: int, known: int) -> None:
    router = dispatcher("p0", "d0", blocks=blocks)
    submit(router)
    cached = router.fleet.cached(replace(DEMAND, prefix=PREFIX))
    assert cached == (dict.fromkeys(("p0", "d0"), known) if known else {})


def test_prompt_that_its_decode_worker_computes_is_forgotten_of_the_prefill_worker() -> None:
    router = dispatcher("p0", "d0")
    answer = router.submit(place_request(PROMPT, 16), 0.0, PREFIX).answer
    assert isinstance(answer, Placement)
    router.heartbeat(beat("d0", pages_free=ENOUGH, computed_here=[answer.placement_id]), 0.1)
    assert router.fleet.cached(replace(DEMAND, prefix=PREFIX)) == {"d0": ENDS[6]}


def test_nothing_is_remembered_of_a_worker_that_reuses_no_kv() -> None:
    router = dispatcher("d0")
    router.register(
        registration("p0", Role.PREFILL, pages_total=ENOUGH, reuses_prefixes=False), 0.0
    )
    router.heartbeat(beat("p0", pages_free=ENOUGH), 0.0)
    submit(router)
    assert router.fleet.cached(replace(DEMAND, prefix=PREFIX)) == {"d0": ENDS[6]}


def test_memory_has_no_more_tokens_than_the_worker_has_pages_for() -> None:
    router = dispatcher("p0", "d0")
    for number in range(50):
        submit(router, (bytes([number]) * 2, *PREFIX[1:]))
        for placement in list(router.fleet._records):
            record = router.fleet._records.pop(placement)
            router.fleet._end_promises(record, are_computed=True)
    tokens = [w.prefixes.tokens for w in router.fleet._workers.values()]
    assert all(0 < each <= ENOUGH * 16 for each in tokens)


async def test_hashes_are_in_a_header_that_may_be_absent(router: Router) -> None:
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        await router.join(name, role)
    header = {**HEADERS, HEADER: encode_hashes([bytes(8)])}
    used = set()
    for _ in range(3):
        status, body, _ = await router.post("/v1/place", place_request(100), header)
        assert status == 200
        used.add(body["prefill"]["worker_id"])
    assert len(used) == 2, "64 tokens outweigh the first prompt, but not two"
    assert (await router.post("/v1/place", place_request(100)))[0] == 200
    text = await (await router.client.get("/metrics", headers=HEADERS)).get_data(as_text=True)
    assert 'headrace_router_placements_with_reuse_total{role="decode"} 2.0' in text
    assert 'headrace_router_expected_cached_tokens_total{role="decode"} 128.0' in text
    assert 'headrace_router_expected_cached_tokens_total{role="colocated"} 0.0' in text


async def test_malformed_hashes_are_refused(router: Router) -> None:
    await router.join("c0", Role.COLOCATED)
    header = {**HEADERS, HEADER: "0g"}
    status, body, _ = await router.post("/v1/place", place_request(), header)
    assert status == 400
    assert HEADER in body["error"]["message"]
