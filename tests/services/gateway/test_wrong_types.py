"""Bodies with a value of another type at any place: they are accepted, or refused as invalid."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.gateway.http.chat_request import ChatRequest
from services.gateway.http.messages_api.body import CountTokensBody, MessagesBody
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    validate,
)

VALUES: list[Any] = [
    None,
    True,
    3,
    -1,
    1.5,
    "x",
    [],
    [None],
    [[None]],
    ["x"],
    {},
    {"type": 3},
    {"x": [{}]},
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
COMPLETION: dict[str, Any] = {
    "prompt": ["a", "b"],
    "logit_bias": {"3": 1},
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"json": SCHEMA},
    "bad_words": ["w"],
    "allowed_token_ids": [1],
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    "chat_template_kwargs": {"x": 1},
}
RESPONSE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
}
MESSAGES: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"city": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "r"}],
                }
            ],
        },
    ],
    "system": [{"type": "text", "text": "s"}],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
}
SAMPLES: list[tuple[type[Any], dict[str, Any]]] = [
    (CompletionBody, COMPLETION),
    (ChatBody, CHAT),
    (TokenizeBody, {"messages": CHAT["messages"], "tools": CHAT["tools"]}),
    (DetokenizeBody, {"tokens": [1, 2]}),
    (ResponsesBody, RESPONSE),
    (MessagesBody, {**MESSAGES, "max_tokens": 5, "stop_sequences": ["x"]}),
    (CountTokensBody, MESSAGES),
]


def _replaced(value: Any, _: Any) -> Any:
    return deepcopy(value)


def changed(content: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield changes of a JSON value, each of which replaces one value within it, or itself."""
    for value in VALUES:
        yield partial(_replaced, value)
    places = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, child in places:
        for change in changed(child):

            def apply(parent: Any, key: Any = key, change: Callable[[Any], Any] = change) -> Any:
                parent[key] = change(parent[key])
                return parent

            yield apply


def use(body: type[Any], content: Any) -> None:
    """Validate a body, and convert it to a chat as its route does."""
    parsed = validate(body, content)
    chat = parsed.as_chat() if hasattr(parsed, "as_chat") else parsed
    inner = chat.body if isinstance(chat, ChatRequest) else chat
    for derive in ("options", "conversation"):
        if hasattr(inner, derive):
            getattr(inner, derive)()


@pytest.mark.parametrize(
    ("body", "sample"), SAMPLES, ids=lambda value: getattr(value, "__name__", "")
)
def test_value_of_another_type_is_no_internal_error(body: type[Any], sample: Any) -> None:
    use(body, deepcopy(sample))
    count = 0
    for change in changed(sample):
        with suppress(InvalidRequest):
            use(body, change(deepcopy(sample)))
        count += 1
    assert count > 20
