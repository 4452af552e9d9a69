"""Tool calls that a real deployment must generate, and their continuation after a kill."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.deployment import Running, deployed
from tests.harness.killed_answers import texts_despite_a_kill
from tests.runtime.grammar.validation import faults

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 3},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "add_person": PERSON}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": name, "description": "…", "parameters": schema} for name, schema in SCHEMAS.items()
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
QUESTION = [{"role": "user", "content": "Tell me a joke about the weather in Zürich."}]
NAMED = {"type": "function", "function": {"name": "add_person"}}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with deployed("--prefill", "1", "--decode", "2") as deployment:
        deployment.wait_for_all_workers()
        yield deployment


@pytest.fixture
def client(running: Running) -> Any:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", timeout=300)


def arguments(running: Running, **changes: Any) -> dict[str, Any]:
    return {
        "model": running.model,
        "messages": QUESTION,
        "tools": TOOLS,
        "max_tokens": 400,
        "parallel_tool_calls": False,
        **changes,
    }


def check(choice: Any, *, finish: str) -> None:
    """Check that a message is one call that follows its schema."""
    assert choice.finish_reason == finish
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert not faults(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_required_call_follows_its_schema(
    running: Running, client: Any, temperature: float
) -> None:
    choices = 3 if temperature else 1
    found = client.chat.completions.create(
        **arguments(running, tool_choice="required", temperature=temperature, n=choices, seed=1)
    ).choices
    assert len(found) == choices
    for choice in found:
        check(choice, finish="tool_calls")


def test_same_call_is_streamed(running: Running, client: Any) -> None:
    wanted = arguments(running, tool_choice="required", temperature=1, seed=3)
    whole = client.chat.completions.create(**wanted).choices[0]
    check(whole, finish="tool_calls")
    deltas = [c.choices[0] for c in client.chat.completions.create(**wanted, stream=True)]
    parts = [call for delta in deltas for call in delta.delta.tool_calls or ()]
    (call,) = whole.message.tool_calls
    assert parts[0].function.name == call.function.name
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert len(parts) > 3
    assert not any(delta.delta.content for delta in deltas)
    assert deltas[-1].finish_reason == "tool_calls"


def test_named_function_is_called(running: Running, client: Any) -> None:
    wanted = arguments(running, tool_choice=NAMED, temperature=0)
    choice = client.chat.completions.create(**wanted).choices[0]
    check(choice, finish="stop")
    assert choice.message.tool_calls[0].function.name == "add_person"


def test_strict_function_may_be_called(running: Running, client: Any) -> None:
    """The small model calls the tool because it did so before, with an argument too few."""
    strict = [{**TOOLS[0], "function": {**FUNCTIONS[0], "strict": True}}, TOOLS[1]]
    messages: list[dict[str, Any]] = []
    for city in ("Rome", "Oslo", "Lima", "Paris"):
        called = {"name": "get_weather", "arguments": json.dumps({"city": city, "unit": "celsius"})}
        call = {"id": city, "type": "function", "function": called}
        messages.append({"role": "user", "content": f"How is the weather in {city}?"})
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    wanted = arguments(running, tools=strict, temperature=0, messages=messages[:-1])
    choice = client.chat.completions.create(**wanted).choices[0]
    check(choice, finish="tool_calls")
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] == "Paris"
    wanted = arguments(running, tools=strict, temperature=0, max_tokens=30)
    assert client.chat.completions.create(**wanted).choices[0].message.content


async def test_call_continues_with_the_same_tokens_after_a_kill(running: Running) -> None:
    """The decode worker that has sent most of the tokens is killed in mid-answer."""
    schema = {
        "type": "object",
        "properties": {"digits": {"type": "string", "pattern": "^([0-9]{2} ){50}$"}},
        "required": ["digits"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "dial", "parameters": schema}}
    body = arguments(running, tools=[tool], tool_choice="required", temperature=0.9)
    for text in await texts_despite_a_kill(running, body, sent=30):
        assert not faults(json.loads(text), schema)
