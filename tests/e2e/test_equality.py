"""Disaggregated output equals colocated output on 12 real prompts, dense and factorized."""

import json
from collections import Counter

import httpx
import pytest

from tests.harness.deployment import Running, deployed
from tests.harness.random_model import RandomModel
from tests.programs.equality import (
    LOG_DIGESTS,
    Answer,
    Case,
    Row,
    colocated,
    compared,
    make_cases,
    run,
)

pytestmark = pytest.mark.e2e

FEW = 7
"""Cases for several ranks, which are slow on few cores: among them the longest prompt."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(12, longest=700, max_tokens=24)


@pytest.fixture(scope="module")
def dense(cases: list[Case]) -> dict[str, Answer]:
    """Answers of one worker of one rank with dense layers."""
    return colocated(cases)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_dense_tokens_and_pages_equal_those_of_one_worker(
    cases: list[Case], dense: dict[str, Answer]
) -> None:
    """`make equality` compares 50 prompts, with SplitZip as well."""
    for row in run(cases, dense, (), label="dense", codecs=["raw"]):
        _check(row, len(cases))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tokens_and_pages_of_unequal_ranks_equal_those_of_one_worker(
    cases: list[Case], dense: dict[str, Answer]
) -> None:
    """Two prefill ranks have one and two of three KV heads, each decode rank has one."""
    few = cases[:FEW]
    reference = {case.name: dense[case.name] for case in few}
    flags = ("--prefill-tp", "2", "--decode-tp", "3")
    with deployed(*flags, environment=LOG_DIGESTS) as running:
        _check(compared(running, few, reference, "2 to 3 ranks"), FEW, most_close=3)
        _check_streamed_choices(running)
        _check_closed_stream(running)
        running.check_listeners()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_factorized_tokens_and_pages_equal_those_of_one_worker(cases: list[Case]) -> None:
    """The model has random factor pairs. `make equality` compares a factorized SmolLM2."""
    model = RandomModel("smollm2-135m", keep=0.8).ensure()
    flags = ("--model", str(model))
    for row in run(cases, colocated(cases, flags), flags, label="keep 0.8", codecs=["splitzip"]):
        _check(row, len(cases))


def _check(row: Row, count: int, most_close: int = 2) -> None:
    found = row.comparison
    assert not found.different, f"{row.name}: {found.different}"
    assert found.equal + len(found.close) == count
    assert len(found.close) <= most_close, f"{row.name}: too many near-ties: {found.close}"
    assert row.digests == (count, count), f"{row.name}: pages differ, or were not compared"


def _check_streamed_choices(running: Running) -> None:
    """Check that two sampled choices are streamed as they are answered at once."""
    body = {
        "model": running.model,
        "prompt": "Once upon a time",
        "max_tokens": 12,
        "n": 2,
        "seed": 3,
    }
    url = f"{running.url}/v1/completions"
    with httpx.Client(trust_env=False, timeout=120) as client:
        choices = client.post(url, json=body).raise_for_status().json()["choices"]
        whole = {choice["index"]: choice["text"] for choice in choices}
        parts: Counter[int] = Counter()
        streamed = {0: "", 1: ""}
        with client.stream("POST", url, json=body | {"stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        streamed[choice["index"]] += choice["text"]
                        parts[choice["index"]] += 1
    assert streamed == whole
    assert whole[0] != whole[1]
    assert min(parts.values()) > 1, "choices were not streamed"


def _check_closed_stream(running: Running) -> None:
    """Check that a client that leaves frees what its request holds on all ranks."""
    body = {"model": running.model, "prompt": "Once upon a time", "max_tokens": 2000}
    body |= {"stream": True, "ignore_eos": True}
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", f"{running.url}/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()  # kept, since the end of the iterator closes the connection
        next(lines)
    running.wait_until_idle()
    assert running.metric("prefill-0", "headrace_kv_lease_active") == 0
    assert running.metric("decode-0", "headrace_kv_landing_slots") == 0
