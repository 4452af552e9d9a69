"""SIGKILL of a worker under load: every request ends, right or with a typed error, in its time."""

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
from tests.e2e.deployment import Running, deployed

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
    """How one request ended: a text, or a typed error; and when, in seconds from its start."""

    prompt: str
    text: str | None
    error: str | None
    seconds: float


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    environment = {"HEADRACE_GATEWAY_DEADLINE_S": str(DEADLINE_S)}
    with deployed("--prefill", "2", "--decode", "2", environment=environment) as deployment:
        yield deployment


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_every_request_ends_and_the_worker_comes_back(running: Running, victim: str) -> None:
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
        killed_at = time.monotonic()
        await asyncio.to_thread(_wait_for_new_epoch, running, victim, epochs[victim])
        back_s = time.monotonic() - killed_at
        await asyncio.sleep(2)
        stop.set()
        ended = [end for client_ends in await asyncio.gather(*load) for end in client_ends]
        await asyncio.to_thread(running.wait_until_idle)
    right = 0
    for end in ended:
        assert end.seconds < DEADLINE_S + 5, end
        if end.error is None:
            assert end.text == expected[end.prompt].text, "a wrong answer is worse than none"
            right += 1
    failed = [end.error for end in ended if end.error is not None]
    assert right > CLIENTS, f"the others went on: {failed}"
    assert len(failed) <= CLIENTS, f"only those on the victim may fail: {failed}"
    assert back_s < 60
    assert running.pages_free() == pages, "the victim's pages are a new epoch's, all free"
    for name in ("prefill-0", "prefill-1"):
        assert running.metric(name, "headrace_kv_lease_active") == 0


def test_the_load_generator_does_it_too(running: Running, tmp_path: Path) -> None:
    """Every request of its run has an outcome, answers are those of a deployment that is well, and
    the worker that was killed comes back."""
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
    assert summary["faults"][0]["at"] == pytest.approx(4.0, abs=0.5)
    assert summary["outcomes"]["total"] == len(records) > 8
    assert summary["outcomes"]["unfinished"] == 0
    assert summary["check"]["equal"] == summary["outcomes"]["succeeded"] > len(records) / 2
    assert summary["server"]["stages"]["prefill"] > 0
    _wait_for_new_epoch(running, "decode-1", epochs["decode-1"])


async def _load(
    client: httpx.AsyncClient, model: str, number: int, stop: asyncio.Event
) -> list[Ended]:
    ended = []
    turn = number
    while not stop.is_set():
        ended.append(await _ask(client, model, PROMPTS[turn % len(PROMPTS)]))
        turn += 1
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


def _wait_for_new_epoch(running: Running, worker: str, old_epoch: object) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        known = running.workers().get(worker)
        if known and known["epoch"] != old_epoch and known["state"] == "ready":
            return
        time.sleep(0.2)
    raise AssertionError(f"{worker} did not come back: {running.workers()}")
