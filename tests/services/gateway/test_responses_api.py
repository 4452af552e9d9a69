"""OpenAI's Responses API: answers, whole and streamed."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.v1 import error_pb2
from services.gateway.http.responses_api.response_schemas import ResponsesResponse
from tests.services.gateway.chat_models import END, family_model, speak
from tests.services.gateway.conftest import Site, gateway_site
from tests.services.gateway.failures import failing
from tests.services.gateway.fakes import LENGTH, say

openai = pytest.importorskip("openai")

ARGUMENTS = '{"city": "Zürich", "days": [1, {"x": "}"}]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>As é.</think>"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
BODY: dict[str, Any] = {"input": "Weather in Zürich?", "tools": [TOOL]}
PATH = "/v1/responses"


@pytest.fixture
async def family(tmp_path: Path) -> AsyncIterator[Site]:
    """A model that reasons and calls tools, on two workers."""
    async with gateway_site(family_model(tmp_path, "qwen-3"), 2, None, {}) as site:
        yield site


async def whole(site: Site, **body: Any) -> dict[str, Any]:
    response = await site.http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    ResponsesResponse.model_validate(content, strict=True)
    return content


async def streamed(site: Site, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose form is checked."""
    response = await site.http.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for number, lines in enumerate(response.text.strip().split("\n\n")):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    for event in events:
        if "response" in event:
            ResponsesResponse.model_validate(event["response"], strict=True)
    return events


def without_ids(content: Any) -> Any:
    """Return a response without what differs between two answers to one request."""
    if isinstance(content, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {k: without_ids(v) for k, v in content.items() if k not in changing}
    return [without_ids(one) for one in content] if isinstance(content, list) else content


def texts(response: dict[str, Any]) -> list[tuple[str, str]]:
    """Return type and text of each item of the output."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in response["output"]
    ]


async def test_text_and_usage(site: Site) -> None:
    ids = site.encode("Hello there.")
    site.worker.script = say(*ids)
    answer = await whole(site, input="Hi", instructions="Be short.", metadata={"a": "b"})
    assert texts(answer) == [("message", "Hello there.")]
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == (
        "completed",
        None,
        None,
    )
    assert (answer["store"], answer["metadata"]) == (False, {"a": "b"})
    assert answer["usage"]["output_tokens"] == len(ids)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    tokens = (await site.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    assert answer["usage"]["input_tokens"] == len(tokens)
    assert answer["usage"]["total_tokens"] == len(tokens) + len(ids)


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_items_and_events(family: Site, size: int) -> None:
    output = f"{THOUGHT}Well. {CALL}\n{CALL}{END}"
    family.worker.script = speak(family, output, size=size)
    answer = await whole(family, **BODY)
    assert texts(answer) == [
        ("reasoning", "As é."),
        ("message", "Well. "),
        ("function_call", ARGUMENTS),
        ("function_call", ARGUMENTS),
    ]
    assert len({item["id"] for item in answer["output"]}) == 4
    assert answer["usage"]["output_tokens"] == len(family.encode(output))
    reasoning = answer["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert reasoning == len(family.encode(THOUGHT))
    events = await streamed(family, **BODY)
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(answer)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    for index, item in enumerate(events[-1]["response"]["output"]):
        check_item_events(item, [e for e in events if e.get("output_index") == index])


def check_item_events(item: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """Check order and content of the events of one item."""
    kind = {
        "message": "output_text",
        "reasoning": "reasoning_text",
        "function_call": "function_call_arguments",
    }[item["type"]]
    text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
    has_parts = item["type"] != "function_call"
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == f"response.{kind}.delta"]
    assert names == [
        "output_item.added",
        *(["content_part.added"] if has_parts else []),
        *([f"{kind}.delta"] * len(deltas)),
        f"{kind}.done",
        *(["content_part.done"] if has_parts else []),
        "output_item.done",
    ]
    assert events[0]["item"]["status"] == "in_progress"
    assert events[-1]["item"] == item
    assert "".join(event["delta"] for event in deltas) == text
    (done,) = [event for event in events if event["type"] == f"response.{kind}.done"]
    assert done["arguments" if "arguments" in item else "text"] == text
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}


@pytest.mark.parametrize(
    ("output", "status"),
    [("Half", ["incomplete"]), (f"{THOUGHT}So {CALL[:60]}", ["completed"] * 2 + ["incomplete"])],
)
async def test_output_that_is_cut(family: Site, output: str, status: list[str]) -> None:
    family.worker.script = speak(family, output, end=LENGTH)
    answer = await whole(family, **BODY, max_output_tokens=500)
    assert (answer["status"], answer["completed_at"]) == ("incomplete", None)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]] == status
    events = await streamed(family, **BODY, max_output_tokens=500)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(answer)


async def test_error_before_the_first_token_has_a_status(family: Site) -> None:
    for worker in family.workers:
        worker.script = failing(error_pb2.ERROR_CODE_NOT_FINITE)
    response = await family.http.post(PATH, json={**BODY, "stream": True})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


async def test_stream_that_fails_ends_with_the_failed_response(family: Site) -> None:
    for worker in family.workers:
        worker.script = failing(error_pb2.ERROR_CODE_NOT_FINITE, *family.encode("Hello"))
    events = await streamed(family, **BODY)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert texts(response) == [("message", "Hello")]


@pytest.mark.parametrize("at", [3, 20, 40, 70])
async def test_failover_does_not_change_the_response(family: Site, at: int) -> None:
    output = f"{THOUGHT}Well. {CALL}{END}"
    for worker in family.workers:
        worker.script = speak(family, output, size=2)
    expected = without_ids(await whole(family, **BODY))
    cut = family.encode(output)[:at]
    family.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, *cut)]
    assert without_ids((await streamed(family, **BODY))[-1]["response"]) == expected
    assert family.worker.queued == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_client_of_openai_runs_a_tool(family: Site, is_streamed: bool) -> None:
    """The conversation of an agent: a call, its result, and the answer."""
    given: list[Any] = [{"role": "user", "content": "Weather in Zürich?"}]
    async with openai.AsyncOpenAI(base_url=f"{family.url}/v1", api_key="none") as client:

        async def ask() -> Any:
            fields = {"model": family.model.name, "input": given, "tools": [TOOL]}
            if not is_streamed:
                return await client.responses.create(**fields)
            async with client.responses.stream(**fields) as stream:
                return await stream.get_final_response()

        family.worker.script = speak(family, f"{THOUGHT}{CALL}{END}")
        answer = await ask()
        assert [item.type for item in answer.output] == ["reasoning", "function_call"]
        call = answer.output[1]
        assert json.loads(call.arguments)["city"] == "Zürich"
        given += answer.output
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": "18 °C"})
        family.worker.script = speak(family, f"It is 18 °C.{END}")
        answer = await ask()
        assert answer.output_text == "It is 18 °C."
        assert answer.usage.output_tokens == len(family.encode(f"It is 18 °C.{END}"))
