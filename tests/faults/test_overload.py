"""Leases under a decode worker with three times its load, and KV pages that run out."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.harness.points import LIMIT_S
from tests.harness.reference import cases
from tests.harness.trial import LEASE_S, Trial, trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

RUNNING = 4


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """A decode worker whose pages hold two sequences, and a router that sends it more."""
    environment = {
        "HEADRACE_DECODE_MAX_RUNNING": str(RUNNING),
        "HEADRACE_DECODE_KV_TOKENS": "1408",
        "HEADRACE_ROUTER_BACKLOG": "16",
        "HEADRACE_ROUTER_OUTPUT_RESERVE": "0",
    }
    with trial(
        tmp_path_factory.mktemp("points"), "--prefill", "2", environment=environment
    ) as running:
        yield running


async def test_leases_of_an_overloaded_decode_worker(deployment: Trial) -> None:
    """Requests wait longer than a lease for pages and slots. No lease of a live reader expires."""
    deployment.points.hold("computing", deployment.workers("decode"))
    async with deployment.client() as client:
        replies = [client.ask(case) for case in cases("overload", 3, 600, 60) for _ in range(4)]
        await deployment.points.reached("computing")
        await asyncio.sleep(2 * LEASE_S)
        deployment.points.release()
        for reply in replies:
            await reply.check()
    assert deployment.sum_of("prefill", "headrace_kv_lease_expired_total") == 0
    await deployment.check_recovered()


async def test_pages_run_out_while_sequences_grow(deployment: Trial) -> None:
    """Prompts fit at first. Their outputs do not, so that sequences are preempted."""
    async with deployment.client() as client:
        replies = [client.ask(case) for case in cases("growing", 4, 300, 100)]
        for reply in replies:
            await reply.check()
    await deployment.check_recovered()


async def test_expired_lease_moves_the_request(deployment: Trial) -> None:
    """The reader is alive, but does not read for longer than a lease."""
    deployment.points.hold("pull", deployment.workers("decode"))
    expired = deployment.sum_of("prefill", "headrace_kv_lease_expired_total")
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        await deployment.points.reached("pull")
        await asyncio.sleep(LEASE_S)
        async with asyncio.timeout(LIMIT_S):
            while (  # noqa: ASYNC110 - polls a metric
                deployment.sum_of("prefill", "headrace_kv_lease_expired_total") == expired
            ):
                await asyncio.sleep(0.2)
        deployment.points.release()
        await reply.check()
    await deployment.check_recovered()
