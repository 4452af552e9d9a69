"""The router's HTTP API without a socket: statuses, headers, bodies, disconnects."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from pydantic import BaseModel
from quart import Quart
from quart.typing import TestClientProtocol as ClientProtocol

from services.common.placement import (
    Deregistration,
    ErrorCode,
    Outcome,
    Placement,
    Release,
    Role,
    RouterError,
)
from services.router.app import build_dispatcher, create_app
from services.router.dispatcher import Dispatcher
from services.router.settings import RouterSettings
from tests.services.router.samples import beat, place_request, registration

TOKEN = "a-cluster-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


class Router:
    """A running app of the router, with an HTTP client, the dispatcher and the clock."""

    def __init__(self, app: Quart, dispatcher: Dispatcher, clock: "Clock") -> None:
        self.app, self.dispatcher, self.clock = app, dispatcher, clock
        self.client: ClientProtocol = app.test_client()

    async def post(
        self, path: str, body: BaseModel | str | bytes, headers: dict[str, str] = HEADERS
    ) -> tuple[int, Any, Any]:
        data = body.model_dump_json() if isinstance(body, BaseModel) else body
        response = await self.client.post(path, data=data, headers=headers)
        return response.status_code, await response.get_json(), response.headers

    async def join(self, name: str, role: Role, **load: Any) -> None:
        for path, body in (
            ("register", registration(name, role)),
            ("heartbeat", beat(name, **load)),
        ):
            assert (await self.post(f"/v1/{path}", body))[0] == 200

    async def until_waiting(self, count: int) -> None:
        await until(lambda: len(self.dispatcher.queue) == count)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.001)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    settings = RouterSettings.model_validate(
        {
            "cluster_token": TOKEN,
            "seed": 0,
            "max_waiting": 2,
            "retry_after_s": 7,
            "max_body_bytes": 4096,
            "tick_s": 0.001,
        }
    )
    clock, dispatcher = Clock(), build_dispatcher(settings)
    app = create_app(settings, dispatcher, clock=clock)
    async with app.test_app():
        yield Router(app, dispatcher, clock)


def code_of(body: Any) -> ErrorCode:
    return RouterError.model_validate(body).error.code


async def test_pair_is_placed_and_released(router: Router) -> None:
    await router.join("p0", Role.PREFILL)
    await router.join("d0", Role.DECODE)
    status, body, _ = await router.post("/v1/place", place_request())
    placement = Placement.model_validate(body)
    assert status == 200
    assert placement.prefill is not None
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p0", "d0")
    assert (placement.decode.epoch, placement.decode.address) == ("e1", "127.0.0.1:5000")
    release = Release(placement_id=placement.placement_id, outcome=Outcome.OK)
    for _ in range(2):
        assert (await router.post("/v1/release", release))[:2] == (200, {})
    workers = await (await router.client.get("/v1/workers", headers=HEADERS)).get_json()
    assert [w["promised_tokens"] for w in workers["workers"]] == [0, 0]


async def test_colocated_worker_is_placed_as_decode_without_prefill(router: Router) -> None:
    await router.join("c0", Role.COLOCATED)
    status, body, _ = await router.post("/v1/place", place_request())
    assert (status, body["prefill"], body["decode"]["worker_id"]) == (200, None, "c0")
    model = registration("c0", Role.COLOCATED).model.model_dump(mode="json")
    assert body["model"] == model
    workers = await (await router.client.get("/v1/workers", headers=HEADERS)).get_json()
    assert workers["workers"][0]["model_info"] == model


async def test_heartbeat_of_unknown_worker_registers_again_and_of_replaced_epoch_is_409(
    router: Router,
) -> None:
    assert (await router.post("/v1/heartbeat", beat("d0")))[1] == {"register_again": True}
    await router.join("d0", Role.DECODE)
    await router.post("/v1/register", registration("d0", Role.DECODE, epoch="e2"))
    for path, body in (
        ("heartbeat", beat("d0")),
        ("register", registration("d0", Role.DECODE)),
    ):
        status, answer, _ = await router.post(f"/v1/{path}", body)
        assert (status, code_of(answer)) == (409, ErrorCode.STALE_EPOCH)


async def test_deregistered_worker_gets_no_requests(router: Router) -> None:
    await router.join("c0", Role.COLOCATED)
    goodbye = Deregistration(worker_id="c0", epoch="e1")
    assert (await router.post("/v1/deregister", goodbye))[0] == 200
    status, body, headers = await router.post("/v1/place", place_request(wait_s=60))
    assert (status, code_of(body)) == (503, ErrorCode.NO_WORKERS)
    assert headers["Retry-After"] == "7"


@pytest.mark.parametrize(
    ("request_changes", "status", "code"),
    [
        ({"model": "absent"}, 404, ErrorCode.UNKNOWN_MODEL),
        ({"exclude": ["c0"]}, 503, ErrorCode.NO_WORKERS),
        ({"prompt_tokens": 64 * 16}, 413, ErrorCode.TOO_LARGE),
        ({"choices": 64}, 413, ErrorCode.TOO_LARGE),
    ],
)
async def test_unplaceable_request_is_refused(
    router: Router, request_changes: dict[str, Any], status: int, code: ErrorCode
) -> None:
    await router.join("c0", Role.COLOCATED)
    got, body, headers = await router.post("/v1/place", place_request(**request_changes))
    assert (got, code_of(body)) == (status, code)
    assert ("Retry-After" in headers) == (status == 503)


async def test_full_queue_is_429_and_long_wait_is_408(router: Router) -> None:
    await router.join("c0", Role.COLOCATED, pages_free=0)
    calls = [
        asyncio.create_task(router.post("/v1/place", place_request(wait_s=30))) for _ in range(2)
    ]
    await router.until_waiting(2)
    status, body, headers = await router.post("/v1/place", place_request(wait_s=30))
    assert (status, code_of(body)) == (429, ErrorCode.QUEUE_FULL)
    assert headers["Retry-After"] == "7"
    router.clock.now += 9
    await router.join("c0", Role.COLOCATED, pages_free=2)
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert [call.result()[0] for call in done] == [200]
    for _ in range(3):
        router.clock.now += 7
        await router.post("/v1/heartbeat", beat("c0", pages_free=0))
    status, body, headers = await waiting.pop()
    assert (status, code_of(body)) == (408, ErrorCode.QUEUE_TIMEOUT)
    assert "Retry-After" not in headers


async def test_disconnected_caller_is_removed_from_the_queue(router: Router) -> None:
    await router.join("c0", Role.COLOCATED, pages_free=0)
    body = place_request(wait_s=30).model_dump_json().encode()
    async with router.client.request("/v1/place", method="POST", headers=HEADERS) as connection:
        await connection.send(body)
        await connection.send_complete()
        await router.until_waiting(1)
        await connection.disconnect()
        await router.until_waiting(0)
    await router.post("/v1/heartbeat", beat("c0", pages_free=2))
    assert (await router.post("/v1/place", place_request()))[0] == 200, (
        "the cancelled call used no capacity"
    )
    metrics = await (await router.client.get("/metrics", headers=HEADERS)).get_data(as_text=True)
    assert 'headrace_placements_total{outcome="abandoned"} 1.0' in metrics
    assert "headrace_num_requests_waiting 0.0" in metrics


async def test_closing_refuses_queued_calls(router: Router) -> None:
    await router.join("c0", Role.COLOCATED, pages_free=0)
    call = asyncio.create_task(router.post("/v1/place", place_request(wait_s=30)))
    await router.until_waiting(1)
    assert (await router.client.get("/ready")).status_code == 200
    router.dispatcher.close()
    assert (await call)[0] == 503
    not_ready = await router.client.get("/ready")
    assert (not_ready.status_code, not_ready.headers["Retry-After"]) == (503, "7")
    assert (await router.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", TOKEN, f"bearer {TOKEN}", "Bearer \xff"]
)
async def test_v1_requires_the_cluster_token(router: Router, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    for path in ("register", "heartbeat", "place", "release", "deregister"):
        status, body, _ = await router.post(f"/v1/{path}", b"{}", headers)
        assert (status, code_of(body)) == (401, ErrorCode.UNAUTHENTICATED)
    for path in ("v1/workers", "v1/models", "v1/absent"):
        assert (await router.client.get(f"/{path}", headers=headers)).status_code == 401


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", TOKEN, "Basic !", "Basic Og=="])
async def test_metrics_require_the_cluster_token(router: Router, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    assert (await router.client.get("/metrics", headers=headers)).status_code == 401
    password = b64encode(f"prometheus:{TOKEN}".encode()).decode()
    for right in (HEADERS, {"Authorization": f"Basic {password}"}):
        assert (await router.client.get("/metrics", headers=right)).status_code == 200


async def test_v1_is_open_without_a_configured_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_CLUSTER_TOKEN", raising=False)
    app = create_app(RouterSettings.model_validate({}))
    async with app.test_app():
        assert (await app.test_client().get("/v1/workers")).status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"\xff\xfe", "body"),
        (b"[]", "body"),
        (b"[" * 4000, "body"),
        (b'{"request_id": "r"}', "prompt_tokens"),
        (place_request().model_dump_json()[:-1] + ', "kv_address": "x"}', "kv_address"),
        (
            place_request().model_dump_json().replace('"choices":1', '"choices":1000000000'),
            "choices",
        ),
        (place_request().model_dump_json().replace("17", "-17"), "prompt_tokens"),
        (place_request().model_dump_json().replace('"wait_s":0.0', '"wait_s":NaN'), "wait_s"),
        (
            place_request().model_dump_json().replace('"exclude":[]', '"exclude":["../x"]'),
            "exclude.0",
        ),
        (json.dumps({"request_id": "a\nb", "prompt_tokens": 1, "max_tokens": 1}), "request_id"),
    ],
)
async def test_error_of_an_invalid_body_names_the_field(
    router: Router, body: str | bytes, field: str
) -> None:
    await router.join("c0", Role.COLOCATED)
    status, answer, _ = await router.post("/v1/place", body)
    assert (status, code_of(answer)) == (400, ErrorCode.INVALID)
    assert answer["error"]["message"].startswith(f"{field}:")


async def test_oversize_body_wrong_path_and_method_have_typed_errors(router: Router) -> None:
    status, body, _ = await router.post("/v1/place", b" " * 5000)
    assert (status, code_of(body)) == (413, ErrorCode.TOO_LARGE)
    assert (await router.post("/v2/place", b"{}"))[0] == 404
    response = await router.client.get("/v1/place", headers=HEADERS)
    assert response.status_code == 405
    assert code_of(await response.get_json()) is ErrorCode.NOT_FOUND


async def test_internal_error_is_500_without_details(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr(router.dispatcher, "release", broken)
    release = Release(placement_id="a", outcome=Outcome.OK)
    status, body, _ = await router.post("/v1/release", release)
    assert (status, code_of(body)) == (500, ErrorCode.INTERNAL)
    assert "secret" not in json.dumps(body)


async def test_models_and_metrics(router: Router) -> None:
    await router.join("p0", Role.PREFILL, queue_tokens=5)
    await router.join("d0", Role.DECODE, queue_tokens=7)
    await router.post("/v1/place", place_request())
    models = await (await router.client.get("/v1/models", headers=HEADERS)).get_json()
    assert [model["name"] for model in models["models"]] == ["small"]
    text = await (await router.client.get("/metrics", headers=HEADERS)).get_data(as_text=True)
    for line in (
        'headrace_workers{role="decode",state="ready"} 1.0',
        'headrace_queue_tokens{role="prefill",worker="p0"} 22.0',
        'headrace_queue_tokens{role="decode",worker="d0"} 39.0',
        'headrace_requests_total{endpoint="/v1/place",status="200"} 1.0',
        'headrace_placements_total{outcome="placed"} 1.0',
        "headrace_place_seconds_count 1.0",
    ):
        assert line in text
    await router.post("/v1/deregister", Deregistration(worker_id="p0", epoch="e1"))
    text = await (await router.client.get("/metrics", headers=HEADERS)).get_data(as_text=True)
    assert 'worker="p0"' not in text, "a removed worker has no series"


async def test_silent_worker_is_removed_without_any_call(router: Router) -> None:
    await router.join("c0", Role.COLOCATED)
    router.clock.now += 10.1
    await until(lambda: not router.dispatcher.fleet.models())
