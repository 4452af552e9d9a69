"""Invalid requests: the error names the field, and the request reaches no worker."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from services.common.errors import InvalidRequest
from services.gateway.http.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import hang, say

CHAT = [{"role": "user", "content": "hi"}]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "prompt", "invalid_value"),
    ({"prompt": None}, "prompt", "invalid_value"),
    ({"prompt": 7}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [49152]}, "prompt", "invalid_value"),
    ({"prompt": [[1], [2, -1]]}, "prompt", "invalid_value"),
    ({"prompt": [1, 1 << 32]}, "prompt", "invalid_value"),
    ({"prompt": [1, 1 << 70]}, "prompt", "invalid_value"),
    ({"prompt": [-1, 1 << 70]}, "prompt", "invalid_value"),
    ({"prompt": [1, True]}, "prompt", "invalid_value"),
    ({"prompt": ["x"] * 33}, "prompt", "invalid_value"),
    ({"prompt": [1] * 8192}, "prompt", "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "max_tokens": -5}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "max_tokens": 10**9}, "max_tokens", "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "n": 10**9}, "n", "invalid_value"),
    ({"prompt": "x", "n": 0}, "n", "invalid_value"),
    ({"prompt": "x", "temperature": 2.5}, "temperature", "invalid_value"),
    ({"prompt": "x", "top_p": -0.1}, "top_p", "invalid_value"),
    ({"prompt": "x", "min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"prompt": "x", "min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    ({"prompt": "x", "top_k": -2}, "top_k", "invalid_value"),
    ({"prompt": "x", "min_p": 1.5}, "min_p", "invalid_value"),
    ({"prompt": "x", "seed": 1 << 64}, "seed", "invalid_value"),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"prompt": "x", "frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"prompt": "x", "repetition_penalty": 1e-300}, "repetition_penalty", "invalid_value"),
    ({"prompt": "x", "repetition_penalty": 10.1}, "repetition_penalty", "invalid_value"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"1": 1, "01": 2}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"1_0": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"49152": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "stop": ["a"] * 5}, "stop", "invalid_value"),
    ({"prompt": "x", "stop": ""}, "stop", "invalid_value"),
    ({"prompt": "x", "stop": "a" * 257}, "stop", "invalid_value"),
    ({"prompt": "x", "stop_token_ids": [49152]}, "stop_token_ids", "invalid_value"),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"prompt": "x", "stop_token_ids": [1] * 65}, "stop_token_ids", "invalid_value"),
    ({"prompt": "x", "stop_token_ids": "1"}, "stop_token_ids", "invalid_value"),
    ({"prompt": "x", "allowed_token_ids": [49152]}, "allowed_token_ids", "invalid_value"),
    ({"prompt": "x", "allowed_token_ids": [1] * 16385}, "allowed_token_ids", "invalid_value"),
    ({"prompt": "x", "bad_words": ["a"] * 33}, "bad_words", "invalid_value"),
    ({"prompt": "x", "bad_words": ["a", "  "]}, "bad_words[1]", "invalid_value"),
    ({"prompt": "x", "bad_words": ["a" * 129]}, "bad_words[0]", "invalid_value"),
    ({"prompt": "x", "bad_words": ["?! " * 20]}, "bad_words[0]", "invalid_value"),
    (
        {"prompt": "x", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
        "min_tokens",
        "invalid_value",
    ),
    ({"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"prompt": "x", "truncate_prompt_tokens": 8193}, "truncate_prompt_tokens", "invalid_value"),
    ({"prompt": "x", "truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"prompt": "x", "stream_options": {"more": 1}}, "stream_options.more", "unknown_parameter"),
    ({"prompt": "x", "k" * 5000: 1}, "k" * 128, "unknown_parameter"),
    ({"prompt": "x", "best_of": 2}, "best_of", "unsupported_parameter"),
    ({"prompt": "x", "kv_transfer_params": {}}, "kv_transfer_params", "unknown_parameter"),
    ({"prompt": "x", "model": "gpt-4"}, "model", "model_not_found"),
]

BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "other", "content": "x"}]}, "messages[0].role", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": "x", "audio": {}}]},
        "messages[0].audio",
        "unsupported_parameter",
    ),
    ({"messages": CHAT, "tools": [{}]}, "tools[0].type", "invalid_value"),
    ({"messages": CHAT, "response_format": {}}, "response_format.type", "invalid_value"),
    ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"messages": CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
    ({"messages": CHAT, "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    (
        {"messages": CHAT, "max_completion_tokens": 10**6},
        "max_completion_tokens",
        "context_length_exceeded",
    ),
    ({"messages": CHAT, "top_logprobs": 3}, "top_logprobs", "invalid_value"),
    (
        {"messages": CHAT, "max_tokens": 3, "max_completion_tokens": 4},
        "max_completion_tokens",
        "invalid_value",
    ),
]


async def check_refused(site: Site, path: str, body: Any, param: str | None, code: str) -> None:
    response = await site.http.post(path, json=body)
    assert response.status_code == (404 if code == "model_not_found" else 400), response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert response.headers["x-request-id"]


async def test_error_names_the_invalid_field(site: Site) -> None:
    for body, param, code in BAD_COMPLETIONS:
        await check_refused(site, "/v1/completions", body, param, code)
    for body, param, code in BAD_CHATS:
        await check_refused(site, "/v1/chat/completions", body, param, code)
    assert site.router.places == []
    assert site.worker.streams == []


@pytest.mark.parametrize("raw", [b'{"prompt": 7}', b'{"prompt": "x'])
def test_error_does_not_keep_the_body_alive(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(raw, CompletionBody, max_depth=16, context_length=9)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (CompletionBody, {"prompt": [{}] * 1000}),
        (CompletionBody, {"prompt": [["x"] * 1000]}),
        (CompletionBody, {"prompt": [["x"]] * 1000}),
        (CompletionBody, {"prompt": "x", "stop": [1] * 1000}),
        (ChatBody, {"messages": [{}] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (TokenizeBody, {"messages": [1] * 1000}),
        (DetokenizeBody, {"tokens": ["x"] * 1000}),
    ],
)
def test_validation_of_a_list_stops_at_the_first_error(
    body: type[BaseModel], content: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        body.model_validate(content)
    # Each error takes a kilobyte of memory and blocks the event loop for some time.
    assert caught.value.error_count() < 10


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b"[" * 500 + b"]" * 500,
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt": ' + b'{"a":' * 20 + b"1" + b"}" * 21,
    ],
    ids=lambda raw: repr(raw[:24]),
)
async def test_body_that_is_not_a_json_object_is_400(site: Site, raw: bytes) -> None:
    response = await site.http.post("/v1/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("declared", [True, False])
async def test_large_body_is_413_while_it_is_read(site: Site, declared: bool) -> None:
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        for _ in range(160):
            sent += 1 << 16
            yield b" " * (1 << 16)

    content = b" " * (10 << 20) if declared else chunks()
    response = await site.http.post("/v1/completions", content=content)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert (await site.http.get("/health")).status_code == 200


async def test_body_that_does_not_arrive_is_408(open_site: OpenSite) -> None:
    site: Site = await open_site(body_timeout_s=0.1)

    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(1)

    response = await site.http.post("/v1/completions", content=slow())
    assert response.status_code == 408
    assert response.headers["connection"] == "close"
    assert "did not arrive" in response.json()["error"]["message"]


async def test_unknown_paths_and_methods_have_the_error_format(site: Site) -> None:
    assert (await site.http.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    response = await site.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"]
    for path in ("/v1/models/other", "/v1/models/", "/health/"):
        response = await site.http.get(path)
        assert response.status_code == 404
        assert "location" not in response.headers
    assert (await site.http.get("/v1/models/" + "m" * 5000)).text.count("m") < 200


async def test_probes_answer_to_head(site: Site) -> None:
    for path in ("/health", "/ready", "/version", "/metrics"):
        response = await site.http.head(path)
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        ((429, "queue_full"), 429, "overloaded"),
        ((408, "queue_timeout"), 408, "queue_timeout"),
        ((413, "too_large"), 400, "context_length_exceeded"),
        ((503, "no_workers"), 503, "unavailable"),
        ((404, "unknown_model"), 503, "unavailable"),
        ((400, "invalid"), 500, "internal_error"),
    ],
)
async def test_errors_of_the_router_are_translated(
    site: Site, refusal: tuple[int, str], status: int, code: str
) -> None:
    site.router.refusals = [refusal]
    response = await site.http.post("/v1/completions", json={"prompt": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_prompts_above_max_concurrent_are_429(open_site: OpenSite) -> None:
    site: Site = await open_site(max_concurrent=2)
    site.worker.script = hang
    held = asyncio.create_task(site.http.post("/v1/completions", json={"prompt": ["x", "y"]}))
    await site.router.started(2)
    response = await site.http.post("/v1/completions", json={"prompt": "z"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    held.cancel()
    await site.router.settled()
    site.worker.script = say(5)
    assert (await site.http.post("/v1/completions", json={"prompt": "z"})).status_code == 200
