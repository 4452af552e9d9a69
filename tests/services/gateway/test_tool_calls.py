"""Tool calls in responses: the form of OpenAI's API, whole and streamed, for each family."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.v1 import error_pb2
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
from tests.services.gateway.fakes import LENGTH, STOP

openai = pytest.importorskip("openai")

NAMES = ("get_weather", "f")
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Weather in Zürich?"}],
    "tools": [{"type": "function", "function": {"name": name}} for name in NAMES],
}
ARGUMENTS = '{"city": "Zürich", "days": [1, {"x": "}"}]}'
OUTPUTS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "llama3": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "f"}}',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]f{{}}",
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
    '<parameter=days>\n[1, {"x": "}"}]\n</parameter>\n</function>\n</tool_call>\n'
    "<function=f>\n</function>\n</tool_call>",
}
OUTPUTS["qwen-3"] = f"<think>\nWell…\n</think>\n\n{OUTPUTS['hermes']}"
OUTPUTS["deepseek-r1"] = f"Well…\n</think>\n\n{OUTPUTS['hermes']}"
INCLUDED = {"include_stop_str_in_output": True}
CALLS = [
    {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}},
    {"type": "function", "function": {"name": "f", "arguments": "{}"}},
]


@pytest.fixture
async def family(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with gateway_site(family_model(tmp_path, request.param), 2, None, {}) as site:
        yield site


@pytest.mark.parametrize("family", OUTPUTS, indirect=True)
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_calls_of_each_family(
    family: Site, size: int, request: pytest.FixtureRequest
) -> None:
    output = OUTPUTS[request.node.callspec.params["family"]]
    family.worker.script = speak(family, output + END, size=size)
    (choice,) = await choices_of(family, BODY)
    assert choice["message"]["tool_calls"] == CALLS
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    thought = choice["message"].get("reasoning_content", "")
    assert thought.strip() == ("Well…" if "think" in output else "")
    assert assembled(await events_of(family, BODY)) == [choice]


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
async def test_events_have_the_form_of_openai(family: Site) -> None:
    output = 'One.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    family.worker.script = speak(family, output + END, size=4)
    events = await events_of(family, {**BODY, "stream_options": {"include_usage": True}})
    usage = events.pop()
    assert usage["usage"]["completion_tokens"] == len(family.encode(output + END))
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    first = next(n for n, delta in enumerate(deltas) if "tool_calls" in delta)
    assert "".join(delta["content"] for delta in deltas[:first]) == "One."
    (start,) = deltas[first]["tool_calls"]
    assert start.pop("id").startswith("call_")
    assert start == {"index": 0, "type": "function", "function": {"name": "f", "arguments": ""}}
    rest = deltas[first + 1 : -1]
    assert len(rest) > 1, "the arguments are streamed"
    assert all(delta.keys() == {"tool_calls"} for delta in rest)
    assert deltas[-1] == {}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["tool_calls"]


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
async def test_text_that_may_begin_a_call_is_held_and_other_text_is_not(family: Site) -> None:
    family.worker.script = speak(family, "a <tool> <tool_call>no</tool_call>" + END)
    events = await events_of(family, BODY)
    contents = [event["choices"][0]["delta"].get("content") for event in events]
    assert contents[:5] == ["", "a", " ", "<tool>", " "]
    (choice,) = assembled(events)
    assert choice["message"] == {
        "role": "assistant",
        "content": "a <tool> <tool_call>no</tool_call>",
    }
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("family", ["qwen-3", "mistral"], indirect=True)
@pytest.mark.parametrize("size", [1, 5])
async def test_choices_with_logprobs_and_token_ids(
    family: Site, size: int, request: pytest.FixtureRequest
) -> None:
    output = OUTPUTS[request.node.callspec.params["family"]]
    texts = [output + END, "Hé 😀 {" + END, output[: len(output) // 2]]
    family.worker.script = speak(family, *texts, size=size)
    body = {**BODY, "n": 3, "logprobs": True, "return_token_ids": True}
    choices = await choices_of(family, body)
    assert [len(choice["message"].get("tool_calls", ())) for choice in choices] == [2, 0, 1]
    for choice, text in zip(choices, texts, strict=True):
        assert choice["token_ids"] == family.encode(text)
        assert len(choice["logprobs"]["content"]) == len(family.encode(text))
    assert assembled(await events_of(family, body), 3) == choices


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "end", "expected", "finish"),
    [
        ({}, LENGTH, ARGUMENTS[:20], "length"),
        ({"stop": ["rich"]}, STOP, '{"city": "Zü', "stop"),
        ({"stop": ["never", "</tool_call>"]}, STOP, ARGUMENTS, "tool_calls"),
        ({"stop": ["rich"], **INCLUDED}, STOP, '{"city": "Zürich', "stop"),
        ({"stop": ["</tool_call>"], **INCLUDED}, STOP, ARGUMENTS, "tool_calls"),
    ],
)
async def test_output_that_is_cut_in_a_call(
    family: Site, changes: Any, end: Any, expected: str, finish: str
) -> None:
    output = OUTPUTS["hermes"].partition("\n<tool_call>")[0]
    if end == LENGTH:
        output = output[: output.index(ARGUMENTS) + 20]
    family.worker.script = speak(family, output, size=3, end=end)
    body = {**BODY, **changes}
    (choice,) = await choices_of(family, body)
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == (expected, finish)
    assert assembled(await events_of(family, body)) == [choice]


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
@pytest.mark.parametrize("changes", [{}, INCLUDED])
async def test_call_whose_end_mark_is_a_stop_token(family: Site, changes: dict[str, Any]) -> None:
    family.worker.script = speak(family, OUTPUTS["hermes"].partition("\n<tool_call>")[0], size=3)
    body = {**BODY, "stop_token_ids": family.encode("</tool_call>"), **changes}
    (choice,) = await choices_of(family, body)
    assert (choice["message"]["content"], choice["message"]["tool_calls"]) == (None, CALLS[:1])
    assert choice["finish_reason"] == "tool_calls"
    assert assembled(await events_of(family, body)) == [choice]


@pytest.mark.parametrize("family", ["qwen-3"], indirect=True)
@pytest.mark.parametrize("at", [3, 20, 30, 60, 70, 90, 110])
async def test_failover_does_not_change_the_message(family: Site, at: int) -> None:
    output = OUTPUTS["qwen-3"] + END
    for worker in family.workers:
        worker.script = speak(family, output, size=2)
    expected = await choices_of(family, BODY)
    family.worker.queued = [
        failing(error_pb2.ERROR_CODE_INTERNAL, *family.encode(output)[:at]) for _ in range(2)
    ]
    assert await choices_of(family, BODY) == expected
    events = await events_of(family, BODY)
    assert assembled(events) == expected
    assert family.worker.queued == []
    ids = [
        c["id"] for e in events for c in e["choices"][0]["delta"].get("tool_calls", ()) if "id" in c
    ]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("family", ["mistral"], indirect=True)
async def test_only_special_tokens_of_the_format_are_text(family: Site) -> None:
    family.worker.script = speak(family, "[TOOL_CALLS]<|other|>x" + END)
    (choice,) = await choices_of(family, BODY)
    assert choice["message"]["content"] == "[TOOL_CALLS]x"
    (choice,) = await choices_of(family, {**BODY, "tool_choice": "none"})
    assert choice["message"]["content"] == "x"


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
async def test_only_the_first_call_is_returned_if_calls_are_not_parallel(family: Site) -> None:
    family.worker.script = speak(family, OUTPUTS["hermes"] + END)
    body = {**BODY, "parallel_tool_calls": False}
    (choice,) = await choices_of(family, body)
    assert choice["message"]["tool_calls"] == CALLS[:1]
    assert choice["finish_reason"] == "tool_calls"
    assert assembled(await events_of(family, body)) == [choice]


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
async def test_output_is_content_if_no_tool_may_be_called(family: Site) -> None:
    family.worker.script = speak(family, "{} [] f()" + END)
    changed: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for changes in changed:
        (choice,) = await choices_of(family, {**BODY, **changes})
        assert choice["message"] == {"role": "assistant", "content": "{} [] f()"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_client_runs_a_tool(site: Site, streamed: bool) -> None:
    """The conversation of an agent: a call, its result, and the answer."""
    called = '<tool_call>[\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n]</tool_call>'
    messages: list[Any] = list(BODY["messages"])
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none") as client:

        async def ask() -> Any:
            arguments = {"model": site.model.name, "messages": messages, "tools": BODY["tools"]}
            if not streamed:
                return (await client.chat.completions.create(**arguments)).choices[0]
            async with client.chat.completions.stream(**arguments) as stream:
                return (await stream.get_final_completion()).choices[0]

        site.worker.script = speak(site, called)
        choice = await ask()
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content in (None, "")
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Zürich"}
        messages.append(choice.message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "18 °C"})
        site.worker.script = speak(site, "It is 18 °C.")
        choice = await ask()
        assert choice.finish_reason == "stop"
        assert choice.message.content == "It is 18 °C."
        assert not choice.message.tool_calls


async def test_tool_parser_of_the_settings_is_used(open_site: OpenSite) -> None:
    site: Site = await open_site(tool_parser="none")
    response = await site.http.post("/v1/chat/completions", json=BODY)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert error["code"] == "unsupported_parameter"
    assert "tool_parser" in error["message"]
