"""SIGKILL of a worker at each point of a request's way through it."""

import signal

import pytest

from tests.harness.trial import Trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.campaign
@pytest.mark.parametrize("point", ["queued", "computing", "encoded"])
async def test_prefill_worker_killed_before_the_pull(deployment: Trial, point: str) -> None:
    """The prompt is queued, in prefill, or its KV is encoded under a lease."""
    deployment.points.hold(point, deployment.workers("prefill"))
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        victim = await deployment.points.reached(point)
        deployment.signal(victim, signal.SIGKILL)
        deployment.points.release()
        await reply.check()
    await deployment.check_recovered(victim)


async def read_from_stopped(deployment: Trial) -> tuple[str, str]:
    """Start a READ from a prefill worker that is stopped; return its name and the reader's."""
    deployment.points.hold("pull", deployment.workers("decode"))
    reader = await deployment.points.reached("pull")
    sender = deployment.busy("prefill")
    deployment.signal(sender, signal.SIGSTOP)
    deployment.points.hold("reading", [reader])
    deployment.points.release("pull")
    await deployment.points.reached("reading")
    return sender, reader


async def test_prefill_worker_killed_during_a_read(deployment: Trial) -> None:
    """The whole prompt is read again from another one, whatever was sent before."""
    received = deployment.sum_of("decode", "headrace_kv_transfer_tokens_total")
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        victim, _ = await read_from_stopped(deployment)
        deployment.signal(victim, signal.SIGKILL)
        deployment.points.release()
        await reply.check()
    received = deployment.sum_of("decode", "headrace_kv_transfer_tokens_total") - received
    assert received >= len(deployment.long.prompt)
    await deployment.check_recovered(victim)


@pytest.mark.campaign
async def test_decode_worker_killed_before_the_pull(deployment: Trial) -> None:
    deployment.points.hold("pull", deployment.workers("decode"))
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        victim = await deployment.points.reached("pull")
        deployment.signal(victim, signal.SIGKILL)
        deployment.points.release()
        await reply.check()
    await deployment.check_recovered(victim)


@pytest.mark.campaign
async def test_decode_worker_killed_during_a_read(deployment: Trial) -> None:
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        sender, victim = await read_from_stopped(deployment)
        deployment.signal(victim, signal.SIGKILL)
        deployment.signal(sender, signal.SIGCONT)
        deployment.points.release()
        await reply.check()
    await deployment.check_recovered(victim)


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.campaign), 7])
async def test_decode_worker_killed_after_tokens(deployment: Trial, tokens: int) -> None:
    deployment.points.hold("computing", deployment.workers("decode"), after=tokens)
    async with deployment.client() as client:
        reply = client.ask(deployment.stream)
        await reply.read(tokens)
        victim = await deployment.points.reached("computing")
        deployment.signal(victim, signal.SIGKILL)
        deployment.points.release()
        await reply.check()
    await deployment.check_recovered(victim)
