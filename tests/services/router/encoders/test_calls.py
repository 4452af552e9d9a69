"""The calls below /v1/encoders, over the app of the router."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.common.placement import Deregistration, Outcome, Release
from tests.services.router.app import HEADERS, Router
from tests.services.router.encoders.samples import beat, registration, request


async def join(router: Router, name: str = "a") -> None:
    for path, body in (("register", registration(name)), ("heartbeat", beat(name))):
        status, answer, _ = await router.post(f"/v1/encoders/{path}", body)
        assert status == 200, answer


async def listed(router: Router) -> Any:
    return await (await router.client.get("/v1/encoders", headers=HEADERS)).get_json()


async def test_life_of_a_placement(router: Router) -> None:
    await join(router)
    status, placed, _ = await router.post("/v1/encoders/place", request("p1", 30))
    assert (status, placed["worker"]["worker_id"]) == (200, "a")
    assert placed["model"]["max_tokens"] == 64
    assert (await listed(router))["workers"][0]["queue_tokens"] == 30
    ended = Release(placement_id="p1", outcome=Outcome.OK)
    assert (await router.post("/v1/encoders/release", ended))[0] == 200
    found = await listed(router)
    assert (found["workers"][0]["queue_tokens"], found["models"][0]["ready"]) == (0, True)


async def test_unknown_worker_is_asked_to_register(router: Router) -> None:
    status, reply, _ = await router.post("/v1/encoders/heartbeat", beat("nobody"))
    assert (status, reply["register_again"]) == (200, True)


async def test_deregistered_worker_is_not_listed(router: Router) -> None:
    await join(router)
    await router.post("/v1/encoders/deregister", Deregistration(worker_id="a", epoch="e1"))
    assert await listed(router) == {"workers": [], "models": [], "waiting": 0}
    status, answer, _ = await router.post("/v1/encoders/heartbeat", beat("a"))
    assert (status, answer["error"]["code"]) == (409, "stale_epoch")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("place", '{"placement_id": "p", "request_id": "r", "model": "m", "tokens": 0}'),
        ("place", '{"placement_id": "p", "request_id": "r", "tokens": 1}'),
        ("register", "{}"),
        ("heartbeat", "[]"),
    ],
)
async def test_invalid_body_is_refused(router: Router, path: str, body: str) -> None:
    status, answer, _ = await router.post(f"/v1/encoders/{path}", body)
    assert (status, answer["error"]["code"]) == (400, "invalid")


async def test_calls_need_the_cluster_token(router: Router) -> None:
    headers = {"Content-Type": "application/json"}
    assert (await router.post("/v1/encoders/place", request("p"), headers))[0] == 401
    assert (await router.client.get("/v1/encoders")).status_code == 401


async def test_metrics_count_encoder_workers_and_placements(router: Router) -> None:
    await join(router)
    await router.post("/v1/encoders/place", request("p1", 30))
    exposed = await router.client.get("/metrics", headers=HEADERS)
    text = await exposed.get_data(as_text=True)
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["headrace_router_workers", "encoder", "ready"] == 1
    assert samples["headrace_router_queue_tokens", "a", "encoder"] == 30
    assert samples["headrace_router_encode_placements_total", "placed"] == 1
