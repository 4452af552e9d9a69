"""Anthropic's Python package."""

import pytest

from tests.clients.client import Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

ANTHROPIC = Client("anthropic", "with_anthropic")


def test_message_is_the_same_whole_and_streamed(running: Running) -> None:
    found = ANTHROPIC.call(running, "messages")
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]
    assert found["stop_reasons"] == ["end_turn", "end_turn"]
    assert found["usage"][0] == found["usage"][1] > 0


def test_tool_is_called(running: Running) -> None:
    found = ANTHROPIC.call(running, "tools")
    assert found["calls"] == found["streamed"] == [["get_weather", {"city": "Paris"}]]
    assert found["stop_reason"] == "tool_use"
    assert "sunny" in found["answer"].lower()


def test_calls_are_forced(running: Running) -> None:
    calls = ANTHROPIC.call(running, "required")
    assert calls
    assert all(name == "get_weather" and "city" in arguments for name, arguments in calls)


def test_tokens_are_counted(running: Running) -> None:
    assert ANTHROPIC.call(running, "count") > 5


def test_errors_have_the_types_of_anthropic(running: Running) -> None:
    assert ANTHROPIC.call(running, "errors") == ["NotFoundError", "error", "not_found_error"]
