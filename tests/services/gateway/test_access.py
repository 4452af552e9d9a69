"""Web pages: CORS for allowed origins only, no "simple" cross-origin requests, no DNS rebinding."""

import hashlib
import json
from typing import Any

import httpx
import pytest

from services.common.errors import SettingsError
from services.gateway.keys import ApiKeys, Tenant
from services.gateway.settings import GatewaySettings
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import say

UI = "https://ui.example"
PREFLIGHT = {
    "origin": UI,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
ALLOWED = "access-control-allow-origin"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
KEYS = ApiKeys({hashlib.sha256(b"sk").digest(): Tenant("team")})


async def test_preflight_of_an_allowed_origin(open_site: OpenSite) -> None:
    site: Site = await open_site(allowed_origins=["http://other.example", UI], keys=KEYS)
    for path in (*BODIES, "/v1/models", "/page/state"):
        response = await site.http.options(path, headers=PREFLIGHT)
        assert response.status_code == 200, "a preflight has no key"
        assert response.headers[ALLOWED] == UI
        assert "POST" in response.headers["access-control-allow-methods"]
        allowed = response.headers["access-control-allow-headers"]
        assert set(allowed.split(",")) >= {"authorization", "content-type", "x-stainless-os"}
        assert "Origin" in response.headers["vary"]
        assert "access-control-allow-credentials" not in response.headers
    local = {**PREFLIGHT, "access-control-request-private-network": "true"}
    response = await site.http.options("/tokenize", headers=local)
    assert response.headers["access-control-allow-private-network"] == "true"


async def test_responses_and_errors_name_the_allowed_origin(open_site: OpenSite) -> None:
    site: Site = await open_site(allowed_origins=[UI], keys=KEYS)
    site.worker.script = say(5)
    key = {"authorization": "Bearer sk", "origin": UI}
    body = {"prompt": "x"}
    for stream in (False, True):
        answer = await site.http.post(
            "/v1/completions", json={**body, "stream": stream}, headers=key
        )
        check_allowed(answer, 200)
    check_allowed(await site.http.get("/v1/models", headers=key), 200)
    check_allowed(await site.http.post("/v1/completions", json=body, headers={"origin": UI}), 401)
    check_allowed(await site.http.post("/v1/completions", json={}, headers=key), 400)
    check_allowed(await site.http.get("/absent", headers=key), 404)
    check_allowed(await site.http.get("/v1/completions", headers=key), 405)
    site.gateway.draining = True
    check_allowed(await site.http.post("/v1/completions", json=body, headers=key), 503)


def check_allowed(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text
    assert response.headers[ALLOWED] == UI
    assert "Origin" in response.headers["vary"]
    exposed = response.headers["access-control-expose-headers"]
    assert {"retry-after", "x-request-id"} <= set(exposed.split(", "))


async def test_other_origins_are_not_allowed(open_site: OpenSite) -> None:
    site: Site = await open_site(allowed_origins=[UI])
    for origin in ("https://evil.example", "null", UI + ".evil.example", "http://ui.example"):
        response = await site.http.options(
            "/v1/completions", headers={**PREFLIGHT, "origin": origin}
        )
        assert response.status_code == 400
        assert ALLOWED not in response.headers
        response = await site.http.get("/v1/models", headers={"origin": origin})
        assert ALLOWED not in response.headers
        assert "Origin" in response.headers["vary"]
    assert "Origin" in (await site.http.get("/v1/models")).headers["vary"]


async def test_origins_of_a_scheme_can_be_allowed(open_site: OpenSite) -> None:
    site: Site = await open_site(allowed_origins=["moz-extension://*", "tauri://localhost"])
    for origin in ("moz-extension://0b7d0d6e", "tauri://localhost"):
        response = await site.http.options("/tokenize", headers={**PREFLIGHT, "origin": origin})
        assert response.headers[ALLOWED] == origin
    for origin in ("moz-extension://", "xmoz-extension://a", "https://moz-extension", "tauri://a"):
        response = await site.http.options("/tokenize", headers={**PREFLIGHT, "origin": origin})
        assert ALLOWED not in response.headers


async def test_star_allows_every_origin(open_site: OpenSite) -> None:
    site: Site = await open_site(allowed_origins=["*"])
    assert (await site.http.options("/tokenize", headers=PREFLIGHT)).headers[ALLOWED] == "*"
    for path in ("/v1/models", "/absent"):
        assert (await site.http.get(path, headers={"origin": UI})).headers[ALLOWED] == "*"


async def test_no_origin_is_allowed_by_default(site: Site) -> None:
    assert (await site.http.options("/v1/completions", headers=PREFLIGHT)).status_code == 405
    for path in ("/v1/models", "/page/state", "/"):
        assert ALLOWED not in (await site.http.get(path, headers={"origin": UI})).headers


@pytest.mark.parametrize("origin", ["ui.example", "https://ui.example/", "https://*.example", ""])
def test_invalid_origin_is_a_settings_error(origin: str) -> None:
    with pytest.raises(SettingsError, match="allowed_origins"):
        GatewaySettings.load([f"--allowed-origins={origin}"])


@pytest.mark.few(7)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "declared",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
        "application/json, text/plain",
        "",
        None,
    ],
)
async def test_body_that_is_not_declared_as_json_is_415(
    site: Site, path: str, declared: str | None
) -> None:
    headers = {"origin": UI} if declared is None else {"origin": UI, "content-type": declared}
    async with httpx.AsyncClient(base_url=site.url, trust_env=False) as browser:
        content = json.dumps(BODIES[path]).encode()
        response = await browser.post(path, content=content, headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"
    assert "application/json" in response.json()["error"]["message"]
    assert not site.router.places


@pytest.mark.parametrize("declared", ["application/json; charset=utf-8", "Application/JSON"])
async def test_parameters_and_case_of_the_content_type_do_not_matter(
    site: Site, declared: str
) -> None:
    headers = {"content-type": declared}
    response = await site.http.post("/tokenize", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/", "/page/state", "/v1/models", "/metrics", "/tokenize"])
async def test_foreign_host_is_403_without_keys(site: Site, path: str) -> None:
    method = "POST" if path == "/tokenize" else "GET"
    body = BODIES["/tokenize"] if method == "POST" else None
    port = site.url.rpartition(":")[2]
    for host, status in ((f"evil.example:{port}", 403), (f"localhost:{port}", 200)):
        response = await site.http.request(method, path, json=body, headers={"host": host})
        assert response.status_code == status
        if status == 403:
            assert response.json()["error"]["code"] == "host_not_allowed"
            assert "x-request-id" in response.headers


async def test_host_may_be_any_with_keys_or_if_it_is_allowed(open_site: OpenSite) -> None:
    host = {"host": "ai.example.com"}
    for settings in ({"keys": KEYS}, {"allowed_hosts": ["ai.example.com"]}):
        site: Site = await open_site(**settings)
        assert (await site.http.get("/health", headers=host)).status_code == 200


async def test_api_description_has_no_pages_with_foreign_scripts(site: Site) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert (await site.http.get(path)).status_code == 404
    assert (await site.http.get("/openapi.json")).json()["openapi"]
