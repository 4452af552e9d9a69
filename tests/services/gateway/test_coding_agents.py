"""The requests of Claude Code and Codex, as in ``recordings``, and what they need of the answers.

A recording is a list of requests. ``MODEL`` is the name of the model, ``CALL_<n>`` the id of a call
in the last answer, and ``THOUGHT`` a reasoning block, if the model reasons. Each request has the
output of the model and the answer without reasoning and ids, or else the error or the fields.
"""

import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.common.token_ids import unpack_tokens
from services.gateway.http.messages_api.response_schemas import MessagesErrorResponse
from services.gateway.keys import ApiKeys, Tenant
from tests.services.gateway.chat_models import END, family_model, speak
from tests.services.gateway.conftest import Site, gateway_site
from tests.services.gateway.test_messages_api import assembled
from tests.services.gateway.test_responses_api import check_item_events

RECORDINGS = Path(__file__).parent / "recordings"
FAMILIES = {"hermes": "", "qwen-3": "<think>é</think>", "qwen-3.5": "<think>é</think>"}
"""Families with the reasoning block of their outputs. That of Qwen 3.5 takes one system message."""
CLAUDE_CODE = {
    "authorization": "Bearer sk",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24,"
    "context-management-2025-06-27,mid-conversation-system-2026-04-07",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.277 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-claude-code-session-id": "s1",
}
CODEX = {
    "authorization": "Bearer sk",
    "accept": "text/event-stream",
    "originator": "codex_cli_rs",
    "user-agent": "codex_cli_rs/0.155.1",
    "session_id": "0199-0001",
    "version": "0.155.1",
}


@pytest.fixture(params=FAMILIES)
async def agent_site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    keys = ApiKeys({hashlib.sha256(b"sk").digest(): Tenant("team")})
    model = family_model(tmp_path, request.param)
    async with gateway_site(model, 1, keys, {}) as site:
        site.http.headers["x-family"] = request.param
        yield site


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    events = []
    for lines in text.strip().split("\n\n"):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def read_message(
    events: list[dict[str, Any]], stop_reason: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the blocks of a message without reasoning and ids, and the ids of calls."""
    message = assembled(events)
    assert message["stop_reason"] == stop_reason
    assert message["usage"]["output_tokens"] > 0
    blocks = [block for block in message["content"] if block["type"] != "thinking"]
    ids = [block.pop("id") for block in blocks if block["type"] == "tool_use"]
    return blocks, ids


def read_response(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the items of a response without reasoning and ids, and the ids of calls.

    Codex takes the items from the events that complete them, and the usage from the last event.
    """
    assert events[0]["type"] == "response.created"
    last = events[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["usage"]["total_tokens"] > 0
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    items, ids = [], []
    for index, item in enumerate(done):
        check_item_events(item, [e for e in events if e.get("output_index") == index])
        if item["type"] == "function_call":
            ids.append(item["call_id"])
            names = ("type", "namespace", "name", "arguments")
            items.append({name: item[name] for name in names if name in item})
        elif item["type"] == "message":
            text = item["content"][0]["text"]
            items.append({"type": "message", "role": item["role"], "text": text})
        else:
            assert item["summary"] == []
    return items, ids


@pytest.mark.parametrize(
    ("name", "headers"),
    [("claude_code", CLAUDE_CODE), ("codex", CODEX)],
    ids=["claude_code", "codex"],
)
async def test_recorded_conversation(agent_site: Site, name: str, headers: dict[str, str]) -> None:
    site = agent_site
    thought = FAMILIES[site.http.headers["x-family"]]
    ids: list[str] = []
    for exchange in json.loads((RECORDINGS / f"{name}.json").read_text()):
        body = json.dumps(exchange["body"]).replace("MODEL", site.model.name)
        for at, id in enumerate(ids):
            body = body.replace(f"CALL_{at}", id)
        assert "CALL_" not in body
        if "output" in exchange:
            output = exchange["output"].replace("THOUGHT", thought)
            site.worker.script = speak(site, output + END, size=3)
        response = await site.http.post(exchange["path"], content=body, headers=headers)
        if "error" in exchange:
            assert response.status_code == 400
            MessagesErrorResponse.model_validate(response.json(), strict=True)
            assert re.match(exchange["error"], response.json()["error"]["message"])
            continue
        assert response.status_code == 200, response.text
        if "fields" in exchange:
            assert list(response.json()) == exchange["fields"]
            continue
        events = events_in(response.text)
        if name == "codex":
            answer, ids = read_response(events)
        else:
            answer, ids = read_message(events, exchange["stop_reason"])
        assert answer == exchange["answer"]
        check_prompt(site, exchange)


def check_prompt(site: Site, exchange: dict[str, Any]) -> None:
    """Check what the model got of a request."""
    request = site.worker.streams[-1].start.request
    prompt = site.model.tokenizer.decode(unpack_tokens(request.tokens), skip_special=False)
    for text in exchange["prompt"]:
        assert text in prompt.replace("\\u00e9", "é"), prompt
    for text in exchange.get("not_in_prompt", ()):
        assert text not in prompt, prompt


async def test_probes_of_agents_are_answered(agent_site: Site) -> None:
    for method, path, headers, status in (
        ("HEAD", "/", CLAUDE_CODE, 200),
        ("GET", "/v1/models", CLAUDE_CODE, 200),
        ("GET", "/v1/models?client_version=0.155.1", CODEX, 200),
    ):
        response = await agent_site.http.request(method, path, headers=headers)
        assert response.status_code == status, path
