"""Calls that the output must have, and arguments that follow their schemas."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.v1 import error_pb2, request_pb2
from runtime.grammar.compiler import Grammar, compile_grammar
from runtime.grammar.spec import GrammarBounds
from runtime.grammar.vocabulary import GrammarVocabulary
from services.worker.wire import constraint_from_message
from tests.services.gateway.chat_models import (
    END,
    assembled,
    choices_of,
    events_of,
    family_model,
    speak,
)
from tests.services.gateway.conftest import OpenSite, Site, gateway_site
from tests.services.gateway.failures import failing
from tests.services.gateway.fakes import LENGTH

FAMILIES = ("hermes", "qwen-3", "deepseek-r1", "llama3", "mistral", "qwen3-coder")
USER = {"role": "user", "content": "Weather in Zürich?"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
UNSUPPORTED = {"type": "object", "properties": {"a": {"not": {}}}}
ANSWER = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"enum": ["sunny", "rainy"]}},
}
WEATHER = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
OTHER = '{"name": "f", "arguments": {"city": 1}}'


def tool(name: str, parameters: Any = None, **changes: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, **changes}
    return {"type": "function", "function": function}


def body(**changes: Any) -> dict[str, Any]:
    tools = [tool("get_weather", PARAMETERS), tool("f", {"type": "object"})]
    return {"messages": [USER], "tools": tools, **changes}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def call(family: str, *calls: str) -> str:
    """Return calls in the form of a family."""
    if family == "llama3":
        return "; ".join(calls).replace("arguments", "parameters")
    if family == "mistral":
        return f"[TOOL_CALLS][{', '.join(calls)}]"
    if family == "qwen3-coder":
        return "\n".join(map(in_tags, calls))
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls)


def in_tags(call: str) -> str:
    made = json.loads(call)
    parameters = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in made["arguments"].items()
    )
    return f"<tool_call>\n<function={made['name']}>\n{parameters}</function>\n</tool_call>"


@pytest.fixture
async def family(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with gateway_site(family_model(tmp_path, request.param), 2, None, {}) as site:
        yield site


def started(site: Site) -> request_pb2.Request:
    """Return the request of the last stream on the worker."""
    return site.worker.streams[-1].start.request


def grammar(site: Site) -> Grammar:
    """Return the grammar of the last stream, as a worker compiles it."""
    spec = constraint_from_message(started(site))
    assert spec is not None
    tokenizer = site.model.tokenizer
    vocabulary = GrammarVocabulary(tokenizer.json, tokenizer.vocab_size, tokenizer.eos_ids)
    return compile_grammar(spec, vocabulary, GrammarBounds())


def allowed(site: Site, *texts: str) -> list[bool]:
    """Return for each text whether it is an output that the worker may generate."""
    found, results = grammar(site), []
    for text in texts:
        matcher = found.start()
        matcher.advance(site.encode(text))
        results.append(not matcher.error and bool(matcher.inner.is_accepting()))
    return results


async def error_of(site: Site, content: dict[str, Any]) -> tuple[int, str, str]:
    response = await site.http.post("/v1/chat/completions", json=content)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
async def test_required_call_of_each_family(family: Site, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["family"]
    thought = "Well…</think>\n\n" if name == "deepseek-r1" else ""
    one, two = (thought + call(name, *calls) for calls in ([WEATHER], [WEATHER, OTHER]))
    wrong = thought + call(name, WEATHER.replace("city", "town"))
    family.worker.script = speak(family, one + END, size=3)
    (choice,) = await choices_of(family, body(tool_choice="required"))
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert allowed(family, one, two, wrong, thought + "Sunny.", "") == [True, True] + [False] * 3
    assert assembled(await events_of(family, body(tool_choice="required"))) == [choice]
    assert family.metric("headrace_required_tool_calls_total") == 2
    single = body(tool_choice="required", parallel_tool_calls=False)
    assert await choices_of(family, single) == [choice]
    assert allowed(family, one, two) == [True, False]


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral", "qwen3-coder"], indirect=True)
async def test_named_tool_is_called(family: Site, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["family"]
    family.worker.script = speak(family, call(name, WEATHER) + END)
    content = body(tool_choice=named("get_weather"))
    (choice,) = await choices_of(family, content)
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "get_weather"
    assert choice["finish_reason"] == "stop", "as in OpenAI's API"
    assert allowed(family, call(name, WEATHER), call(name, OTHER)) == [True, False]
    assert assembled(await events_of(family, content)) == [choice]
    rendered = site_prompt(family)
    assert '"f"' in rendered, "the model sees all tools"


def site_prompt(site: Site) -> str:
    tokens = memoryview(started(site).tokens).cast("I").tolist()
    return site.model.tokenizer.decode(tokens, skip_special=False)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
async def test_strict_tool_may_be_called(family: Site, request: pytest.FixtureRequest) -> None:
    """The content is free, and a call of a function that is not strict may have any object."""
    name = request.node.callspec.params["family"]
    tools = [tool("get_weather", PARAMETERS, strict=True), tool("f", PARAMETERS)]
    thought = "Well…</think>" if name == "deepseek-r1" else ""
    text = f"{thought}It is sunny."
    family.worker.script = speak(family, text + END)
    (choice,) = await choices_of(family, body(tools=tools))
    assert choice["message"]["content"] == "It is sunny."
    assert choice["finish_reason"] == "stop"
    calls = call(name, WEATHER), call(name, OTHER), call(name, WEATHER.replace("city", "town"))
    assert allowed(family, text, *(thought + each for each in calls)) == [True, True, True, False]
    assert '"strict"' not in site_prompt(family)
    await choices_of(family, body(tools=tools, tool_choice="none"))
    assert constraint_from_message(started(family)) is None
    await choices_of(family, body())
    assert constraint_from_message(started(family)) is None
    assert family.metric("headrace_required_tool_calls_total") == 0


@pytest.mark.parametrize("family", ["hermes", "llama3", "qwen3-coder"], indirect=True)
async def test_schema_that_is_not_supported(family: Site, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["family"]
    family.worker.script = speak(family, call(name, OTHER) + END)
    tools = [tool("get_weather", PARAMETERS), tool("f", UNSUPPORTED, strict=True)]
    status, param, message = await error_of(family, body(tools=tools))
    assert (status, param) == (400, "tools[1].function.parameters")
    assert "not" in message
    tools[1]["function"]["strict"] = False
    await choices_of(family, body(tools=tools, tool_choice="required"))
    wrong = call(name, WEATHER.replace("city", "town"))
    assert allowed(family, call(name, OTHER), call(name, WEATHER), wrong) == [True, True, False]


@pytest.mark.parametrize("family", ["hermes", "qwen3-coder"], indirect=True)
async def test_schema_with_control_characters(family: Site, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["family"]
    family.worker.script = speak(family, call(name, OTHER) + END)
    parameters = {"type": "object", "properties": {"a": {"type": "array", "enum": [["\0"]]}}}
    tools = [tool("f", parameters, strict=True)]
    status, param, message = await error_of(family, body(tools=tools))
    assert (status, param) == (400, "tools[0].function.parameters")
    assert "control characters" in message
    tools[0]["function"]["strict"] = False
    await choices_of(family, body(tools=tools, tool_choice="required"))
    assert allowed(family, call(name, OTHER)) == [True]


async def test_invalid_requests(open_site: OpenSite) -> None:
    site: Site = await open_site(max_grammar_bytes=2000)
    large, half = ({**PARAMETERS, "description": "x" * size} for size in (2000, 1000))
    for content, param in (
        (body(tool_choice="required", ignore_eos=True), "ignore_eos"),
        (body(tool_choice=named("g")), "tool_choice.function.name"),
        (body(tools=[tool("f", {"type": "array"})], tool_choice="required"),
         "tools[0].function.parameters.type"),
        (body(tools=[tool("f", large, strict=True)]), "tools[0].function.parameters"),
        (body(tools=[tool("f", half)] * 2, response_format=ANSWER, tool_choice="required"),
         "tools"),
        (body(response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
         "response_format.json_schema.schema"),
    ):  # fmt: skip
        assert (await error_of(site, content))[:2] == (400, param)


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral", "qwen3-coder"], indirect=True)
async def test_message_has_calls_or_constrained_content(
    family: Site, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["family"]
    content = body(response_format=ANSWER)
    family.worker.script = speak(family, '"sunny"' + END)
    (choice,) = await choices_of(family, content)
    assert choice["message"] == {"role": "assistant", "content": '"sunny"'}
    mark = "<|python_tag|>" if name == "llama3" else ""
    made = mark + call(name, OTHER)
    assert allowed(family, '"sunny"', "sunny", made, '"sunny"' + made) == [True, False, True, False]
    family.worker.script = speak(family, made + END)
    (choice,) = await choices_of(family, content)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert choice["finish_reason"] == "tool_calls"
    assert assembled(await events_of(family, content)) == [choice]
    await choices_of(family, {**content, "tool_choice": "required"})
    assert allowed(family, '"sunny"', call(name, OTHER)) == [False, True]
    await choices_of(family, {**content, "tool_choice": "none"})
    assert "calls" not in started(family).output_frame


@pytest.mark.parametrize("family", ["qwen-3", "deepseek-r1"], indirect=True)
@pytest.mark.parametrize("size", [1, 2, 100])
async def test_constrained_content_follows_the_reasoning(
    family: Site, size: int, request: pytest.FixtureRequest
) -> None:
    is_open = request.node.callspec.params["family"] == "deepseek-r1"
    output = ("" if is_open else "<think>\n") + 'Well…\n</think>\n\n"sunny"'
    family.worker.script = speak(family, output + END, size=size)
    content = {"messages": [USER], "response_format": ANSWER}
    (choice,) = await choices_of(family, content)
    assert choice["message"]["content"] == '"sunny"'
    assert choice["message"]["reasoning_content"].strip() == "Well…"
    assert assembled(await events_of(family, content)) == [choice]
    refused = output.replace("sunny", "cloudy"), output.partition('"')[0], "Well…"
    assert allowed(family, output, '"sunny"', *refused) == [True, not is_open] + [False] * 3
    for schema, reason in (({"not": {}}, "not"), ({"$ref": "#"}, "no text matches it")):
        bad = {"type": "json_schema", "json_schema": {"schema": schema}}
        status, param, message = await error_of(family, {**content, "response_format": bad})
        assert (status, param) == (400, "response_format.json_schema.schema")
        assert reason in message
    (choice,) = await choices_of(family, {**content, "include_reasoning": False})
    assert choice["message"] == {"role": "assistant", "content": '"sunny"'}


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
async def test_output_that_is_cut_in_a_required_call(family: Site) -> None:
    family.worker.script = speak(family, call("hermes", WEATHER)[:50], end=LENGTH)
    (choice,) = await choices_of(family, body(tool_choice="required"))
    (made,) = choice["message"]["tool_calls"]
    assert WEATHER.partition('"arguments": ')[2].startswith(made["function"]["arguments"])
    assert choice["finish_reason"] == "length"


async def test_schemas_of_tools_do_not_reach_the_worker_without_a_constraint(site: Site) -> None:
    site.worker.script = speak(site, "Hi.")
    await choices_of(site, body(tools=[tool("f", UNSUPPORTED)]))
    assert not started(site).HasField("structured_outputs")


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
async def test_frame_is_the_same_after_a_failover(family: Site) -> None:
    output = call("hermes", WEATHER) + END
    family.worker.script = speak(family, output)
    for worker in family.workers:
        worker.script = speak(family, output)
    family.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, *family.encode(output)[:30])]
    content = body(tool_choice="required", response_format=ANSWER)
    (choice,) = await choices_of(family, content)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich"}'
    messages = [stream.start.request for worker in family.workers for stream in worker.streams]
    assert len(messages) == 2
    assert len({message.structured_outputs.SerializeToString() for message in messages}) == 1
    assert len({json.dumps(message.output_frame) for message in messages}) == 1


def flat(named_tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool or a choice of one in the form of the Responses API."""
    return {"type": "function", **named_tool["function"]}


