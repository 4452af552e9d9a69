"""LlamaIndex with its packages for servers of OpenAI's API."""

import pytest

from tests.clients.client import Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.more_clients, pytest.mark.timeout(2400)]

LLAMA_INDEX = Client("llama-index", "with_llama_index")


def test_chat_is_the_same_whole_and_streamed(running: Running) -> None:
    found = LLAMA_INDEX.call(running, "chat")
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]


def test_completion_continues_the_prompt(running: Running) -> None:
    assert "Paris" in LLAMA_INDEX.call(running, "completion")


def test_output_is_structured(running: Running) -> None:
    assert LLAMA_INDEX.call(running, "structured").items() >= {"name": "Anna", "age": 7}.items()


def test_output_is_structured_by_a_forced_call(running: Running) -> None:
    assert LLAMA_INDEX.call(running, "structured_by_call")["kind"] in ("adult", "child")


def test_index_finds_documents(running: Running) -> None:
    found = LLAMA_INDEX.call(running, "retrieval")
    assert len(found) == 5
    assert all(name == best for name, best in found.items())
