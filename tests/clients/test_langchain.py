"""LangChain with langchain-openai."""

import pytest

from tests.clients.client import Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

LANGCHAIN = Client("langchain", "with_langchain")
ANNA = {"name": "Anna", "age": 7}


def test_chat_is_the_same_whole_streamed_and_in_a_batch(running: Running) -> None:
    found = LANGCHAIN.call(running, "chat")
    assert "Paris" in found["text"]
    assert found["streamed"] == found["batch"][0] == found["text"]
    assert found["usage"] > 0


def test_output_is_structured(running: Running) -> None:
    assert LANGCHAIN.call(running, "structured").items() >= ANNA.items()


def test_output_is_structured_by_a_forced_call(running: Running) -> None:
    found = LANGCHAIN.call(running, "structured_by_call")
    assert isinstance(found["name"], str)
    assert isinstance(found["age"], int)


def test_agent_calls_its_tool_and_answers(running: Running) -> None:
    call, result, answer = LANGCHAIN.call(running, "agent")
    assert [(each["name"], each["args"]) for each in call["calls"]] == [
        ("get_weather", {"city": "Paris"})
    ]
    assert result["text"] == "Sunny in Paris."
    assert "sunny" in answer["text"].lower()


def test_agent_answers_in_a_format(running: Running) -> None:
    assert LANGCHAIN.call(running, "agent_with_format").items() >= ANNA.items()


def test_retriever_finds_documents(running: Running) -> None:
    found = LANGCHAIN.call(running, "retrieval")
    assert len(found) == 5
    assert all(name == best for name, best in found.items())


def test_texts_are_embedded_in_large_requests(running: Running) -> None:
    found = LANGCHAIN.call(running, "embeddings")
    assert found["same"]
    assert found["dimensions"] == 64
    assert found["many"] == 400
