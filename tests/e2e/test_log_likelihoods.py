"""Log likelihoods through the service equal those of transformers, as lm-eval requests them."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from headrace.v1 import inference_pb2 as pb
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer
from tests.harness.deployment import Running, deployed

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

ITEMS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a large city on the river Seine."),
    ("Question: What do plants need to grow?\nAnswer:", " sunlight, water and air"),
    ("Question: What do plants need to grow?\nAnswer:", " television and books"),
    ("To boil an egg, first fill a pot with water. Then", " heat it until it boils."),
    ("To boil an egg, first fill a pot with water. Then", " paint the ceiling blue 😀."),
    ("def add(a, b):\n    return", " a + b\n"),
    ("Once upon a time there was a dragon who " * 40, "lived in a cave."),
]
TOLERANCE = 0.05
"""Maximum difference of the log likelihood of an item, nats. The workers keep KV in bf16."""


class Scored(NamedTuple):
    """Log likelihood of a continuation, and whether it is the greedy one."""

    logprob: float
    greedy: bool


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with deployed("--prefill", "2") as found:
        found.wait_for_all_workers()
        yield found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from services.common.model_source import resolve_model

    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def peer() -> Any:
    from runtime.checkpoint import load_checkpoint
    from runtime.offline.bench.engine import peer_of
    from services.common.model_source import resolve_model

    return peer_of(load_checkpoint(resolve_model("smollm2-135m")))


def encoded(tokenizer: Tokenizer, item: tuple[str, str]) -> tuple[list[int], list[int]]:
    context, continuation = item
    return tokenizer.encode(context), tokenizer.encode(continuation, add_special=False)


def expected_of(peer: Any, context: list[int], continuation: list[int]) -> Scored:
    with torch.inference_mode():
        logits = peer(torch.tensor([context + continuation])).logits[0]
    logprobs = logits[len(context) - 1 : -1].log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    return Scored(float(chosen.sum()), bool((chosen == logprobs.amax(dim=1)).all()))


def parsed(choice: dict[str, Any], context: int, end: int | None) -> Scored:
    """Return what lm-eval reads from a choice of a completion with ``echo``."""
    logprobs = choice["logprobs"]
    chosen = logprobs["token_logprobs"][context:end]
    top = [max(each.values()) for each in logprobs["top_logprobs"][context:end]]
    return Scored(sum(chosen), chosen == top)


def complete(running: Running, **body: Any) -> list[dict[str, Any]]:
    url = f"{running.url}/v1/completions"
    body = {"model": running.model, "temperature": 0, "echo": True, "logprobs": 1, **body}
    answer = httpx.post(url, json=body, timeout=600, trust_env=False)
    assert answer.status_code == httpx.codes.OK, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


@pytest.mark.parametrize(("max_tokens", "end"), [(1, -1), (0, None)])
def test_log_likelihoods_equal_those_of_transformers(
    running: Running, tokenizer: Tokenizer, peer: Any, max_tokens: int, end: int | None
) -> None:
    """All items are in one request. Later ones repeat the beginning of earlier ones."""
    items = [encoded(tokenizer, item) for item in ITEMS]
    prompts = [context + continuation for context, continuation in items]
    choices = complete(running, prompt=prompts, max_tokens=max_tokens)
    for (context, continuation), choice in zip(items, choices, strict=True):
        found = parsed(choice, len(context), end)
        expected = expected_of(peer, context, continuation)
        assert abs(found.logprob - expected.logprob) <= TOLERANCE
        assert found.greedy == expected.greedy


def test_text_prompts_have_the_values_of_token_ids(running: Running, tokenizer: Tokenizer) -> None:
    text = "".join(ITEMS[5])
    ids = tokenizer.encode(text)
    (of_text,), (of_ids,) = (
        complete(running, prompt=prompt, max_tokens=0) for prompt in (text, ids)
    )
    assert of_text["text"] == of_ids["text"] == text
    assert of_text["logprobs"] == of_ids["logprobs"]


def test_cached_prompts_are_scored_whole(running: Running, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ITEMS[-1][0])
    complete(running, prompt=ids, max_tokens=2, echo=False, logprobs=None)
    first, again = (complete(running, prompt=ids, max_tokens=3)[0] for _ in range(2))
    assert len(first["logprobs"]["token_logprobs"]) == len(ids) + 3
    assert first["logprobs"]["tokens"] == again["logprobs"]["tokens"]
    scored, repeated = (answer["logprobs"]["token_logprobs"][1:] for answer in (first, again))
    assert scored == pytest.approx(repeated, abs=TOLERANCE)


def test_grpc_has_the_values_of_http(running: Running, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ITEMS[2][0])
    (choice,) = complete(running, prompt=ids, max_tokens=0)
    request = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=ids), echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    responses = list(running.stub().Generate(request))
    pieces = [piece for response in responses for piece in response.prompt_logprobs]
    values = [value for piece in pieces for value in piece.logprobs]
    assert "".join(response.text for response in responses) == ITEMS[2][0]
    assert values == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=TOLERANCE)


def test_lost_prefill_worker_is_replaced(running: Running, tokenizer: Tokenizer) -> None:
    """The worker that computes the prompt is killed; the values are those of a run without."""
    ids = (tokenizer.encode(ITEMS[-1][0]) * 9)[:3000]
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.extend(complete(running, prompt=ids, max_tokens=0))
    )
    asking.start()
    deadline = time.monotonic() + 60
    busy: list[str] = []
    while not busy and time.monotonic() < deadline:
        workers = running.workers()
        busy = [name for name, worker in workers.items() if "prefill" in name and worker["running"]]
    assert asking.is_alive()
    assert busy
    os.kill(running.state.pids[busy[0]], signal.SIGKILL)
    asking.join()
    assert running.gateway_metric("headrace_failovers_total") >= 1
    (again,) = complete(running, prompt=ids, max_tokens=0)
    found = answers[0]["logprobs"]["token_logprobs"]
    assert len(found) == len(ids)
    assert found[1:] == pytest.approx(again["logprobs"]["token_logprobs"][1:], abs=TOLERANCE)
    running.wait_for_all_workers()
    running.wait_until_idle()
