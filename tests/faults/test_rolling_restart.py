"""Restarts under load: workers drained one after the other, and the only router killed.

No request fails. The drain is shorter than the requests, and one lost worker ends a request.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.harness.deployment import Running, deployed

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.campaign, pytest.mark.timeout(900)]

DEADLINE_S = 180.0
TOKENS = (200, 270, 350, 440)
"""Length of each client's answers. They differ, so that not all end just before a worker drains."""


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    environment = {
        "HEADRACE_GATEWAY_DEADLINE_S": str(DEADLINE_S),
        "HEADRACE_GATEWAY_MAX_LOST_WORKERS": "1",
        "HEADRACE_PREFILL_DRAIN_S": "0.2",
        "HEADRACE_DECODE_DRAIN_S": "0.2",
    }
    with deployed("--prefill", "2", "--decode", "2", environment=environment) as deployment:
        deployment.wait_for_all_workers()
        yield deployment


@asynccontextmanager
async def load(running: Running) -> AsyncIterator[list[httpx.Response]]:
    """Keep a request of each client running in the block, and collect their responses."""
    responses: list[httpx.Response] = []
    stop = asyncio.Event()
    prompt = {"model": running.model, "prompt": "Once upon a time"}
    settings = {"ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(
        base_url=running.url, trust_env=False, timeout=DEADLINE_S + 30
    ) as client:

        async def keep_asking(tokens: int) -> None:
            while not stop.is_set():
                body = {**prompt, **settings, "max_tokens": tokens}
                responses.append(await client.post("/v1/completions", json=body))

        async with asyncio.TaskGroup() as group:
            for tokens in TOKENS:
                group.create_task(keep_asking(tokens))
            await asyncio.sleep(2)
            yield responses
            stop.set()


def check(responses: list[httpx.Response]) -> None:
    """Check that every request got all its tokens."""
    assert len(responses) >= len(TOKENS)
    failed = [response.text for response in responses if response.status_code != httpx.codes.OK]
    assert not failed
    received = {response.json()["usage"]["completion_tokens"] for response in responses}
    assert received == set(TOKENS)


def failovers(running: Running, reason: str) -> float:
    text = httpx.get(f"{running.url}/metrics", trust_env=False).text
    name = f'headrace_failovers_total{{reason="{reason}"}} '
    return sum(float(line[len(name) :]) for line in text.splitlines() if line.startswith(name))


async def test_rolling_restart_of_the_workers_fails_no_request(running: Running) -> None:
    async with load(running) as responses:
        for worker in ("decode-0", "decode-1", "prefill-0", "prefill-1"):
            epoch = running.workers()[worker]["epoch"]
            os.kill(running.state.pids[worker], signal.SIGTERM)
            await asyncio.to_thread(running.wait_for_new_epoch, worker, epoch)
            await asyncio.sleep(1)
    check(responses)
    assert failovers(running, "draining") > 0
    assert failovers(running, "worker_lost") == 0
    await asyncio.to_thread(running.wait_until_idle)


async def test_restart_of_the_only_router_fails_no_request(running: Running) -> None:
    async with load(running) as responses:
        router = running.state.pids["router"]
        os.kill(router, signal.SIGKILL)
        async with asyncio.timeout(60):
            while running.state.pids["router"] == router:  # noqa: ASYNC110 - polls a file
                await asyncio.sleep(0.1)
        await asyncio.sleep(2)
    check(responses)
