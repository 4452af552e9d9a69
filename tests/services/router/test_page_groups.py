"""Placement counts the pages that a request needs in each page group of a worker."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.engine.pages import SequencePages
from runtime.pages.groups import PageGroup, Part
from runtime.pages.plan import PageCount, PagePlan
from services.common.messages import Message
from services.common.placement import PROTOCOL, HeartbeatReply, Outcome, Release, Role
from services.router.app import build_dispatcher, create_app
from services.router.capacity import Demand, WorkerSnapshot
from services.router.choice import PolicyName
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import Pair
from services.router.roster import Claim, Reason
from services.router.settings import RouterSettings
from tests.runtime.pages.plans import compressed_plan, sliding_plan
from tests.services.router.samples import (
    COMPATIBLE,
    beat,
    place,
    place_request,
    registration,
    worker,
)

COMPRESSED = compressed_plan()
WORKER = COMPATIBLE.model_copy(update={"page_plan": COMPRESSED})
TOTAL = PageCount(600, 1000)  # full-precision and compressed pages
PURPOSES = {
    Role.PREFILL: Purpose.HOLD,
    Role.DECODE: Purpose.RECEIVE,
    Role.COLOCATED: Purpose.GENERATE,
}


def compressed(name: str, role: Role, free: PageCount) -> WorkerSnapshot:
    """Return a worker with `TOTAL` pages."""
    return replace(worker(name, role), compatibility=WORKER, pages_total=TOTAL, pages_free=free)


def test_pages_of_each_role() -> None:
    """8,000 tokens are 500 pages: the first and the last 4 are not compressed."""
    demand = Demand(8000, 16)
    assert demand.pages(Role.PREFILL, COMPRESSED) == (500, 495)
    assert demand.pages(Role.COLOCATED, COMPRESSED) == (501, 495)
    assert demand.pages(Role.DECODE, COMPRESSED) == (6, 495)
    assert demand.pages(Role.DECODE, PagePlan(16)) == (501,)


def test_choices_share_compressed_pages_and_sinks() -> None:
    demand = Demand(800, 161, choices=3)  # 50 pages; 10 more for the output of each choice
    assert demand.pages(Role.DECODE, COMPRESSED) == (1 + 3 * 5, 45 + 3 * 10)
    assert demand.pages(Role.COLOCATED, COMPRESSED) == (50 + 3, 45 + 3 * 10)
    assert demand.pages(Role.PREFILL, COMPRESSED) == (50, 45)


@settings(max_examples=300)
@given(st.integers(1, 700), st.integers(1, 400), st.integers(1, 3), st.sampled_from(list(PURPOSES)))
def test_pages_cover_what_the_engine_needs_to_admit(
    prompt: int, max_tokens: int, choices: int, role: Role
) -> None:
    demand = Demand(prompt, max_tokens, choices)
    tokens = tuple(range(prompt))
    request = Request("r", tokens, prompt, SamplingParams(), max_tokens, choices=choices)
    limit = prompt + max_tokens
    sequences = [
        SequenceState(request, choice, 0, list(tokens), limit) for choice in range(choices)
    ]
    for plan in (COMPRESSED, PagePlan(16), sliding_plan()):
        pages = SequencePages(plan, PageCount(*(5000 for _ in plan.groups)))
        engine = pages.need(SequenceGroup(PURPOSES[role], sequences))
        counted = demand.pages(role, plan)
        assert engine.fits(counted)
        if role is Role.PREFILL:
            assert counted == engine
        if role is Role.DECODE:
            for group, number in zip(plan.groups, counted, strict=True):
                if group.part is Part.ENDS:
                    assert number <= choices * group.max_held(plan.page_size)


@pytest.mark.parametrize(
    ("free", "placed"),
    [
        (PageCount(6, 495), True),
        (PageCount(5, 495), False),
        (PageCount(600, 494), False),
    ],
)
def test_decode_worker_needs_pages_of_every_group(free: PageCount, placed: bool) -> None:
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
        (Demand(9600, 1), Reason.BUSY),  # 600 full-precision pages for the prompt
        (Demand(9601, 1), Reason.TOO_LARGE),
        (Demand(1000, 16_000 - 1000 + 16 + 80), Reason.BUSY),  # 1,000 compressed pages
        (Demand(1000, 16_000 - 1000 + 16 + 81), Reason.TOO_LARGE),
    ],
)
def test_largest_request_of_a_colocated_worker(demand: Demand, reason: Reason) -> None:
    busy = compressed("c0", Role.COLOCATED, PageCount(0, 0))
    result = place(demand, [busy], PolicyName.SHORTEST_QUEUE, Random(0))
    assert isinstance(result, Claim)
    assert result.reason is reason


def test_promises_count_all_groups_until_they_are_released() -> None:
    fleet = Fleet(FleetLimits())
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        fleet.register(registration(name, role, pages_total=TOTAL, compatibility=WORKER), 0.0)
        fleet.heartbeat(beat(name, plan=COMPRESSED, pages_free=TOTAL), 0.0)

    def free() -> dict[str, PageCount]:
        return {found.worker_id: found.pages_free for found in fleet.snapshots(0.0)}

    snapshots = {found.worker_id: found for found in fleet.snapshots(0.0)}
    pair = Pair(snapshots["p0"], snapshots["d0"])
    fleet.promise(pair, Demand(8000, 2), "a", 0.0)
    assert free() == {"p0": PageCount(100, 505), "d0": PageCount(594, 505)}
    views = {view.worker_id: view for view in fleet.views(0.0)}
    assert views["d0"].promised_pages == {"full_precision": 6, "compressed": 495}
    assert views["d0"].pages_free == views["d0"].pages_total == COMPRESSED.by_name(TOTAL)
    fewer = PageCount(595, 505)
    fleet.heartbeat(beat("d0", plan=COMPRESSED, pages_free=fewer, admitted=["a"]), 0.1)
    assert free() == {"p0": PageCount(100, 505), "d0": PageCount(595, 505)}


THREE = PagePlan(
    16,
    (
        PageGroup("full"),
        PageGroup("near", Part.ENDS, 0, 64),
        PageGroup("far", Part.ENDS, 0, 256),
    ),
)
LAYERED = COMPATIBLE.model_copy(update={"page_plan": THREE})


class _Router:
    """The HTTP API of a router without a socket."""

    def __init__(self) -> None:
        settings = RouterSettings.model_validate({})
        self.dispatcher = build_dispatcher(settings, -60.0)
        self._client = create_app(settings, self.dispatcher, clock=lambda: 0.0).test_client()

    async def post(self, path: str, body: dict[str, Any] | Message) -> tuple[int, Any]:
        json = body if isinstance(body, dict) else body.model_dump(mode="json")
        answer = await self._client.post(f"/v1/{path}", json=json)
        return answer.status_code, await answer.get_json()

    async def join(self, name: str, role: Role, pages: PageCount) -> None:
        joining = registration(name, role, pages_total=pages, compatibility=LAYERED)
        assert (await self.post("register", joining))[0] == 200
        load = beat(name, plan=THREE, pages_free=pages)
        assert await self.post("heartbeat", load) == (200, HeartbeatReply().model_dump())

    async def worker(self, name: str) -> dict[str, Any]:
        answer = await self._client.get("/v1/workers")
        return next(w for w in (await answer.get_json())["workers"] if w["worker_id"] == name)


async def test_workers_with_three_page_groups_are_registered_counted_and_listed() -> None:
    """A prompt of 1,000 tokens, and its next 99, have 69 pages; 5 or 17 hold a window."""
    router = _Router()
    await router.join("p0", Role.PREFILL, PageCount(100, 100, 100))
    await router.join("d0", Role.DECODE, PageCount(100, 12, 50))
    status, placed = await router.post("place", place_request(1000, 100))
    assert (status, placed["max_tokens"]) == (200, 100)
    prefill, decode = await router.worker("p0"), await router.worker("d0")
    assert prefill["promised_pages"] == {"full": 63, "near": 63, "far": 63}
    assert decode["promised_pages"] == {"full": 69, "near": 5, "far": 17}
    assert decode["pages_total"] == {"full": 100, "near": 12, "far": 50}
    assert decode["compatibility"]["page_plan"]["groups"][2] == {
        **{"name": "far", "part": "ends", "sink_pages": 0, "window": 256},
    }
    await router.post("release", Release(placement_id=placed["placement_id"], outcome=Outcome.OK))
    full = PageCount(100, 4, 50)  # too few for a window
    await router.post("heartbeat", beat("d0", plan=THREE, pages_free=full))
    assert (await router.post("place", place_request(1000, 100)))[0] == 429


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({"full": 1, "near": 1}, "pages of full, near instead of full, near, far"),
        ({"full": 1, "near": 1, "far": 0}, "a page group has no pages"),
        (17, "pages_total: Input should be an object"),
    ],
)
async def test_registration_with_other_pages_than_its_plan_is_refused(
    pages: object, message: str
) -> None:
    router = _Router()
    body = registration("d0", Role.DECODE, compatibility=LAYERED).model_dump(mode="json")
    status, answer = await router.post("register", body | {"pages_total": pages})
    assert (status, answer["error"]["code"]) == (400, "invalid")
    assert message in answer["error"]["message"]


async def test_registration_with_bytes_of_other_page_groups_is_refused() -> None:
    router = _Router()
    body = registration("d0", Role.DECODE, compatibility=LAYERED).model_dump(mode="json")
    status, answer = await router.post("register", body | {"page_bytes": {"kv": 1}})
    assert (status, answer["error"]["code"]) == (400, "invalid")
    assert "pages of kv instead of full, near, far" in answer["error"]["message"]


async def test_heartbeat_with_other_groups_than_the_registration_is_refused() -> None:
    router = _Router()
    await router.join("d0", Role.DECODE, PageCount(9, 9, 9))
    status, answer = await router.post("heartbeat", beat("d0"))
    assert (status, answer["error"]["code"]) == (400, "invalid")
    assert answer["error"]["message"] == "pages_free: pages of kv instead of full, near, far"
    assert (await router.worker("d0"))["pages_free"] == {"full": 9, "near": 9, "far": 9}


async def test_registration_of_another_protocol_version_is_refused_with_the_reason() -> None:
    """The first version had no page groups, and no version."""
    router = _Router()
    body = registration("d0", Role.DECODE).model_dump(mode="json")
    del body["protocol"], body["compatibility"]["page_plan"]
    body["compatibility"]["page_size"] = body["pages_total"] = 16
    status, answer = await router.post("register", body)
    assert (status, answer["error"]["code"]) == (400, "invalid")
    versions = f"protocol version {PROTOCOL}, and the worker has version 1"
    assert versions in answer["error"]["message"]


async def test_pair_with_different_page_groups_is_unmatched_with_the_reason() -> None:
    router = _Router()
    await router.join("p0", Role.PREFILL, PageCount(9, 9, 9))
    wider = replace(THREE, groups=(*THREE.groups[:2], replace(THREE.groups[2], window=512)))
    other = COMPATIBLE.model_copy(update={"page_plan": wider})
    await router.post("register", registration("d0", Role.DECODE, compatibility=other))
    _, answer = await router.post("heartbeat", beat("d0", plan=wider))
    assert answer["unmatched"] == (
        "the workers p0 and d0 are not compatible: page_plan is "
        "16 tokens per page, far (ends, 0 sinks, window 256) and "
        "16 tokens per page, far (ends, 0 sinks, window 512)"
    )
    assert (await router.worker("p0"))["reason"] == answer["unmatched"]
