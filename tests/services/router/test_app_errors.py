"""Authorization and invalid requests of the router's HTTP API: statuses and error bodies."""

import json
from base64 import b64encode

import pytest

from services.common.placement import Outcome, Release, Role
from services.common.router_errors import ErrorCode
from services.router.app import create_app
from services.router.settings import RouterSettings
from tests.services.router.app import HEADERS, TOKEN, Router, code_of
from tests.services.router.samples import place_request, registration


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


@pytest.mark.parametrize("declared", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_body_that_is_not_declared_as_json_is_415(declared: str | None) -> None:
    app = create_app(RouterSettings.model_validate({"cluster_token": None}))
    headers = {} if declared is None else {"Content-Type": declared}
    body = registration("rogue", Role.DECODE).model_dump_json()
    async with app.test_app():
        client = app.test_client()
        for path in ("register", "heartbeat", "place", "release", "deregister"):
            response = await client.post(f"/v1/{path}", data=body, headers=headers)
            assert response.status_code == 415
        listed = await (await client.get("/v1/workers")).get_json()
    assert listed["workers"] == []


async def test_foreign_host_is_403_without_a_token(router: Router) -> None:
    app = create_app(RouterSettings.model_validate({"cluster_token": None}))
    host = {"Host": "evil.example:8002"}
    async with app.test_app():
        for path in ("/v1/workers", "/metrics", "/absent"):
            refused = await app.test_client().get(path, headers=host)
            assert refused.status_code == 403
            assert "evil.example" in (await refused.get_json())["error"]["message"]
    with_token = await router.client.get("/v1/workers", headers={**HEADERS, **host})
    assert with_token.status_code == 200


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
    for wrong in ("/v2/place", "/v1//place", "/v1/place/"):
        assert (await router.post(wrong, b"{}"))[0] == 404
    response = await router.client.get("/v1/place", headers=HEADERS)
    assert response.status_code == 405
    assert code_of(await response.get_json()) is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("host", [".1", "a..b"])
async def test_invalid_host_has_a_typed_error(router: Router, host: str) -> None:
    for path in ("/health", "/v1/workers"):
        answer = await router.client.get(path, headers={**HEADERS, "Host": host})
        assert answer.status_code == 400
        assert code_of(json.loads(await answer.get_data())) == ErrorCode.INVALID


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
