"""OpenAI's Python package."""

import pytest

from tests.clients.client import Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

OPENAI = Client("openai", "with_openai")
ANNA = {"name": "Anna", "age": 7}


def test_models_are_listed(running: Running) -> None:
    assert OPENAI.call(running, "models") == [running.model]


def test_chat_is_the_same_whole_and_streamed(running: Running) -> None:
    found = OPENAI.call(running, "chat")
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]
    assert found["streamed_usage"] == found["usage"] > 0
    assert found["finish_reason"] == "stop"


def test_each_token_has_alternatives(running: Running) -> None:
    found = OPENAI.call(running, "logprobs")
    assert found
    assert set(found) == {2}


def test_completions_continue_prompts(running: Running) -> None:
    first, second = OPENAI.call(running, "completion")["texts"]
    assert "Paris" in first
    assert "4, 5" in second


def test_answers_are_parsed(running: Running) -> None:
    found = OPENAI.call(running, "parse")
    assert found["whole"] == found["streamed"]
    assert found["whole"].items() >= ANNA.items()


def test_tool_is_called(running: Running) -> None:
    found = OPENAI.call(running, "tools")
    for calls in (found["calls"], found["streamed"]):
        (called,) = calls
        assert (called["name"], called["arguments"]) == ("get_weather", '{"city": "Paris"}')
    assert "Sunny" in found["answer"]


def test_calls_are_forced(running: Running) -> None:
    for calls in OPENAI.call(running, "required").values():
        for name, arguments in calls:
            assert name == "get_weather"
            assert isinstance(arguments["city"], str)
        assert calls


def test_errors_have_the_types_of_openai(running: Running) -> None:
    invalid = "invalid_request_error"
    assert OPENAI.call(running, "errors") == {
        "model": ["NotFoundError", "model_not_found", "model", invalid],
        "temperature": ["BadRequestError", "invalid_value", "temperature", invalid],
        "messages": ["BadRequestError", "invalid_value", "messages", invalid],
        "tokens": ["BadRequestError", "context_length_exceeded", "max_tokens", invalid],
    }


def test_responses_are_the_same_whole_and_streamed(running: Running) -> None:
    found = OPENAI.call(running, "responses")
    assert "Paris" in found["text"]
    assert found["streamed"] == found["completed"] == found["text"]


def test_responses_are_parsed(running: Running) -> None:
    assert OPENAI.call(running, "responses_parse").items() >= ANNA.items()
