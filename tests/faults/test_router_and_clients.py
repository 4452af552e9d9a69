"""The only router killed during streams, and clients that leave at six points."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from tests.faults.test_killed_workers import read_from_stopped
from tests.harness.points import LIMIT_S
from tests.harness.reference import SEED
from tests.harness.trial import Trial
from tests.programs.hang_ups import faults_of

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


async def test_router_killed_during_streams(deployment: Trial) -> None:
    """Streams continue, and requests that arrive without a router wait for the next one."""
    failovers = deployment.failovers()
    deployment.points.hold("computing", deployment.workers("decode"), after=3)
    async with deployment.client() as client:
        streams = [client.ask(deployment.stream) for _ in range(4)]
        await deployment.points.reached("computing")
        deployment.signal("router", signal.SIGKILL)
        new = client.ask(deployment.short)
        deployment.points.release()
        for reply in (*streams, new):
            await reply.check()
    assert deployment.failovers() == failovers
    await deployment.check_recovered("router")


@asynccontextmanager
async def request(deployment: Trial) -> AsyncIterator[asyncio.Task[None]]:
    """Send a request over HTTP; at the end of the block the client closes its connection."""
    body = {
        "model": deployment.running.model,
        "prompt": list(deployment.long.prompt),
        "max_tokens": 60,
        "temperature": 0,
        "stream": True,
    }
    url = f"{deployment.running.url}/v1/completions"
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:

        async def read() -> None:
            async with client.stream("POST", url, json=body) as response:
                async for _ in response.aiter_bytes():
                    pass

        reading = asyncio.create_task(read())
        yield reading
        assert not reading.done(), "the request ended before the client left"
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


@pytest.mark.campaign
async def test_client_leaves_before_the_placement(deployment: Trial) -> None:
    deployment.signal("router", signal.SIGSTOP)
    try:
        async with request(deployment):
            await asyncio.sleep(0.3)
    finally:
        deployment.signal("router", signal.SIGCONT)
    await deployment.check_recovered()


@pytest.mark.parametrize(
    ("point", "role"),
    [
        pytest.param("queued", "prefill", marks=pytest.mark.campaign),
        pytest.param("computing", "prefill", marks=pytest.mark.campaign),
        ("pull", "decode"),
        pytest.param("computing", "decode", marks=pytest.mark.campaign),
    ],
)
async def test_client_leaves(deployment: Trial, point: str, role: str) -> None:
    """The prompt is queued, computed, computed but not read, or its output is generated."""
    deployment.points.hold(point, deployment.workers(role))
    async with request(deployment):
        await deployment.points.reached(point)
    await asyncio.sleep(0.2)
    await deployment.check_recovered()


async def test_client_leaves_during_a_read(deployment: Trial) -> None:
    async with request(deployment):
        sender, _ = await read_from_stopped(deployment)
    await asyncio.sleep(0.2)
    deployment.signal(sender, signal.SIGCONT)
    await deployment.check_recovered(resumed=(sender,))


async def test_clients_that_hang_up_leave_no_load(deployment: Trial) -> None:
    found = await asyncio.to_thread(faults_of, deployment.running, 15.0, SEED, 8)
    assert not found
