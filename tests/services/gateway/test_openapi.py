"""The OpenAPI document: every real response is documented, with its schema and headers."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from services.gateway.gateway import Gateway
from services.gateway.http import response_schemas
from services.gateway.http.messages_api import response_schemas as messages_api
from services.gateway.http.responses_api import response_schemas as responses_api
from services.gateway.keys import ApiKeys, Tenant
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import hang, say
from tests.services.gateway.raw import SHORT_TIMEOUTS, Raw, post

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
MODELS = (response_schemas, responses_api, messages_api)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {**CHAT, "max_tokens": 5}


class Document:
    """The OpenAPI document of a gateway."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    @classmethod
    async def of(cls, site: Site) -> "Document":
        return cls((await site.http.get("/openapi.json")).json())

    def check(self, path: str, response: httpx.Response) -> None:
        """Check a response of ``path``, a path template of the document."""
        method = response.request.method.lower()
        body = json.loads(response.content) if _is_json(response.headers) else None
        self.check_parts(method, path, response.status_code, response.headers, body)

    def check_parts(
        self, method: str, path: str, status: int, headers: Mapping[str, str], body: Any
    ) -> None:
        documented = self.content["paths"][path][method]["responses"][str(status)]
        media_type = headers["content-type"].partition(";")[0]
        schema = documented["content"][media_type]["schema"]
        if body is not None:  # the document is generated from these models
            names = [one["$ref"].rpartition("/")[2] for one in schema.get("anyOf", [schema])]
            models = [vars(m)[name] for name in names for m in MODELS if name in vars(m)]
            assert any(_is_valid(model, body) for model in models), (path, status, body)
        for name, header in documented["headers"].items():
            assert name in headers or not header.get("required"), (path, status, name)
        for name in ("retry-after", "www-authenticate", "connection"):
            assert name not in headers or name in documented["headers"], (path, status, name)


def _is_valid(model: type[BaseModel], body: Any) -> bool:
    try:
        model.model_validate(body, strict=True)
    except ValidationError:
        return False
    return True


def _is_json(headers: Mapping[str, str]) -> bool:
    return headers["content-type"].startswith("application/json")


async def test_successful_responses_match_the_document(site: Site) -> None:
    site.worker.script = say(*site.encode("hello"))
    document = await Document.of(site)
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "logprobs": 0, "n": 1}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "logprobs": True}),
        ("/v1/chat/completions", {**CHAT, "stream": True, "temperature": None}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses", {"input": "x", "stream": True}),
        ("/v1/messages", MESSAGE),
        ("/v1/messages", {**MESSAGE, "stream": True}),
        ("/v1/messages/count_tokens", CHAT),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        response = await site.http.post(path, json=body)
        assert response.status_code == 200, response.text
        document.check(path, response)
    for path in ("/v1/models", "/health", "/ready", "/version", "/metrics"):
        document.check(path, await site.http.get(path))
    document.check("/v1/models/{name}", await site.http.get(f"/v1/models/{site.model.name}"))


async def test_error_responses_match_the_document(open_site: OpenSite) -> None:
    keys = ApiKeys({hashlib.sha256(b"sk").digest(): Tenant("team")})
    site: Site = await open_site(keys=keys, max_concurrent=1, deadline_s=0.5)
    document = await Document.of(site)
    key = {"authorization": "Bearer sk"}
    for path in (*GENERATING, "/tokenize", "/detokenize"):
        bodies = {400: b"{", 404: b'{"model": "x"}', 413: b" " * (2 << 20)}
        bodies[404] = json.dumps(
            {"model": "x", "prompt": "x", "input": "x", **MESSAGE, "tokens": [1]}
        ).encode()
        for status, content in bodies.items():
            response = await site.http.post(path, content=content, headers=key)
            assert response.status_code in (status, 400), response.text
            document.check(path, response)
        document.check(path, await site.http.post(path, json={}))
    assert (await site.http.get("/v1/models")).status_code == 401
    document.check("/v1/models", await site.http.get("/v1/models"))
    document.check("/v1/models/{name}", await site.http.get("/v1/models/x", headers=key))
    path = "/v1/completions"
    body = {"prompt": "x"}
    refusals = [(429, "queue_full"), (408, "queue_timeout"), (413, "too_large")]
    refusals += [(503, "no_workers"), (400, "invalid")]
    for status, code in refusals:
        site.router.refusals = [(status, code)]
        response = await site.http.post(path, json=body, headers=key)
        assert response.status_code == {"invalid": 500, "too_large": 400}.get(code, status)
        document.check(path, response)
    site.worker.script = hang
    response = await site.http.post(path, json=body, headers=key)
    assert response.status_code == 504
    document.check(path, response)
    site.gateway.draining = True
    for path in ("/v1/completions", "/tokenize"):
        response = await site.http.post(path, json=body, headers=key)
        assert response.status_code == 503
        document.check(path, response)
    document.check("/ready", await site.http.get("/ready"))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"x: " + b"a" * 5000 + b"\r\n\r\n", 431),
        (b"x: a\x00b\r\n\r\n", 400),
        (b"x: ", 408),
    ],
)
async def test_errors_of_the_connection_match_the_document(
    open_site: OpenSite, sent: bytes, status: int
) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    document = await Document.of(site)
    for path in document.content["paths"]:
        raw = await Raw.to(site, b"GET %s HTTP/1.1\r\nhost: localhost\r\n" % path.encode() + sent)
        got, headers, body = await raw.answer()
        assert got == status
        method = "get" if "get" in document.content["paths"][path] else "post"
        document.check_parts(method, path, got, headers, body)
        await raw.close()


