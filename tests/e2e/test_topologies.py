"""Several prefill and decode workers, and prefill workers that decode."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.harness.deployment import Running, deployed
from tests.harness.random_model import RandomModel
from tests.programs.equality import digests

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

REQUESTS = 24


@pytest.fixture(scope="module")
def model() -> Path:
    return RandomModel("tiny").ensure()


def ask(running: Running, number: int) -> int:
    """Send a request whose length and tokens depend on its number; return its output tokens."""
    prompt = [100 + (7919 * number + 31 * index) % 4000 for index in range(40 + 61 * number)]
    answer = httpx.post(
        f"{running.url}/v1/completions",
        json={"model": running.model, "prompt": prompt, "max_tokens": 6, "ignore_eos": True},
        timeout=60,
        trust_env=False,
    ).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    return int(answer["usage"]["completion_tokens"])


def test_kv_arrives_unchanged_on_all_workers(model: Path) -> None:
    prefill, decode = 2, 3
    flags = ("--model", str(model), "--prefill", str(prefill), "--decode", str(decode))
    environment = {"HEADRACE_PREFILL_KV_DIGEST": "true", "HEADRACE_DECODE_KV_DIGEST": "true"}
    environment |= {"HEADRACE_ROUTER_POLICY": "round_robin"}
    with deployed(*flags, environment=environment) as running:
        running.wait_for_all_workers()
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(lambda number: ask(running, number), range(REQUESTS)))
        running.wait_until_idle()
        sent = [digests(running, f"prefill-{n}", "kv computed") for n in range(prefill)]
        landed = [digests(running, f"decode-{n}", "kv verified") for n in range(decode)]
    assert counts == [6] * REQUESTS
    assert all(sent), "a prefill worker had no request"
    assert all(landed), "a decode worker had no request"
    computed = {request: digest for each in sent for request, digest in each.items()}
    arrived = {request: digest for each in landed for request, digest in each.items()}
    assert len(arrived) == REQUESTS
    assert arrived == computed


def test_prefill_worker_decodes_what_decode_workers_have_too_much_of(model: Path) -> None:
    environment = {"HEADRACE_PREFILL_DECODES": "true", "HEADRACE_DECODE_OVERFLOW_TOKENS": "400"}
    flags = ("--model", str(model), "--prefill", "1", "--decode", "1")
    with deployed(*flags, environment=environment) as running:
        running.wait_for_all_workers()
        with ThreadPoolExecutor(12) as pool:
            counts = list(pool.map(lambda number: ask(running, number), range(REQUESTS)))
        running.wait_until_idle()
        decoded = {
            name: running.metric(name, "headrace_worker_streams_total")
            for name in ("prefill-0", "decode-0")
        }
        free = {name: worker["pages_free"] for name, worker in running.workers().items()}
        total = {name: worker["pages_total"] for name, worker in running.workers().items()}
    assert counts == [6] * REQUESTS
    assert all(decoded.values()), f"requests decoded by each worker: {decoded}"
    assert sum(decoded.values()) == REQUESTS
    assert free == total
