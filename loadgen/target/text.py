"""Find the generated text in streamed events of OpenAI's API and of similar servers.

The text is in different fields, depending on the server.
"""

from collections.abc import Iterator
from typing import Any

_CARRIERS = frozenset(
    (
        *("delta", "text", "content", "refusal", "audio", "transcript"),
        *("reasoning", "reasoning_content", "reasoning_details", "summary", "thinking"),
        *("tool_calls", "function_call", "function", "custom", "name", "arguments", "input"),
    )
)
"""Fields that contain generated text, directly or in a nested value."""
_METADATA = frozenset(("role", "index", "id", "type", "finish_reason", "stop_reason", "logprobs"))
"""Fields that are in events without text as well."""


def text_of(choice: dict[str, Any]) -> str:
    """Return the generated text in a choice of an event, such as an answer or its reasoning."""
    text = choice.get("text")
    if isinstance(text, str) and text:  # the common case of completions
        return text
    return "".join(_texts(choice))


def unknown_fields(choice: dict[str, Any]) -> set[str]:
    """Return the names of fields that might contain text, but are not known."""
    delta = choice.get("delta")
    fields = {**choice, **(delta if isinstance(delta, dict) else {})}
    known = _CARRIERS | _METADATA
    return {
        name
        for name, value in fields.items()
        if name not in known and value and isinstance(value, str | list | dict)
    }


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for member in value:
            yield from _texts(member)
    elif isinstance(value, dict):
        twice = value.get("reasoning") == value.get("reasoning_content")  # both names at once
        for name, member in value.items():
            if name in _CARRIERS and not (twice and name == "reasoning_content"):
                yield from _texts(member)
