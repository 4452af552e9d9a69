"""Requests that the live page lists: running ones stay, and refusals of one kind are counted."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from services.common.errors import Overloaded, ServiceError, Unavailable
from services.common.placement import ModelInfo, Placement, WorkerAddress
from services.common.token_ids import pack_tokens
from services.common.tracing import NO_SPAN
from services.gateway import timeline
from services.gateway.keys import ApiKeys, Tenant
from services.gateway.metrics import GatewayMetrics
from services.gateway.recent import MAX_ENDED, MAX_RUNNING, UNPLACED_S, RecentRequests
from services.gateway.requests import GenerationOptions, GenerationRequest, RequestContext
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import MODEL, hang, say

PLACED = Placement(
    placement_id="p",
    prefill=None,
    decode=WorkerAddress(worker_id="d0", epoch="e", address="127.0.0.1:1"),
    max_tokens=8,
    model=ModelInfo.model_validate(MODEL | {"name": "m"}),
)


class Requests:
    """Requests of one tenant, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timeline, "_now", lambda: self.now)
        self.kept = RecentRequests(GatewayMetrics(), ApiKeys())
        self.started = 0

    def begin(self, tenant: Tenant | None = None) -> Any:
        self.started += 1
        context = RequestContext(f"r{self.started}", tenant, self.now, self.now + 600)
        request = GenerationRequest(context, pack_tokens((1, 2)), 8, 0, GenerationOptions())
        return self.kept.follow(request, NO_SPAN)

    def complete(self) -> None:
        with self.begin() as line:
            line.route()
            line.placed(PLACED)

    def refuse(self, error: ServiceError, tenant: Tenant | None = None) -> None:
        with suppress(ServiceError), self.begin(tenant) as line:
            line.route()
            raise error

    def listed(self, tenant: str | None = None) -> dict[str, Any]:
        return self.kept.of(tenant).describe(self.now)

    def ids(self, name: str) -> list[str]:
        return [request["id"] for request in self.listed()[name]]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


def test_refusals_do_not_displace_running_or_completed_requests(requests: Requests) -> None:
    requests.complete()
    with requests.begin() as running:
        running.route()
        running.placed(PLACED)
        for _ in range(300):
            requests.refuse(Overloaded("the queue is full"))
            requests.now += 0.003
        assert (requests.ids("running"), requests.ids("ended")) == (["r2"], ["r1"])
    assert (requests.ids("running"), requests.ids("ended")) == ([], ["r2", "r1"])


def test_refusals_of_one_kind_are_counted_together(requests: Requests) -> None:
    requests.refuse(Overloaded("full"))
    requests.now += 5
    requests.refuse(Overloaded("full"))
    requests.refuse(Unavailable("no worker"))
    requests.now += 2
    overloaded, unavailable = requests.listed()["unplaced"]
    assert (overloaded["status"], overloaded["count"]) == ("overloaded", 2)
    assert (overloaded["since_s"], overloaded["last_s"]) == (7, 2)
    assert (overloaded["newest"]["id"], overloaded["newest"]["decode"]) == ("r2", None)
    assert (unavailable["status"], unavailable["count"]) == ("unavailable", 1)


def test_group_of_refusals_is_dropped_some_time_after_the_last_one(requests: Requests) -> None:
    requests.refuse(Overloaded("full"))
    requests.now += UNPLACED_S
    assert requests.listed()["unplaced"][0]["count"] == 1
    requests.now += 1
    requests.refuse(Overloaded("full"))
    (group,) = requests.listed()["unplaced"]
    assert (group["count"], group["since_s"]) == (1, 0)
    requests.now += UNPLACED_S + 1
    assert requests.listed()["unplaced"] == []


def test_oldest_running_requests_are_listed_and_all_are_counted(requests: Requests) -> None:
    open_ = [requests.begin() for _ in range(MAX_RUNNING + 3)]
    for entered in open_:
        entered.__enter__().route()
        requests.now += 1
    listed = requests.listed()
    assert requests.ids("running") == [f"r{n}" for n in range(1, MAX_RUNNING + 1)]
    assert listed["running_total"] == MAX_RUNNING + 3
    open_[0].__exit__(None, None, None)
    assert requests.ids("running")[0] == "r2"
    for entered in open_[1:]:
        entered.__exit__(None, None, None)


def test_newest_completed_requests_are_kept(requests: Requests) -> None:
    for _ in range(MAX_ENDED + 3):
        requests.complete()
    expected = [f"r{n}" for n in range(MAX_ENDED + 3, 3, -1)]
    assert requests.ids("ended") == expected


def test_request_that_fails_after_its_placement_is_listed_on_its_own(requests: Requests) -> None:
    with suppress(Unavailable), requests.begin() as line:
        line.route()
        line.placed(PLACED)
        line.fail("worker_lost")
        line.route()
        raise Unavailable("no other worker")
    assert [r["status"] for r in requests.listed()["ended"]] == ["unavailable"]
    assert requests.listed()["unplaced"] == []


def test_tenants_see_their_own_requests(requests: Requests) -> None:
    requests.refuse(Overloaded("full"), Tenant("a"))
    assert requests.listed("a")["unplaced"][0]["count"] == 1
    assert requests.listed("b") == requests.listed()
    assert not any(requests.listed().values())


async def test_router_and_gateway_refusals_are_listed_with_the_running_request(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(max_concurrent=2)
    prompt = {"prompt": "x"}
    site.worker.script = hang
    held = asyncio.create_task(site.http.post("/v1/completions", json=prompt))
    await site.router.started(1)
    site.router.refusals = [(429, "queue_full")] * 20
    for body in [prompt] * 20 + [{"prompt": ["a", "b", "c"]}]:  # three are above the limit of two
        assert (await site.http.post("/v1/completions", json=body)).status_code == 429
    listed = (await site.http.get("/page/state")).json()["requests"]
    assert [request["status"] for request in listed["running"]] == ["running"]
    (group,) = listed["unplaced"]
    assert (group["status"], group["count"], listed["ended"]) == ("overloaded", 23, [])
    held.cancel()
    await site.router.settled()
    site.worker.script = say(5)
    assert (await site.http.post("/v1/completions", json=prompt)).status_code == 200
    listed = (await site.http.get("/page/state")).json()["requests"]
    assert [request["status"] for request in listed["ended"]] == ["ok", "cancelled"]
