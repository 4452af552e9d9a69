"""SIGKILL of a worker under load: every request ends in time, correctly or with a typed error."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from loadgen.files import read_run
from tests.harness.deployment import Running, deployed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

DEADLINE_S = 90.0
CLIENTS = 8
STATUSES = {408, 429, 500, 502, 503, 504}
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "The quick brown fox",
    "Once upon a time there was",
    "In Python, a list is",
    "The first law of motion says",
]


@dataclass(frozen=True)
class Ended:
    """Outcome of one request: its text or a typed error, and its duration in seconds."""

    prompt: str
    text: str | None
    error: str | None
    seconds: float


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    environment = {"HEADRACE_GATEWAY_DEADLINE_S": str(DEADLINE_S)}
    with deployed("--prefill", "2", "--decode", "2", environment=environment) as deployment:
        deployment.wait_for_all_workers()
        yield deployment


@pytest.mark.parametrize(
    "victim",
    [pytest.param("prefill-0", marks=[pytest.mark.long, pytest.mark.campaign]), "decode-0"],
)
async def test_every_request_ends_and_the_killed_worker_restarts(
    running: Running, victim: str
) -> None:
    async with httpx.AsyncClient(
        base_url=running.url, trust_env=False, timeout=DEADLINE_S + 30
    ) as client:
        expected = {prompt: await _ask(client, running.model, prompt) for prompt in PROMPTS}
        await asyncio.to_thread(running.wait_until_idle)
        pages = running.pages_free()
        epochs = {name: worker["epoch"] for name, worker in running.workers().items()}
        stop = asyncio.Event()
        load = [asyncio.create_task(_load(client, running.model, n, stop)) for n in range(CLIENTS)]
        await asyncio.sleep(3)
        os.kill(running.state.pids[victim], signal.SIGKILL)
        await asyncio.to_thread(running.wait_for_new_epoch, victim, epochs[victim])
        await asyncio.sleep(2)
        stop.set()
        ended = [end for client_ends in await asyncio.gather(*load) for end in client_ends]
        await asyncio.to_thread(running.wait_until_idle)
    correct = 0
    for end in ended:
        assert end.seconds < DEADLINE_S + 5, end
        if end.error is None:
            assert end.text == expected[end.prompt].text, "wrong answer"
            correct += 1
    failed = [end.error for end in ended if end.error is not None]
    assert correct > CLIENTS, f"too few requests succeeded: {failed}"
    assert len(failed) <= CLIENTS, f"requests failed that were not on the victim: {failed}"
    assert running.pages_free() == pages, "pages were not freed"
    for name in ("prefill-0", "prefill-1"):
        assert running.metric(name, "headrace_kv_lease_active") == 0


@pytest.mark.long
@pytest.mark.campaign
async def test_prefill_worker_that_decodes_serves_alone_while_the_decode_worker_restarts() -> None:
    environment = {"HEADRACE_PREFILL_DECODES": "true"}
    with deployed("--prefill", "1", "--decode", "1", environment=environment) as running:
        running.wait_for_all_workers()
        async with httpx.AsyncClient(
            base_url=running.url, trust_env=False, timeout=DEADLINE_S
        ) as client:
            expected = {prompt: await _ask(client, running.model, prompt) for prompt in PROMPTS}
            epoch = running.workers()["decode-0"]["epoch"]
            before = _decoded(running, "prefill-0")
            os.kill(running.state.pids["decode-0"], signal.SIGKILL)
            during = [await _ask(client, running.model, prompt) for prompt in PROMPTS]
            served_alone = _decoded(running, "prefill-0") - before
            await asyncio.to_thread(running.wait_for_new_epoch, "decode-0", epoch)
            await asyncio.to_thread(running.wait_until_idle)
            after = [await _ask(client, running.model, prompt) for prompt in PROMPTS]
            assert _decoded(running, "prefill-0") == before + served_alone
        for end in during + after:
            assert end.text == expected[end.prompt].text, end
        assert served_alone > 0
        assert running.metric("prefill-0", "headrace_kv_lease_active") == 0


def _decoded(running: Running, worker: str) -> float:
    return running.metric(worker, "headrace_worker_streams_total")


@pytest.mark.long
def test_load_generator_kills_a_worker_and_checks_every_request(
    running: Running, tmp_path: Path
) -> None:
    """Every request ends, answers equal those without a fault, and the killed worker restarts."""
    running.wait_until_idle()
    epochs = {name: worker["epoch"] for name, worker in running.workers().items()}
    done = subprocess.run(
        [sys.executable, "-m", "loadgen", "run", f"{running.url}/v1", "--rate", "1.5",
         "--input", "uniform:5,60", "--output", "fixed:12", "--duration", "12", "--timeout", "90",
         "--most-lag", "60",
         "--fault", "kill decode-1 at 4s", "--check-against", f"{running.url}/v1",
         "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    records, summary = read_run(tmp_path)
    assert [one["what"] for one in summary["faults"]] == ["kill decode-1"]
    assert summary["faults"][0]["at"] >= 3.5, "a busy machine may delay the fault"
    assert summary["outcomes"]["total"] == len(records) > 8
    assert summary["outcomes"]["unfinished"] == 0
    assert summary["check"]["equal"] == summary["outcomes"]["succeeded"] > len(records) / 2
    assert summary["server"]["stages"]["prefill"] > 0
    running.wait_for_new_epoch("decode-1", epochs["decode-1"])


async def _load(
    client: httpx.AsyncClient, model: str, number: int, stop: asyncio.Event
) -> list[Ended]:
    ended = []
    count = number
    while not stop.is_set():
        ended.append(await _ask(client, model, PROMPTS[count % len(PROMPTS)]))
        count += 1
    return ended


async def _ask(client: httpx.AsyncClient, model: str, prompt: str) -> Ended:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    start = time.monotonic()
    response = await client.post("/v1/completions", json=body)
    seconds = time.monotonic() - start
    if response.status_code == httpx.codes.OK:
        return Ended(prompt, response.json()["choices"][0]["text"], None, seconds)
    error = response.json()["error"]
    assert response.status_code in STATUSES, response.text
    assert error["type"], response.text
    assert error["message"], response.text
    return Ended(prompt, None, f"{response.status_code} {error['message']}", seconds)
