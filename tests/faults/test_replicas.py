"""Two routers and two gateways of one deployment: one of each is killed under load.

Overload: one tenant sends more than the workers can do, another one is not delayed by it.
"""

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.harness.deployment import RESTART_S, Running, deployed

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.campaign, pytest.mark.timeout(900)]

CLIENTS = 4
SLOTS = 4
FLOOD = 40  # clients, far more than batch slots
KEYS = {"flood": "sk-flood", "other": "sk-other"}
AT_ONCE_S = 5.0  # generous: the answer takes milliseconds on an idle machine


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    file.write_text("".join(f"{digest} {name}\n" for name, digest in digests.items()))
    environment = {
        "HEADRACE_GATEWAY_API_KEYS_FILE": str(file),
        "HEADRACE_PREFILL_MAX_RUNNING": str(SLOTS),
        "HEADRACE_DECODE_MAX_RUNNING": str(SLOTS),
    }
    flags = ("--routers", "2", "--gateways", "2")
    with deployed(*flags, environment=environment, api_key=KEYS["other"], sheds=True) as deployment:
        deployment.wait_for_all_workers()
        yield deployment


def body(running: Running, tokens: int) -> dict[str, object]:
    prompt = "Once upon a time there was a river"
    return {
        "model": running.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


async def complete(running: Running, tenant: str, tokens: int) -> httpx.Response:
    """Send a request on a new connection; send it again if its gateway was killed."""
    while True:
        async with httpx.AsyncClient(trust_env=False, timeout=300) as client:
            try:
                return await client.post(
                    f"{running.url}/v1/completions",
                    json=body(running, tokens),
                    headers={"authorization": f"Bearer {KEYS[tenant]}"},
                )
            except httpx.TransportError:
                await asyncio.sleep(0.1)


async def kill_under_load(running: Running, *names: str) -> list[httpx.Response]:
    """Kill processes one after the other while `CLIENTS` clients send requests."""
    responses: list[httpx.Response] = []
    stop = asyncio.Event()

    async def keep_asking() -> None:
        while not stop.is_set():
            responses.append(await complete(running, "other", 24))

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(keep_asking())
        for name in names:
            await asyncio.sleep(2)
            pid = running.state.pids[name]
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(RESTART_S):
                while running.state.pids[name] == pid:  # noqa: ASYNC110 - polls a file
                    await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        stop.set()
    return responses


async def until_router_answers(running: Running) -> None:
    """Wait until the first router, which was killed, listens again."""
    async with asyncio.timeout(RESTART_S):
        while True:
            with suppress(httpx.TransportError):
                running.workers()
                return
            await asyncio.sleep(0.1)


def placed(running: Running, router: int) -> float:
    """Return the number of requests that a router has placed since its start."""
    with running.state.router_client(router) as client:
        lines = client.get("/metrics").text.splitlines()
    name = 'headrace_router_placements_total{outcome="placed"} '
    return sum(float(line[len(name) :]) for line in lines if line.startswith(name))


async def test_router_killed_under_load_fails_no_request(running: Running) -> None:
    responses = await kill_under_load(running, "router")
    assert len(responses) >= CLIENTS
    assert not [response.text for response in responses if response.status_code != httpx.codes.OK]
    assert len({response.json()["choices"][0]["text"] for response in responses}) == 1
    assert placed(running, 1) > 0, "the second router took over"
    await until_router_answers(running)
    await asyncio.to_thread(running.wait_for_all_workers, RESTART_S)
    await asyncio.to_thread(running.wait_until_idle)
    for router in (0, 1):
        views = running.workers(router).values()
        assert not [view for view in views if view["queue_tokens"] or view["promised_tokens"]]


async def test_gateway_killed_under_load_loses_only_its_own_connections(running: Running) -> None:
    responses = await kill_under_load(running, "gateway", "gateway-1")
    assert len(responses) >= CLIENTS
    assert not [response.text for response in responses if response.status_code != httpx.codes.OK]
    assert len({response.json()["choices"][0]["text"] for response in responses}) == 1
    await asyncio.to_thread(running.wait_until_idle)


async def test_overload_of_one_tenant_is_shed_and_does_not_delay_another(running: Running) -> None:
    statuses: list[int] = []
    retries: list[int] = []
    refusals_s: list[float] = []
    stop = asyncio.Event()

    async def flood() -> None:
        while not stop.is_set():
            began = time.monotonic()
            response = await complete(running, "flood", 24)
            statuses.append(response.status_code)
            if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
                refusals_s.append(time.monotonic() - began)
                retries.append(int(response.headers["retry-after"]))
                await asyncio.sleep(retries[-1])

    async with asyncio.TaskGroup() as group:
        for _ in range(FLOOD):
            group.create_task(flood())
        async with asyncio.timeout(120):
            while not refusals_s:  # noqa: ASYNC110 - appended by the tasks
                await asyncio.sleep(0.1)
        others = [await complete(running, "other", 24) for _ in range(8)]
        stop.set()
    assert {response.status_code for response in others} == {httpx.codes.OK}
    assert set(statuses) == {httpx.codes.OK, httpx.codes.TOO_MANY_REQUESTS}
    assert min(refusals_s) < AT_ONCE_S
    assert min(retries) >= 1
    await asyncio.to_thread(running.wait_until_idle, 60)
    assert (await complete(running, "flood", 24)).status_code == httpx.codes.OK
