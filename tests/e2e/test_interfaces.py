"""Interfaces that are converted to chats, with real processes and a real model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.harness.deployment import Running, deployed

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CITIES = ("Rome", "Oslo", "Lima", "Paris")
"""Cities of the questions. The small model calls the tool because it did so for the first ones."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with deployed() as deployment:
        yield deployment


def question(city: str) -> dict[str, Any]:
    return {"role": "user", "content": f"How is the weather in {city}?"}


def chat_call(running: Running) -> tuple[str, str]:
    """Return name and arguments of the call in the chat that the other interfaces amount to."""
    messages: list[Any] = []
    for city in CITIES:
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        call = {"id": city, "type": "function", "function": function}
        messages += [question(city), {"role": "assistant", "tool_calls": [call]}]
    function = {"name": "get_weather", "description": "Weather of a city."}
    tool = {"type": "function", "function": {**function, "parameters": PARAMETERS}}
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")
    answer = client.chat.completions.create(
        model=running.model, messages=messages[:-1], tools=[tool], temperature=0, max_tokens=100
    )
    (call,) = answer.choices[0].message.tool_calls
    return call.function.name, call.function.arguments


def test_responses_call_a_tool_whole_and_streamed(running: Running) -> None:
    given: list[Any] = []
    for city in CITIES:
        arguments = json.dumps({"city": city})
        call = {"type": "function_call", "call_id": city, "name": "get_weather"}
        given += [question(city), {**call, "arguments": arguments}]
    tool = {"type": "function", "name": "get_weather", "description": "Weather of a city."}
    fields: dict[str, Any] = {
        "model": running.model,
        "input": given[:-1],
        "tools": [{**tool, "parameters": PARAMETERS, "strict": False}],
        "temperature": 0,
        "max_output_tokens": 100,
    }
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    expected = chat_call(running)
    for answer in (whole, streamed):
        (call,) = answer.output
        assert (call.type, call.name, call.arguments) == ("function_call", *expected)
        assert (answer.status, answer.store) == ("completed", False)
        assert answer.usage.input_tokens > 0
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]


def test_response_with_a_schema(running: Running) -> None:
    city = {"type": "string", "maxLength": 10}
    schema = {**PARAMETERS, "properties": {"city": city}, "additionalProperties": False}
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")
    answer = client.responses.create(
        model=running.model,
        input="Weather in Rome as JSON.",
        text={"format": {"type": "json_schema", "name": "weather", "schema": schema}},
        max_output_tokens=200,
        temperature=0,
    )
    assert answer.status == "completed"
    assert isinstance(json.loads(answer.output_text)["city"], str)


def post(running: Running, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(f"{running.url}/v1/messages", json=body, timeout=300, trust_env=False)
    assert response.status_code == httpx.codes.OK, response.text
    return response


def test_messages_call_a_tool_whole_and_streamed(running: Running) -> None:
    messages: list[Any] = []
    for city in CITIES:
        call = {"type": "tool_use", "id": city, "name": "get_weather", "input": {"city": city}}
        messages += [question(city), {"role": "assistant", "content": [call]}]
    tool = {"name": "get_weather", "description": "Weather of a city.", "input_schema": PARAMETERS}
    prompt = {"model": running.model, "messages": messages[:-1], "tools": [tool]}
    body = {**prompt, "temperature": 0, "max_tokens": 100}
    answer = post(running, body).json()
    name, arguments = chat_call(running)
    (block,) = answer["content"]
    assert (block["name"], block["input"]) == (name, json.loads(arguments))
    assert answer["stop_reason"] == "tool_use"
    lines = post(running, {**body, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert len(deltas) > 1
    assert "".join(delta["partial_json"] for delta in deltas) == arguments
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    usage = answer["usage"]
    counted = httpx.post(f"{running.url}/v1/messages/count_tokens", json=prompt, trust_env=False)
    expected = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json() == {"input_tokens": expected}
