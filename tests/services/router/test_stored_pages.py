"""Placement with compressed KV formats counts the exact and the stored pages of a request."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import Purpose, Sequence, SequenceGroup
from runtime.engine.pages import SequencePages
from runtime.pages.plan import PageCount, PagePlan
from runtime.pages.window import SINK_PAGES, WINDOW
from services.common.placement import Role, StoredPages
from services.router.capacity import Demand, WorkerSnapshot
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import Pair, PolicyName
from services.router.roster import Claim, Reason
from tests.runtime.pages.plans import compressed_plan
from tests.services.router.samples import beat, place, registration, worker

STORED = StoredPages(total=1000, sink_pages=SINK_PAGES, window=WINDOW)
PAGING = compressed_plan()
PURPOSES = {
    Role.PREFILL: Purpose.HOLD,
    Role.DECODE: Purpose.RECEIVE,
    Role.COLOCATED: Purpose.GENERATE,
}


def compressed(name: str, role: Role, free: PageCount) -> WorkerSnapshot:
    """Return a worker with 600 exact and 1,000 stored pages."""
    total = PageCount(600, STORED.total)
    return replace(worker(name, role), paging=PAGING, pages_total=total, pages_free=free)


def test_pages_of_each_role() -> None:
    """8,000 tokens are 500 pages: the first and the last 4 stay exact, 495 are stored."""
    demand = Demand(8000, 16)
    assert demand.pages(Role.PREFILL, PAGING) == (500, 495)
    assert demand.pages(Role.COLOCATED, PAGING) == (501, 495)
    assert demand.pages(Role.DECODE, PAGING) == (6, 495)
    assert demand.pages(Role.DECODE, PagePlan(16)) == (501,)


def test_choices_share_stored_pages_and_sinks() -> None:
    demand = Demand(800, 161, choices=3)  # 50 pages; 10 more for the output of each choice
    assert demand.pages(Role.DECODE, PAGING) == (1 + 3 * 5, 45 + 3 * 10)
    assert demand.pages(Role.COLOCATED, PAGING) == (50 + 3, 45 + 3 * 10)
    assert demand.pages(Role.PREFILL, PAGING) == (50, 45)


@settings(max_examples=300)
@given(st.integers(1, 700), st.integers(1, 400), st.integers(1, 3), st.sampled_from(list(PURPOSES)))
def test_pages_cover_what_the_engine_needs_to_admit(
    prompt: int, max_tokens: int, choices: int, role: Role
) -> None:
    demand = Demand(prompt, max_tokens, choices)
    tokens = tuple(range(prompt))
    request = Request("r", tokens, prompt, SamplingParams(), max_tokens, choices=choices)
    limit = prompt + max_tokens
    sequences = [Sequence(request, choice, 0, list(tokens), limit) for choice in range(choices)]
    for paging in (PAGING, PagePlan(16)):
        pages = SequencePages(paging, paging.each(5000))
        engine = pages.need(SequenceGroup(PURPOSES[role], sequences))
        counted = demand.pages(role, paging)
        assert engine.exact <= counted.exact
        assert engine.stored <= counted.stored
        if role is Role.PREFILL:
            assert tuple(counted) == tuple(engine)
        if role is Role.DECODE and paging.compressed:
            assert counted.exact <= choices * paging.groups[0].max_held(16)


@pytest.mark.parametrize(
    ("free", "placed"),
    [
        (PageCount(6, 495), True),
        (PageCount(5, 495), False),
        (PageCount(600, 494), False),
    ],
)
def test_decode_worker_needs_stored_pages_and_a_window(free: PageCount, placed: bool) -> None:
    fleet = [
        compressed("p0", Role.PREFILL, PageCount(500, 495)),
        compressed("d0", Role.DECODE, free),
    ]
    result = place(Demand(8000, 2), fleet, PolicyName.SHORTEST_QUEUE, Random(0))
    if placed:
        assert isinstance(result, Pair)
    else:
        assert isinstance(result, Claim)
        assert (result.reason, result.candidates) == (Reason.BUSY, frozenset({"d0"}))


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        (Demand(9600, 1), Reason.BUSY),  # 600 exact pages for the prompt
        (Demand(9601, 1), Reason.TOO_LARGE),
        (Demand(1000, 16_000 - 1000 + 16 + 80), Reason.BUSY),  # 1,000 stored pages
        (Demand(1000, 16_000 - 1000 + 16 + 81), Reason.TOO_LARGE),
    ],
)
def test_largest_request_of_a_colocated_worker(demand: Demand, reason: Reason) -> None:
    busy = compressed("c0", Role.COLOCATED, PageCount(0, 0))
    result = place(demand, [busy], PolicyName.SHORTEST_QUEUE, Random(0))
    assert isinstance(result, Claim)
    assert result.reason is reason


def test_promises_count_both_kinds_until_they_are_released() -> None:
    fleet = Fleet(FleetLimits())
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        fleet.register(registration(name, role, pages_total=600, stored=STORED), 0.0)
        fleet.heartbeat(beat(name, pages_free=600, stored_free=1000), 0.0)

    def free() -> dict[str, PageCount]:
        return {found.worker_id: found.pages_free for found in fleet.snapshots(0.0)}

    snapshots = {found.worker_id: found for found in fleet.snapshots(0.0)}
    pair = Pair(snapshots["p0"], snapshots["d0"])
    fleet.promise(pair, Demand(8000, 2), "a", 0.0)
    assert free() == {"p0": PageCount(100, 505), "d0": PageCount(594, 505)}
    views = {view.worker_id: view for view in fleet.views(0.0)}
    assert (views["d0"].promised_pages, views["d0"].promised_stored) == (6, 495)
    assert (views["d0"].stored_free, views["d0"].stored_total) == (1000, 1000)
    fleet.heartbeat(beat("d0", pages_free=595, stored_free=505, admitted=["a"]), 0.1)
    assert free() == {"p0": PageCount(100, 505), "d0": PageCount(595, 505)}
