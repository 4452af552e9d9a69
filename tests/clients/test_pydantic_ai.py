"""pydantic-ai."""

import pytest

from tests.clients.client import Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.more_clients, pytest.mark.timeout(2400)]

PYDANTIC_AI = Client("pydantic-ai", "with_pydantic_ai")


def test_chat_is_the_same_whole_and_streamed(running: Running) -> None:
    found = PYDANTIC_AI.call(running, "chat")
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]


def test_output_follows_a_schema(running: Running) -> None:
    assert PYDANTIC_AI.call(running, "native").items() >= {"name": "Anna", "age": 7}.items()


def test_output_is_a_forced_call_by_default(running: Running) -> None:
    assert PYDANTIC_AI.call(running, "by_call")["kind"] in ("adult", "child")


def test_agent_calls_its_tool_and_answers(running: Running) -> None:
    found = PYDANTIC_AI.call(running, "tools")
    assert found["calls"] == [{"city": "Paris"}]
    assert "sunny" in found["answer"].lower()
