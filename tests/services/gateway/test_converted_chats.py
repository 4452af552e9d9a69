"""Interfaces that are converted to chats: they send the requests of chats to workers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.v1 import request_pb2
from tests.services.gateway.chat_models import END, family_model, speak
from tests.services.gateway.conftest import OpenSite, Site, gateway_site
from tests.services.gateway.failures import outcomes
from tests.services.gateway.fakes import FakeStream, hang, until

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
USER = {"role": "user", "content": "Weather in Zürich? " * 300}
"""A message that is large enough to be parsed in a thread."""
CALLED = {"name": "get_weather", "arguments": '{"city":"Rome"}'}
SAMPLING = {"temperature": 0.5, "top_p": 0.75}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

# Fields of a chat and those of the other interfaces with the same meaning.
CHOICES: list[tuple[Any, Any, Any]] = [
    ("auto", "auto", {"type": "auto"}),
    ("required", "required", {"type": "any"}),
    ("none", "none", {"type": "none"}),
    (
        {"type": "function", "function": {"name": "get_weather"}},
        {"type": "function", "name": "get_weather"},
        {"type": "tool", "name": "get_weather"},
    ),
]


@pytest.fixture
async def family(tmp_path: Path) -> AsyncIterator[Site]:
    async with gateway_site(family_model(tmp_path, "hermes"), 1, None, {}) as site:
        yield site


def function(*, strict: bool) -> dict[str, Any]:
    return {"name": "get_weather", "parameters": SCHEMA, "strict": strict}


def chat_body(choice: Any, *, strict: bool) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": CALLED}
    return {
        "messages": [
            {"role": "system", "content": "Be short."},
            USER,
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": function(strict=strict)}],
        "tool_choice": choice,
        "max_tokens": 300,
        **SAMPLING,
    }


def responses_body(choice: Any, *, strict: bool) -> dict[str, Any]:
    return {
        "instructions": "Be short.",
        "input": [
            USER,
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "1", **CALLED},
            {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        ],
        "tools": [{"type": "function", **function(strict=strict)}],
        "tool_choice": choice,
        "max_output_tokens": 300,
        **SAMPLING,
    }


def messages_body(choice: Any, *, strict: bool) -> dict[str, Any]:
    given = json.loads(CALLED["arguments"])
    call = {"type": "tool_use", "id": "1", "name": CALLED["name"], "input": given}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "sunny"}
    return {
        "system": "Be short.",
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "get_weather", "input_schema": SCHEMA, "strict": strict}],
        "tool_choice": choice,
        "max_tokens": 300,
        **SAMPLING,
    }


def bodies(choice: tuple[Any, Any, Any], *, strict: bool) -> dict[str, dict[str, Any]]:
    """Return bodies that amount to the same chat, by path."""
    chat, responses, messages = choice
    return {
        CHAT: chat_body(chat, strict=strict),
        RESPONSES: responses_body(responses, strict=strict),
        MESSAGES: messages_body(messages, strict=strict),
    }


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: json.dumps(choice[1]))
@pytest.mark.parametrize("strict", [False, True])
async def test_worker_gets_the_request_of_the_chat(
    family: Site, choice: tuple[Any, Any, Any], strict: bool
) -> None:
    family.worker.script = speak(family, CALL + END)
    sent: dict[str, request_pb2.Request] = {}
    answers = {}
    for path, body in bodies(choice, strict=strict).items():
        response = await family.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answers[path] = response.json()
        sent[path] = family.worker.streams[-1].start.request
        sent[path].sampling.seed = 0
        sent[path].request_id = sent[path].placement_id = ""
    assert sent[RESPONSES] == sent[CHAT]
    assert sent[MESSAGES] == sent[CHAT]
    if choice[0] != "none":
        assert answers[RESPONSES]["output"][0]["name"] == "get_weather"
        assert answers[MESSAGES]["content"][0]["input"] == {"city": "Zürich"}
        assert answers[MESSAGES]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_cancels_the_stream(family: Site, path: str, stream: bool) -> None:
    async def script(down: FakeStream) -> None:
        await down.tokens(5)
        await down.cancelled.wait()

    family.worker.script = script
    body = {**bodies(CHOICES[0], strict=False)[path], "stream": stream}
    asking = asyncio.create_task(family.http.post(path, json=body))
    await family.router.started(1)
    await asyncio.sleep(0.05)
    asking.cancel()
    async with asyncio.timeout(30):
        await family.worker.streams[0].cancelled.wait()
    await family.router.settled()
    assert outcomes(family) == [("cancelled", None)]
    labels = {"endpoint": path, "status": "499"}
    await until(lambda: family.metric("headrace_requests_total", **labels) == 1)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_deadline_ends_the_stream_with_an_error(open_site: OpenSite, path: str) -> None:
    async def script(down: FakeStream) -> None:
        await down.tokens(5)
        await hang(down)

    site: Site = await open_site(deadline_s=2.0)
    site.worker.script = script
    body = {"input": "x"} if path == RESPONSES else {"messages": [USER], "max_tokens": 9}
    response = await site.http.post(path, json={**body, "stream": True})
    last = json.loads(response.text.strip().rpartition("data: ")[2])
    error = last["response"]["error"] if path == RESPONSES else last["error"]
    assert "deadline" in error["message"]
    labels = {"endpoint": path, "status": "504"}
    await until(lambda: site.metric("headrace_requests_total", **labels) == 1)
