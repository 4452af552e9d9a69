"""OpenAI's Agents SDK."""

import pytest

from tests.clients.client import Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.more_clients, pytest.mark.timeout(2400)]

AGENTS = Client("openai-agents", "with_openai_agents")
INTERFACES = {"responses", "chats"}


def test_agents_answer(running: Running) -> None:
    found = AGENTS.call(running, "text")
    assert set(found) == INTERFACES
    assert all("Paris" in text for text in found.values())


def test_output_follows_a_schema(running: Running) -> None:
    found = AGENTS.call(running, "structured")
    assert set(found) == INTERFACES
    assert all(each.items() >= {"name": "Anna", "age": 7}.items() for each in found.values())


def test_agents_call_their_tool(running: Running) -> None:
    found = AGENTS.call(running, "tools")
    assert set(found) == INTERFACES
    assert all(text.startswith("Sunny in ") for text in found.values())
