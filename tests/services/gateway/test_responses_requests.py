"""Requests of the Responses API: their conversion to chats, and what is refused."""

import json
from typing import Any

import pytest
from openai.types import shared_params
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    NamespaceToolParam,
    ResponseInputTextParam,
    ResponseOutputTextParam,
    ResponseTextConfigParam,
    response_create_params,
    response_function_tool_call_param,
    response_input_item_param,
    response_output_message_param,
    response_reasoning_item_param,
)

from services.gateway.http.responses_api import items
from services.gateway.http.responses_api.body import (
    ReasoningOptions,
    ResponsesBody,
    ResponsesStreamOptions,
    TextOptions,
)
from services.gateway.http.responses_api.tools import FunctionTool, NamespaceTool
from services.gateway.http.schemas import parse_body
from tests.services.gateway.conftest import Site
from tests.services.gateway.field_tables import expected_rows, table_rows

TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [TOOL]}
WEB = {"type": "web_search"}
DEEP = '{"a":' * 150 + "1" + "}" * 150
PATH = "/v1/responses"
PLACES = {
    "": ResponsesBody.others,
    "text.": TextOptions.others,
    "reasoning.": ReasoningOptions.others,
    "stream_options.": ResponsesStreamOptions.others,
    "tools[].": FunctionTool.others,
    "input[].": items.MessageItem.others,
    "input[].content[].": items.InputText.others,
    "function_call_output.": {
        name: other
        for name, other in items.OutputItem.others.items()
        if other is not items.MessageItem.others.get(name)
    },
    "reasoning_item.": {
        name: other
        for name, other in items.ReasoningItem.others.items()
        if name not in items.MessageItem.others
    },
}


CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}]),
    (
        [
            {"type": "message", "role": "developer", "content": "d"},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_text", "text": "b"},
                ],
            },
            {"type": "reasoning", "id": "r", "summary": [], "content": []},
            {
                "type": "message",
                "id": "m",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "c", "annotations": []}],
            },
        ],
        [
            {"role": "developer", "content": "d"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c"},
        ],
    ),
    (
        [
            {"role": "user", "content": "a"},
            {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"role": "assistant", "content": "I call."},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "x"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a": 1}'},
            {"role": "assistant", "content": "Both."},
            {"type": "function_call_output", "call_id": "1", "output": "r1"},
            {
                "type": "function_call_output",
                "call_id": "2",
                "output": [{"type": "input_text", "text": "r2"}],
            },
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "dropped"}]},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"role": "assistant", "content": "d"},
        ],
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": [
                    {"type": "text", "text": "I call."},
                    {"type": "text", "text": "Both."},
                ],
                "tool_calls": [
                    {"id": "1", "function": {"name": "f", "arguments": "{}"}},
                    {"id": "2", "function": {"name": "g", "arguments": '{"a": 1}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r1"},
            {"role": "tool", "tool_call_id": "2", "content": "r2"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"role": "assistant", "content": "d"},
        ],
    ),
]


def parse(content: dict[str, Any]) -> ResponsesBody:
    raw = json.dumps(content).encode()
    return parse_body(raw, ResponsesBody, max_depth=16, context_length=99)


