"""OpenAI's Python package."""

import pytest

from tests.clients.client import ENCODER, Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

OPENAI = Client("openai", "with_openai")
ANNA = {"name": "Anna", "age": 7}


def test_models_are_listed(running: Running) -> None:
    assert OPENAI.call(running, "models") == [running.model, ENCODER]


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


def test_embeddings_are_the_same_in_all_forms(running: Running) -> None:
    found = OPENAI.call(running, "embeddings")
    # Numbers in JSON have the digits of float32, and a text gives the same result in any batch.
    assert all(difference < 1e-8 for difference in found["differences"].values())
    assert found["counts"] == {"float": 5, "user": 5, "single": 1, "async": 5}
    assert found["indices"] == [0, 1, 2, 3, 4]
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 5
    assert found["model"] == ENCODER


def test_token_ids_and_short_embeddings(running: Running) -> None:
    found = OPENAI.call(running, "embeddings_of_ids")
    assert found["difference"] == 0
    assert found["differences"] == [0, 0]
    assert found["dimensions"] == 64
    assert found["length"] == pytest.approx(1, abs=1e-6)


def test_embeddings_find_documents(running: Running) -> None:
    found = OPENAI.call(running, "retrieval")
    assert len(found) == 5
    assert all(name == best for name, best in found.items())


def test_errors_of_embeddings_have_the_types_of_openai(running: Running) -> None:
    assert OPENAI.call(running, "embedding_errors") == {
        "model": ["NotFoundError", "model_not_found", "model"],
        "generates": ["BadRequestError", "model_not_supported", "model"],
        "dimensions": ["BadRequestError", "invalid_value", "dimensions"],
        "tokens": ["BadRequestError", "context_length_exceeded", "input[1]"],
        "ids": ["BadRequestError", "invalid_value", "input"],
        "none": ["BadRequestError", "invalid_value", "input"],
    }