@pytest.mark.parametrize("family", ["qwen-3"], indirect=True)
@pytest.mark.parametrize(
    "changes",
    [
        {"tool_choice": "required"},
        {"tool_choice": flat(named("get_weather"))},
        {"tools": [flat(tool("get_weather", PARAMETERS, strict=True))]},
    ],
    ids=json.dumps,
)
async def test_calls_of_the_responses_api(family: Site, changes: dict[str, Any]) -> None:
    output = f"<think>As é.</think>\n\n{call('hermes', WEATHER)}"
    family.worker.script = speak(family, output + END, size=5)
    content = {"input": "Hi", "tools": [flat(each) for each in body()["tools"]], **changes}
    response = await family.http.post("/v1/responses", json=content)
    answer = response.json()
    assert response.status_code == 200, answer
    reasoning, called = answer["output"]
    assert reasoning["content"][0]["text"] == "As é."
    assert (called["name"], called["arguments"]) == ("get_weather", '{"city": "Zürich"}')
    assert answer["tool_choice"] == changes.get("tool_choice", "auto")
    assert allowed(family, output, output.replace("city", "town")) == [True, False]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.type"),
        ({"tools": [flat(tool("f", UNSUPPORTED, strict=True))]}, "tools[0].parameters"),
    ],
    ids=json.dumps,
)
async def test_errors_of_the_responses_api(site: Site, changes: dict[str, Any], param: str) -> None:
    content = {"input": "Hi", "tools": [flat(tool("f"))], **changes}
    response = await site.http.post("/v1/responses", json=content)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