@pytest.mark.parametrize(("given", "expected"), CONVERSATIONS)
def test_items_are_messages_of_a_chat(
    given: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    body = parse({"input": given}).as_chat().body
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    for message in messages:
        for call in message.get("tool_calls", ()):
            assert call.pop("type") == "function"
    assert messages == expected


def test_options_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    asked = parse(
        {
            "input": "x",
            "tools": [TOOL],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "max_output_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.25,
        }
    )
    body = asked.as_chat().body
    assert (body.tool_choice, body.parallel_tool_calls) == ("none", False)
    assert body.tools[0].function.name == "get_weather"
    assert body.tools[0].function.parameters == {"type": "object"}
    assert body.reasoning_effort == "low"
    options = body.options()
    assert (options.max_tokens, options.temperature, options.top_p) == (7, 0.5, 0.25)
    assert options.constraint is not None
    assert json.loads(options.constraint.spec.text) == schema
    assert asked.text.format.as_json()["schema"] == schema


def test_functions_of_namespaces() -> None:
    inner = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    namespace = {"type": "namespace", "name": "n", "description": "d", "tools": [TOOL, inner]}
    call = {"type": "function_call", "call_id": "1", "namespace": "n", "name": "f"}
    given = [{"role": "user", "content": "a"}, {**call, "arguments": "{}"}]
    body = parse({"input": given, "tools": [TOOL, namespace]}).as_chat().body
    functions = [tool.function for tool in body.tools]
    assert [function.name for function in functions] == ["get_weather", "n__get_weather", "n__f"]
    assert [function.strict for function in functions] == [False, False, True]
    assert body.messages[1].tool_calls[0].function.name == "n__f"


def test_hosted_tools_are_ignored_beside_functions() -> None:
    hosted = {"type": "web_search", "external_web_access": False, "filters": {"a": []}}
    body = parse({"input": "x", "tools": [hosted, TOOL]}).as_chat().body
    assert [tool.function.name for tool in body.tools] == ["get_weather"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, {"type": "mcp", "server_label": "s"}]}, "tools[1].type"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": []}, WEB]}, "tools[1].type"),
    ({"tools": [WEB, TOOL, {"type": "custom", "name": "c"}]}, "tools[2].type"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, {"type": "custom"}]}]},
        "tools[0].tools[1].type",
    ),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        "input[0].encrypted_content",
    ),
]
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": 5}]}, "input[0].type"),
    ({"input": [{"type": None, "role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [None]}]}, "input[0].content[0]"),
    ({"tools": [[]]}, "tools[0]"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEB, {**NAMESPACE, "tools": [{**TOOL, "name": "a b"}]}]}, "tools[1].tools[0].name"),
    ({"tools": [{**NAMESPACE, "name": ""}]}, "tools[0].name"),
    ({"tools": [NAMESPACE, {**TOOL, "name": "n__get_weather"}]}, "tools[1].name"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"temperature": 3}, "temperature"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}},
        "text.format.schema",
    ),
    (
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": DEEP},
            ]
        },
        "input[2].arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=json.dumps)
async def test_what_is_not_supported_is_refused_by_name(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    response = await site.http.post(PATH, json={"input": "x", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["code"] == "unsupported_parameter"
    assert param in error["message"]
    assert "support" in error["message"]


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=json.dumps)
async def test_invalid_fields_have_the_names_of_the_client(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    response = await site.http.post(PATH, json={"input": "x", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert "messages[" not in error["message"]


async def test_input_that_is_too_long_names_the_input(site: Site) -> None:
    for given in ("x " * 9000, [{"role": "user", "content": "x"}] * 9000):
        response = await site.http.post(PATH, json={"input": given})
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


async def test_responses_are_not_stored(site: Site) -> None:
    response = await site.http.get(f"{PATH}/resp_1")
    assert response.status_code == 404
    assert "storing responses is not supported" in response.json()["error"]["message"]


def test_every_field_of_the_openai_library_is_declared() -> None:
    """A field that a newer version adds must be classified."""
    inputs, message = response_input_item_param, response_output_message_param
    declared: list[tuple[Any, Any]] = [
        (response_create_params.ResponseCreateParamsNonStreaming, ResponsesBody),
        (shared_params.Reasoning, ReasoningOptions),
        (ResponseTextConfigParam, TextOptions),
        (response_create_params.StreamOptions, ResponsesStreamOptions),
        (FunctionToolParam, FunctionTool),
        (NamespaceToolParam, NamespaceTool),
        (ResponseInputTextParam, items.InputText),
        (ResponseOutputTextParam, items.InputText),
        (EasyInputMessageParam, items.MessageItem),
        (message.ResponseOutputMessageParam, items.MessageItem),
        (inputs.FunctionCallOutput, items.OutputItem),
        (response_function_tool_call_param.ResponseFunctionToolCallParam, items.CallItem),
        (response_reasoning_item_param.ResponseReasoningItemParam, items.ReasoningItem),
    ]
    for params, body in declared:
        fields = params.__required_keys__ | params.__optional_keys__
        assert fields <= body.model_fields.keys() | body.others.keys(), params
        assert not body.model_fields.keys() & body.others.keys()


def test_documentation_lists_the_fields() -> None:
    assert table_rows("RESPONSES.md", "| ignored values | fields |") == expected_rows(PLACES)
    described = " ".join(row.split("|")[1] for row in table_rows("RESPONSES.md", "| field |"))
    assert not [name for name in ResponsesBody.model_fields if f"`{name}" not in described]
