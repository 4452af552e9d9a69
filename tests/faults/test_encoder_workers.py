"""Encoder workers that are killed, stopped or drained under load: no request is lost."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.harness.deployment import Running, deployed
from tests.harness.encoders import ALONE, needs_encoder

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900), needs_encoder]

TEXTS = [f"text {number} {'word ' * (number % 40)}" for number in range(48)]
LIMIT_S = 300.0
PART_TOKENS = 256


@pytest.fixture(scope="module")
def deployment() -> Iterator[Running]:
    environment = {
        "HEADRACE_GATEWAY_ENCODE_PART_TOKENS": str(PART_TOKENS),
        "HEADRACE_ROUTER_PLACEMENT_TTL_S": "600",
    }
    flags = (*ALONE, "--encoders", "2")
    with deployed(*flags, environment=environment, patient=False) as running:
        yield running


def ready_workers(deployment: Running) -> dict[str, str]:
    """Return the epoch of each ready encoder worker."""
    with deployment.state.router_client() as client:
        listed = client.get("/v1/encoders", timeout=60).json()["workers"]
    return {each["worker_id"]: each["epoch"] for each in listed if each["state"] == "ready"}


async def until_ready(deployment: Running, old: dict[str, str] | None = None) -> None:
    """Wait until both workers are ready; the one that was killed with another epoch."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = await asyncio.to_thread(ready_workers, deployment)
        if len(found) == 2 and found != old:
            return
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.2)


async def embed(client: httpx.AsyncClient, texts: list[str]) -> list[list[float]]:
    answer = await client.post("/v1/embeddings", json={"input": texts})
    assert answer.status_code == 200, answer.text
    return [entry["embedding"] for entry in answer.json()["data"]]


class Load:
    """Clients that compare every answer until they are stopped."""

    def __init__(self, client: httpx.AsyncClient, expected: list[list[float]]) -> None:
        self.answers = 0
        self._client = client
        self._expected = expected
        self._stopping = False

    async def run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stopping:
            chosen = [rng.randrange(len(TEXTS)) for _ in range(rng.randint(1, 24))]
            found = await embed(self._client, [TEXTS[index] for index in chosen])
            assert found == [self._expected[index] for index in chosen]
            self.answers += 1

    async def answer(self, more: int) -> None:
        """Wait for further answers."""
        wanted = self.answers + more
        async with asyncio.timeout(LIMIT_S):
            while self.answers < wanted:  # noqa: ASYNC110 - it counts answers of several tasks
                await asyncio.sleep(0.02)

    def stop(self) -> None:
        self._stopping = True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_worker_that_ends_under_load_loses_nothing(
    deployment: Running, number: signal.Signals
) -> None:
    """A stopped worker is found by the pings that it does not answer."""
    await until_ready(deployment)
    before = ready_workers(deployment)
    async with httpx.AsyncClient(base_url=deployment.url, timeout=LIMIT_S) as client:
        load = Load(client, await embed(client, TEXTS))
        async with asyncio.TaskGroup() as group:
            for seed in range(4):
                group.create_task(load.run(seed))
            await load.answer(4)
            pid = deployment.state.pids["encoder-0"]
            os.kill(pid, number)
            await load.answer(8)
            if number is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
                before = {}
            load.stop()
    await until_ready(deployment, before)
    reason = {"reason": "worker_lost"}
    if number is signal.SIGKILL:
        assert deployment.gateway_metric("headrace_failovers_total", **reason) > 0


async def test_client_that_leaves_frees_the_workers(deployment: Running) -> None:
    await until_ready(deployment)
    async with httpx.AsyncClient(base_url=deployment.url, timeout=LIMIT_S) as client:
        call = asyncio.create_task(embed(client, TEXTS * 8))
        await asyncio.sleep(0.3)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
    await until_free(deployment)


async def test_killed_gateway_leaves_no_load_on_the_workers(deployment: Running) -> None:
    """It cannot release its placements, and the router would forget them only after minutes.

    Parts that it had placed and not sent yet count until then. Up to two are allowed.
    """
    await until_ready(deployment)
    async with httpx.AsyncClient(base_url=deployment.url, timeout=LIMIT_S) as client:
        call = asyncio.create_task(embed(client, TEXTS * 40))
        await until(deployment, lambda workers: any(each["running"] for each in workers))
        os.kill(deployment.state.pids["gateway"], signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            await call
    await until_free(deployment, unsent=2 * PART_TOKENS)


async def until_free(deployment: Running, unsent: int = 0) -> None:
    """Wait until no worker has work, as the router knows it, except ``unsent`` tokens."""
    await until(
        deployment,
        lambda workers: (
            not any(each["running"] for each in workers)
            and sum(each["queue_tokens"] for each in workers) <= unsent
        ),
    )


async def until(deployment: Running, holds: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Wait until something holds for the encoder workers, as the router lists them."""
    deadline = time.monotonic() + LIMIT_S
    with deployment.state.router_client() as router:
        while not holds(found := router.get("/v1/encoders", timeout=60).json()["workers"]):
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.1)
