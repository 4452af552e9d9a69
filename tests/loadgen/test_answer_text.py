"""Text of streamed answers is found in all fields of known servers, or its absence is reported."""

import json
from typing import Any

import pytest

from loadgen.record import Failure, Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Options, RequestFailed
from loadgen.target.http import _Answer
from loadgen.workload.base import RequestSpec


def answer(*choices: dict[str, Any], tokens: int | None = None) -> Record:
    """Process a stream of these choices, then a finish reason and the usage."""
    record = Record(0, 0.0, 3, 8)
    request = ScheduledRequest(RequestSpec("w1", 3, 8), 0.0)
    stream = _Answer(request, record, Options("m", keep_answers=True))
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, **choice}]} for choice in choices]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if tokens is not None:
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        events.append({"choices": [], "usage": usage})
    for at, event in enumerate(events):
        stream.take(json.dumps(event).encode(), float(at))
    stream.take(b"[DONE]", float(len(events)))
    stream.end()
    return record


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "x"},
        {"delta": {"content": "x"}},
        {"delta": {"role": "assistant", "content": None, "reasoning_content": "x"}},
        {"delta": {"content": "", "reasoning": "x"}},
        {"delta": {"reasoning": "x", "reasoning_content": "x"}},
        {"delta": {"reasoning_details": [{"type": "reasoning.text", "text": "x", "data": "?"}]}},
        {"delta": {"refusal": "x"}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]}},
        {"delta": {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "x"}}]}},
        {"delta": {"function_call": {"arguments": "x"}}},
        {"delta": {"content": [{"type": "text", "text": "x"}]}},
        {"delta": {"content": [{"type": "thinking", "thinking": [{"text": "x"}]}]}},
        {"delta": {"audio": {"id": "a", "transcript": "x"}}},
    ],
    ids=json.dumps,
)
def test_event_with_text_is_a_chunk(choice: dict[str, Any]) -> None:
    greeting = {"delta": {"role": "assistant", "content": ""}}
    record = answer(greeting, choice, choice, tokens=2)
    assert record.times == [1.0, 2.0]
    assert record.counts == [1, 1]
    assert record.text == "xx"


def test_reasoning_and_answer_are_counted_in_order() -> None:
    thinking = [{"delta": {"reasoning_content": word}} for word in ("a", "b")]
    record = answer(*thinking, {"delta": {"content": "c"}}, tokens=3)
    assert (record.first, record.text, record.output_tokens) == (0.0, "abc", 3)


@pytest.mark.parametrize(
    ("choice", "tokens"),
    [
        ({"delta": {"thoughts": "x"}}, 5),
        ({"delta": {"thoughts": [{"value": "x"}]}}, None),
        ({"delta": {"content": ""}}, 5),
        ({"thoughts": "x", "delta": {}}, 1),
    ],
)
def test_answer_without_known_text_is_a_failure_of_its_own(
    choice: dict[str, Any], tokens: int | None
) -> None:
    with pytest.raises(RequestFailed) as caught:
        answer(choice, tokens=tokens)
    assert caught.value.failure is Failure.NO_TEXT
    expected = "thoughts" if "thoughts" in json.dumps(choice) else "none"
    assert f"unknown fields: {expected}" in str(caught.value)


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_empty_answer_is_not_a_failure(tokens: int | None) -> None:
    """The only token may be an end token, which has no text."""
    assert answer({"delta": {"role": "assistant", "content": ""}}, tokens=tokens).times == []
