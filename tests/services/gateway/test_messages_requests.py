"""Requests of Anthropic's Messages API: their conversion to chats, and what is refused."""

import json
from typing import Any

import pytest

from services.gateway.http.messages_api import blocks
from services.gateway.http.messages_api.body import (
    CountTokensBody,
    CustomTool,
    MessagesBody,
    ThinkingOptions,
)
from services.gateway.http.schemas import parse_body
from tests.services.gateway.conftest import Site
from tests.services.gateway.field_tables import expected_rows, table_rows

PATH = "/v1/messages"
TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Weather in Zürich?"}
ACCOUNTING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=1f3a0;"}
PLACES = {
    "": MessagesBody.others,
    "thinking.": ThinkingOptions.others,
    "tools[].": CustomTool.others,
    "messages[].content[].": blocks.TextBlock.others,
}


def parse(content: dict[str, Any]) -> MessagesBody:
    raw = json.dumps({"max_tokens": 5, **content}).encode()
    return parse_body(raw, MessagesBody, max_depth=16, context_length=99)


CONVERSATIONS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        {"system": "s", "messages": [USER]},
        [{"role": "system", "content": "s"}, USER],
    ),
    (
        {
            "system": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "b"},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "text", "text": "I call."},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                        {"type": "tool_use", "id": "2", "name": "g", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "r1"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "2",
                            "is_error": True,
                            "content": [{"type": "text", "text": "r2"}],
                        },
                        {"type": "text", "text": "and"},
                        {"type": "text", "text": "now?"},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "3", "name": "f", "input": {}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "3"}]},
            ],
        },
        [
            {
                "role": "system",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": "I call.",
                "tool_calls": [
                    {"id": "1", "function": {"name": "f", "arguments": '{"a":1}'}},
                    {"id": "2", "function": {"name": "g", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r1"},
            {"role": "tool", "tool_call_id": "2", "content": "r2"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now?"}],
            },
            {
                "role": "assistant",
                "tool_calls": [{"id": "3", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "3", "content": ""},
        ],
    ),
]


@pytest.mark.parametrize(("given", "expected"), CONVERSATIONS)
def test_blocks_are_messages_of_a_chat(
    given: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    body = parse(given).as_chat().body
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    for message in messages:
        for call in message.get("tool_calls", ()):
            assert call.pop("type") == "function"
    assert messages == expected
    assert not body.continue_final_message


def test_options_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    asked = parse(
        {
            "messages": [USER, {"role": "assistant", "content": "{"}],
            "tools": [{**TOOL, "description": "d"}],
            "tool_choice": {"type": "none", "disable_parallel_tool_use": True},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "stop_sequences": ["x"],
        }
    )
    chat = asked.as_chat()
    body, conversation = chat.body, chat.conversation()
    assert (body.tool_choice, conversation.parallel_tool_calls) == ("none", False)
    assert body.tools[0].function.parameters == TOOL["input_schema"]
    assert (conversation.reasoning_effort, conversation.thinking) == ("low", True)
    assert conversation.continue_final_message
    options = body.options()
    assert (options.max_tokens, options.temperature, options.top_p) == (7, 0.5, 0.25)
    assert (options.top_k, options.stop) == (3, ("x",))
    assert options.constraint is not None
    assert json.loads(options.constraint.spec.text) == schema


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ([ACCOUNTING, {"type": "text", "text": "a"}], ["a"]),
        ([ACCOUNTING], []),
        ("a", ["a"]),
        ([], [""]),
    ],
)
def test_block_of_accounting_is_not_part_of_the_prompt(system: Any, expected: list[str]) -> None:
    """It differs in each request of Claude Code, and would keep prompts from being cached."""
    messages = parse({"messages": [USER], "system": system}).as_chat().body.messages
    assert [message.content for message in messages] == [*expected, USER["content"]]


async def test_effort_is_ignored_if_the_model_has_none(site: Site) -> None:
    body = {"messages": [USER], "output_config": {"effort": "high"}}
    assert (await site.http.post(f"{PATH}/count_tokens", json=body)).status_code == 200


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "other"}]}}, "context_management"),
    ({"speed": "fast"}, "speed"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}, USER]},
        "messages[0].content[0].type",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "1",
                            "content": [{"type": "image", "source": {}}],
                        }
                    ],
                }
            ]
        },
        "messages[0].content[0].content[0].type",
    ),
]
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}
            ]
        },
        "messages[0].content",
    ),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "x"},
                        {"type": "tool_use", "id": "1", "name": "a b", "input": {}},
                    ],
                },
            ]
        },
        "messages[1].content[1].name",
    ),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    ({"system": 5}, "system"),
    ({"system": [5]}, "system[0]"),
    ({"tools": [5]}, "tools[0]"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"stop_sequences": [""]}, "a stop string"),
    ({"stop_sequences": ["x"] * 1000}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display"),
    ({"output_config": {"effort": "much"}}, "output_config.effort"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=json.dumps)
async def test_what_is_not_supported_is_refused_by_name(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": [USER], "max_tokens": 5, **fields}
    response = await site.http.post(PATH, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(param)
    assert "support" in message


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=json.dumps)
async def test_invalid_fields_have_the_names_of_the_client(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": [USER], "max_tokens": 5, **fields}
    response = await site.http.post(PATH, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith((param, f"input length and `{param}` exceed"))


def test_documentation_lists_the_fields() -> None:
    head = "| ignored values | fields |"
    assert table_rows("MESSAGES.md", head) == expected_rows(PLACES)
    described = " ".join(row.split("|")[1] for row in table_rows("MESSAGES.md", "| field |"))
    assert not [name for name in MessagesBody.model_fields if f"`{name}" not in described]
    for body in (CountTokensBody, MessagesBody, CustomTool, ThinkingOptions, blocks.TextBlock):
        assert not body.model_fields.keys() & body.others.keys()
