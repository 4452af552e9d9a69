"""Anthropic's Messages API: answers, whole and streamed, and its errors."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.v1 import error_pb2
from services.gateway.http.messages_api.response_schemas import (
    MessagesErrorResponse,
    MessagesResponse,
)
from services.gateway.keys import ApiKeys, Tenant
from tests.services.gateway.chat_models import END, family_model, speak
from tests.services.gateway.conftest import OpenSite, Site, gateway_site
from tests.services.gateway.failures import failing
from tests.services.gateway.fakes import LENGTH, FakeStream, hang, say

ARGUMENTS = '{"city": "Zürich", "days": [1, {"x": "}"}]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>As é.</think>"
TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Weather in Zürich?"}
BODY: dict[str, Any] = {"messages": [USER], "max_tokens": 500, "tools": [TOOL]}
PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"


@pytest.fixture
async def family(tmp_path: Path) -> AsyncIterator[Site]:
    """A model that reasons and calls tools, on two workers."""
    async with gateway_site(family_model(tmp_path, "qwen-3"), 2, None, {}) as site:
        yield site


async def whole(site: Site, **body: Any) -> dict[str, Any]:
    response = await site.http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    MessagesResponse.model_validate(content, strict=True)
    return content


async def streamed(site: Site, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    response = await site.http.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for lines in response.text.strip().split("\n\n"):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a complete stream, whose order of events is checked."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == (None, 0)
    partial, is_open = "", False
    for event in events[2:-2]:
        index = event["index"]
        match event["type"]:
            case "content_block_start":
                assert (index, is_open) == (len(message["content"]), False)
                message["content"].append(event["content_block"])
                partial, is_open = "", True
            case "content_block_delta":
                assert (index, is_open) == (len(message["content"]) - 1, True)
                delta, block = event["delta"], message["content"][-1]
                if delta["type"] == "input_json_delta":
                    partial += delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] += delta[field]
            case "content_block_stop":
                if partial:
                    message["content"][-1]["input"] = json.loads(partial)
                is_open = False
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": None, "content": content}


async def test_text_and_usage(site: Site) -> None:
    ids = site.encode("Hello there.")

    async def script(stream: FakeStream) -> None:
        await stream.tokens(ids[0], cached=5)
        await stream.tokens(*ids[1:])
        await stream.end()

    site.worker.script = script
    body = {"messages": [{"role": "user", "content": "Hi"}], "system": "Be short."}
    response = await site.http.post(PATH, json={**body, "max_tokens": 50})
    answer = response.json()
    assert answer["content"] == [{"type": "text", "text": "Hello there."}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert response.headers["request-id"] == response.headers["x-request-id"]
    messages = [{"role": "system", "content": "Be short."}, *body["messages"]]
    tokens = (await site.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (len(tokens) - 5, 5)
    assert usage["output_tokens"] == len(ids)
    counted = (await site.http.post(COUNT, json=body)).json()
    assert counted == {"input_tokens": len(tokens)}


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_blocks_and_events(family: Site, size: int) -> None:
    output = f"{THOUGHT}Well. {CALL}\n{CALL}{END}"
    family.worker.script = speak(family, output, size=size)
    answer = await whole(family, **BODY)
    call = {"type": "tool_use", "name": "get_weather", "input": json.loads(ARGUMENTS)}
    assert without_ids(answer)["content"] == [
        {"type": "thinking", "thinking": "As é.", "signature": ""},
        {"type": "text", "text": "Well. "},
        call,
        call,
    ]
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"]["output_tokens"] == len(family.encode(output))
    thinking = answer["usage"]["output_tokens_details"]["thinking_tokens"]
    assert thinking == len(family.encode(THOUGHT))
    assert without_ids(assembled(await streamed(family, **BODY))) == without_ids(answer)


@pytest.mark.parametrize(
    ("output", "given"),
    [
        (f"So {CALL[:-20]}", {"city": "Zürich", "days": [1, {}]}),
        ('So <tool_call>{"name": "get_weather", "arguments": {"a": [1, tru', {"a": [1]}),
    ],
)
async def test_call_that_is_cut(family: Site, output: str, given: dict[str, Any]) -> None:
    family.worker.script = speak(family, output, end=LENGTH)
    answer = await whole(family, **BODY)
    assert (answer["stop_reason"], answer["content"][1]["input"]) == ("max_tokens", given)
    events = await streamed(family, **BODY)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


@pytest.mark.parametrize("display", ["summarized", "updates", "omitted"])
async def test_display_of_the_reasoning(family: Site, display: str) -> None:
    family.worker.script = speak(family, f"{THOUGHT}Well.{END}")
    body = {**BODY, "thinking": {"type": "adaptive", "display": display}}
    answer = await whole(family, **body)
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == (["text"] if display == "omitted" else ["thinking", "text"])
    thinking = answer["usage"]["output_tokens_details"]["thinking_tokens"]
    assert thinking == len(family.encode(THOUGHT))
    assert assembled(await streamed(family, **body))["content"] == answer["content"]


async def test_context_length_has_the_wording_of_anthropic(site: Site) -> None:
    body = {"messages": [USER], "max_tokens": 9000}
    counted = (await site.http.post(COUNT, json={"messages": [USER]})).json()["input_tokens"]
    for changes, expected in (
        ({}, f"input length and `max_tokens` exceed context limit: {counted} + 9000 > 8192, "),
        ({"messages": [USER] * 1000}, "prompt is too long: "),
        ({"messages": [USER] * 9000}, "prompt is too long: 9000 tokens > 8192 maximum"),
    ):
        response = await site.http.post(PATH, json={**body, **changes})
        assert response.status_code == 400
        assert check_error(response, "invalid_request_error").startswith(expected)


async def test_stop_sequence_is_named(site: Site) -> None:
    site.worker.script = say(*site.encode("one two three four"))
    body = {"messages": [USER], "max_tokens": 50, "stop_sequences": ["five", " three"]}
    answer = await whole(site, **body)
    assert answer["content"] == [{"type": "text", "text": "one two"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " three")
    assert assembled(await streamed(site, **body))["stop_sequence"] == " three"


async def test_error_before_the_first_token_has_a_status(family: Site) -> None:
    for worker in family.workers:
        worker.script = failing(error_pb2.ERROR_CODE_NOT_FINITE)
    response = await family.http.post(PATH, json={**BODY, "stream": True})
    assert response.status_code == 500
    check_error(response, "api_error")


async def test_stream_that_fails_ends_with_the_error(family: Site) -> None:
    for worker in family.workers:
        worker.script = failing(error_pb2.ERROR_CODE_NOT_FINITE, *family.encode("Hello"))
    events = await streamed(family, **BODY)
    MessagesErrorResponse.model_validate(events[-1], strict=True)
    assert events[-1]["error"]["type"] == "api_error"


@pytest.mark.parametrize("at", [3, 20, 40, 70])
async def test_failover_does_not_change_the_message(family: Site, at: int) -> None:
    output = f"{THOUGHT}Well. {CALL}{END}"
    for worker in family.workers:
        worker.script = speak(family, output, size=2)
    expected = without_ids(await whole(family, **BODY))
    cut = family.encode(output)[:at]
    family.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, *cut)]
    assert without_ids(assembled(await streamed(family, **BODY))) == expected
    assert family.worker.queued == []


def check_error(response: httpx.Response, kind: str) -> str:
    """Check an error in Anthropic's form; return its message."""
    content = response.json()
    MessagesErrorResponse.model_validate(content, strict=True)
    assert content["error"]["type"] == kind
    assert content["request_id"] == response.headers["request-id"]
    message: str = content["error"]["message"]
    return message