async def test_stalled_body_matches_the_document(open_site: OpenSite) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    document = await Document.of(site)
    raw = await Raw.to(site, post(b"{", length=100))
    status, headers, body = await raw.answer()
    assert status == 408
    document.check_parts("post", "/v1/completions", status, headers, body)
    await raw.close()


async def test_unexpected_error_matches_the_document(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = await Document.of(site)
    monkeypatch.setattr(Gateway, "require_model", None)
    response = await site.http.post("/tokenize", json={"prompt": "x"})
    assert response.status_code == 500
    document.check("/tokenize", response)


async def test_document_states_the_limits_of_a_body(open_site: OpenSite) -> None:
    site: Site = await open_site(max_body_bytes=12345, max_json_depth=7)
    document = await Document.of(site)
    for path in (*GENERATING, "/tokenize", "/detokenize"):
        body = document.content["paths"][path]["post"]["requestBody"]
        assert "12345 bytes" in body["description"]
        assert "7 levels" in body["description"]
    schemas = document.content["components"]["schemas"]
    temperature = schemas["CompletionBody"]["properties"]["temperature"]
    assert temperature["default"] == 1.0
    assert {"type": "number", "minimum": 0, "maximum": 2} in [
        {k: v for k, v in member.items() if k in ("type", "minimum", "maximum")}
        for member in temperature["anyOf"]
    ]


async def test_requests_that_match_the_document_are_parsed(site: Site) -> None:
    """Every optional field may be null, as documented."""
    site.worker.script = say(5)
    schemas = (await Document.of(site)).content["components"]["schemas"]
    for name, path, required in (
        ("CompletionBody", "/v1/completions", {"prompt": "x"}),
        ("ChatBody", "/v1/chat/completions", CHAT),
        ("ResponsesBody", "/v1/responses", {"input": "x"}),
        ("MessagesBody", "/v1/messages", MESSAGE),
        ("CountTokensBody", "/v1/messages/count_tokens", CHAT),
        ("TokenizeBody", "/tokenize", {"prompt": "x"}),
        ("DetokenizeBody", "/detokenize", {"tokens": [5]}),
    ):
        body = {**dict.fromkeys(schemas[name]["properties"]), **required}
        optional = [f for n, f in schemas[name]["properties"].items() if n not in required]
        assert all({"type": "null"} in field.get("anyOf", [{"type": "null"}]) for field in optional)
        response = await asyncio.wait_for(site.http.post(path, json=body), 10)
        assert response.status_code == 200, response.text
