"""Chats over HTTP with exact histories: token ids of answers, found in the prefix cache.

The weights are random, so that most answers have other tokens when their text is tokenized again. A
prefill worker of a separate decode worker holds only the prompts of earlier turns.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.files import read_run
from tests.harness.deployment import Running, deployed
from tests.harness.random_model import RandomModel
from tests.loadgen.command import ANY_LAG, loadgen

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

PAGE = 16
SYSTEM, QUESTION, ANSWER = 70, 21, 25


@pytest.fixture(scope="module", params=["colocated", "1+1"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def running(layout: str) -> Iterator[Running]:
    flags = ["--colocated"] if layout == "colocated" else []
    with deployed("--model", str(RandomModel("tiny").ensure()), *flags) as deployment:
        yield deployment


def cacheable(layout: str, history: int) -> range:
    """Return how many tokens of a history in the prefix cache are possible, in whole pages.

    Args:
        history: number of tokens of the previous turn with its answer, whose last one has no KV.
    """
    most = (history - 1) // PAGE * PAGE
    least = most if layout == "colocated" else (history - ANSWER) // PAGE * PAGE
    return range(least, most + 1, PAGE)


def complete(running: Running, prompt: list[int], salt: str) -> tuple[list[int], list[int], int]:
    """Return the token ids of the prompt and of the output, and the number of cached tokens."""
    body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt}
    response = httpx.post(
        f"{running.url}/v1/completions",
        json={**body, **options, "return_token_ids": True},
        timeout=60,
        trust_env=False,
    )
    assert response.status_code == 200, response.text
    *lines, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert done == "[DONE]"
    *events, last = map(json.loads, lines)
    choices: list[dict[str, Any]] = [event["choices"][0] for event in events]
    ids = [id for choice in choices for id in choice["token_ids"]]
    assert last["usage"]["completion_tokens"] == len(ids) == ANSWER
    return choices[0]["prompt_token_ids"], ids, cached_tokens(last)


def cached_tokens(event: dict[str, Any]) -> int:
    return int(event["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_history_of_returned_token_ids_is_found_in_the_cache(running: Running, layout: str) -> None:
    """The answers are those of a request that finds nothing in the cache."""
    history = [100 + 7 * index % 4000 for index in range(SYSTEM)]
    for turn in range(3):
        expected = cacheable(layout, len(history)) if turn else range(1)
        prompt = history + [200 + turn + 11 * index % 3000 for index in range(QUESTION)]
        received, answer, cached = complete(running, prompt, "chat")
        assert received == prompt
        assert cached in expected, f"turn {turn + 1}"
        _, cold, none = complete(running, prompt, f"another tenant, turn {turn}")
        assert (cold, none) == (answer, 0)
        history = received + answer


def test_load_generator_plays_chats_with_exact_histories(
    running: Running, layout: str, tmp_path: Path
) -> None:
    code, output = loadgen(
        *("run", running.url, "--turns", "fixed:3", "--prefix-tokens", f"{SYSTEM}"),
        *("--input", f"fixed:{QUESTION}", "--output", f"fixed:{ANSWER}", "--ignore-eos"),
        *("--token-ids", "--concurrency", "2", "--requests", "3", *ANY_LAG, "--out", tmp_path),
    )
    assert code == 0, output
    records, summary = read_run(tmp_path)
    assert [record.failure for record in records] == [None] * 9
    assert summary["lengths"]["input"]["asked"] == summary["lengths"]["input"]["counted"]
    for record in records:
        before = SYSTEM + (record.turn - 1) * (QUESTION + ANSWER)
        assert record.input_tokens == before + QUESTION
        assert (record.output_tokens, sum(record.counts)) == (ANSWER, ANSWER)
        if record.turn > 1:
            assert record.cached_tokens in cacheable(layout, before)