async def test_errors_of_requests_have_the_form_of_the_interface(open_site: OpenSite) -> None:
    keys = ApiKeys({hashlib.sha256(b"sk").digest(): Tenant("team")})
    site: Site = await open_site(keys=keys, deadline_s=0.5)
    key = {"x-api-key": "sk", "anthropic-version": "2026-10-21"}
    body = {"messages": [USER], "max_tokens": 5}
    site.worker.script = hang
    for headers, content, path, status, kind in (
        ({}, body, PATH, 401, "authentication_error"),
        ({"x-api-key": "other"}, body, COUNT, 401, "authentication_error"),
        (key, {**body, "model": "other"}, PATH, 404, "not_found_error"),
        (key, body, f"{PATH}/other", 404, "not_found_error"),
        (key, body, f"{PATH}/batches", 404, "not_found_error"),
        (key, {**body, "messages": []}, PATH, 400, "invalid_request_error"),
        ({**key, "anthropic-version": "2023-01-01"}, body, PATH, 400, "invalid_request_error"),
        ({**key, "content-type": "text/plain"}, body, PATH, 415, "invalid_request_error"),
        (key, {**body, "system": " " * (2 << 20)}, PATH, 413, "request_too_large"),
        (key, body, PATH, 504, "timeout_error"),
    ):
        response = await site.http.post(path, json=content, headers=headers)
        assert response.status_code == status, response.text
        check_error(response, kind)
    response = await site.http.get(PATH, headers=key)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    check_error(response, "invalid_request_error")
    site.router.refusals = [(429, "queue_full")]
    response = await site.http.post(PATH, json=body, headers={"authorization": "Bearer sk"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    check_error(response, "rate_limit_error")
    site.gateway.draining = True
    response = await site.http.post(PATH, json=body, headers=key)
    assert response.status_code == 503
    check_error(response, "overloaded_error")


async def test_last_message_of_the_assistant_is_continued(family: Site) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    family.worker.script = speak(family, f" 18 °C.{END}")
    answer = await whole(family, messages=messages, max_tokens=50)
    assert answer["content"] == [{"type": "text", "text": " 18 °C."}]
    fields = {"messages": messages, "continue_final_message": True}
    tokens = (await family.http.post("/tokenize", json=fields)).json()["tokens"]
    assert answer["usage"]["input_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("name", "kind", "status", "reason"),
    [
        ("qwen-3", "enabled", 200, ""),
        ("qwen-3", "adaptive", 200, ""),
        ("qwen-3", "disabled", 400, "this model always reasons"),
        ("hermes", "enabled", 400, "this model does not reason"),
        ("hermes", "adaptive", 200, ""),
        ("hermes", "disabled", 200, ""),
    ],
)
async def test_thinking_of_models(
    tmp_path: Path, name: str, kind: str, status: int, reason: str
) -> None:
    """These templates have no switch for reasoning."""
    async with gateway_site(family_model(tmp_path, name), 1, None, {}) as site:
        body = {"messages": [USER], "thinking": {"type": kind}}
        response = await site.http.post(COUNT, json=body)
        assert response.status_code == status, response.text
        assert not reason or reason in check_error(response, "invalid_request_error")
