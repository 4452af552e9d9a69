"""Constrained output of a real deployment, and its continuation after a worker was killed."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.harness.deployment import Running, deployed
from tests.harness.killed_answers import texts_despite_a_kill
from tests.runtime.grammar.validation import faults

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "größe": {"enum": ["klein", "groß"]},
        "scores": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5},
    },
    "required": ["name", "größe", "scores"],
    "additionalProperties": False,
}
NUMBERS = "([0-9]{2} ){50}"
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with deployed("--prefill", "1", "--decode", "2") as deployment:
        deployment.wait_for_all_workers()
        yield deployment


def body(running: Running, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Describe a person as JSON."}]
    return {"model": running.model, "messages": messages, "max_tokens": 250, **fields}


def post(running: Running, **fields: Any) -> httpx.Response:
    url = f"{running.url}/v1/chat/completions"
    return httpx.post(url, json=body(running, **fields), timeout=300, trust_env=False)


def texts(running: Running, **fields: Any) -> list[tuple[str, str]]:
    """Return text and finish reason of each choice."""
    answer = post(running, **fields)
    assert answer.status_code == httpx.codes.OK, answer.text
    return [(c["message"]["content"], c["finish_reason"]) for c in answer.json()["choices"]]


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_validate_against_the_schema(running: Running, temperature: float) -> None:
    choices = 3 if temperature else 1
    found = texts(running, response_format=FORMAT, temperature=temperature, n=choices, seed=5)
    assert len(found) == choices
    for text, reason in found:
        assert reason == "stop"
        assert not faults(json.loads(text), SCHEMA)


def test_first_token_is_constrained_on_the_prefill_worker(running: Running) -> None:
    for temperature in (0, 1.5):
        fields = {"max_tokens": 1, "temperature": temperature, "n": 4 if temperature else 1}
        for text, reason in texts(running, response_format=FORMAT, **fields):
            assert text.startswith("{")
            assert reason == "length"
    assert texts(running, max_tokens=1, temperature=0)[0][0][:1] != "{", "it needs the constraint"


def test_regular_expression_choice_and_grammar(running: Running) -> None:
    pattern = "(ja|nein), [0-9]{3}!"
    ((text, _),) = texts(running, structured_outputs={"regex": pattern}, temperature=1, seed=1)
    assert re.fullmatch(pattern, text)
    ((text, _),) = texts(running, guided_choice=["äpfel", "birnen"], temperature=2, seed=1)
    assert text in ("äpfel", "birnen")
    ((text, _),) = texts(running, guided_grammar='root ::= "<" ("x" | "(y)") ">"')
    assert text in ("<x>", "<(y)>")


def test_bad_constraint_gets_a_400(running: Running) -> None:
    answer = post(running, guided_json={"type": "object", "properties": {"a": {"not": {}}}})
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["param"] == "guided_json"


async def test_answer_continues_with_the_same_tokens_after_a_kill(running: Running) -> None:
    """The decode worker that has sent most of the tokens is killed in mid-answer."""
    fields = body(running, structured_outputs={"regex": NUMBERS}, temperature=0.9)
    for text in await texts_despite_a_kill(running, fields, sent=15):
        assert re.fullmatch(NUMBERS, text)
