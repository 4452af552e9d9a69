"""SIGSTOP of a worker for longer than a lease, then SIGCONT: a stale epoch and a zombie writer.

UCX may abort a worker that resumes. That counts as a crash: a new epoch.
"""

import asyncio
import signal
import time

import pytest

from tests.faults.test_killed_workers import read_from_stopped
from tests.harness.trial import LEASE_S, Trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

STOPPED_S = 2 * LEASE_S


async def resume(deployment: Trial, victim: str, stopped_at: float) -> None:
    await asyncio.sleep(stopped_at + STOPPED_S - time.monotonic())
    deployment.signal(victim, signal.SIGCONT)
    await deployment.check_recovered(resumed=(victim,))


@pytest.mark.campaign
async def test_prefill_worker_stopped_in_prefill(deployment: Trial) -> None:
    deployment.points.hold("computing", deployment.workers("prefill"))
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        victim = await deployment.points.reached("computing")
        deployment.signal(victim, signal.SIGSTOP)
        stopped_at = time.monotonic()
        deployment.points.release()
        await reply.check()
    await resume(deployment, victim, stopped_at)


async def test_prefill_worker_stopped_during_a_read(deployment: Trial) -> None:
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        victim, _ = await read_from_stopped(deployment)
        stopped_at = time.monotonic()
        deployment.points.release()
        await reply.check()
    await resume(deployment, victim, stopped_at)


@pytest.mark.campaign
async def test_decode_worker_stopped_during_a_read(deployment: Trial) -> None:
    """The stopped reader holds a lease of the prefill worker."""
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        sender, victim = await read_from_stopped(deployment)
        deployment.signal(victim, signal.SIGSTOP)
        stopped_at = time.monotonic()
        deployment.signal(sender, signal.SIGCONT)
        deployment.points.release()
        await reply.check()
    await resume(deployment, victim, stopped_at)


async def test_decode_worker_stopped_after_tokens(deployment: Trial) -> None:
    """The worker that resumes sends no token to the client, which has moved to another one."""
    deployment.points.hold("computing", deployment.workers("decode"), after=3)
    async with deployment.client() as client:
        reply = client.ask(deployment.stream)
        await reply.read(3)
        victim = await deployment.points.reached("computing")
        deployment.signal(victim, signal.SIGSTOP)
        stopped_at = time.monotonic()
        deployment.points.release()
        await reply.check()
    await resume(deployment, victim, stopped_at)
