"""Workers of another version or KV format, other clocks, and steps of the wall clock."""

import asyncio
import subprocess

import pytest

from tests.harness.reference import cases
from tests.harness.trial import Trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

OTHER_VERSION = {"HEADRACE_FAULT_CODEC_VERSION": "999"}
OTHER_CLOCK = ("unshare", "--user", "--map-root-user", "--time", "--monotonic", "1000000",
               "--fork", "--kill-child=SIGTERM")  # fmt: skip
"""Runs a process in a time namespace, whose monotonic clock is 1,000,000 s ahead."""
HOUR_S = 3600


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        pytest.param(("--kv-format", "int4", "--codec", "raw"), {}, marks=pytest.mark.campaign),
        ((), OTHER_VERSION),
    ],
    ids=["format", "version"],
)
async def test_prefill_worker_that_does_not_fit_gets_no_requests(
    deployment: Trial, flags: tuple[str, ...], environment: dict[str, str]
) -> None:
    running = deployment.running
    failovers = deployment.failovers()
    with deployment.extra_worker("prefill-0", "other", *flags, environment=environment):
        await asyncio.to_thread(running.wait_for_new_epoch, "other", None, "unmatched")
        async with deployment.client() as client:
            for _ in range(4):
                replies = [client.ask(deployment.long), client.ask(deployment.short)]
                for reply in replies:
                    await reply.check()
        assert running.metric("other", "headrace_worker_generation_tokens_total") == 0
        assert deployment.failovers() == failovers
    await deployment.check_recovered()


async def test_wall_clock_steps_during_streams(deployment: Trial) -> None:
    """The wall clocks of all processes step by hours, forwards and backwards."""
    expired = deployment.sum_of("prefill", "headrace_kv_lease_expired_total")
    failovers = deployment.failovers()
    async with deployment.client() as client:
        for step in (HOUR_S, -24 * HOUR_S, 0):
            deployment.points.hold("computing", deployment.workers("decode"), after=3)
            replies = [client.ask(deployment.stream), client.ask(deployment.long)]
            await deployment.points.reached("computing")
            deployment.points.set("clock", str(step))
            deployment.points.release()
            for reply in replies:
                await reply.check()
    assert deployment.failovers() == failovers
    assert deployment.sum_of("prefill", "headrace_kv_lease_expired_total") == expired
    await deployment.check_recovered()


def has_time_namespaces() -> bool:
    try:
        return subprocess.run([*OTHER_CLOCK, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.campaign
@pytest.mark.skipif(not has_time_namespaces(), reason="this system has no time namespaces")
async def test_worker_with_another_monotonic_clock(deployment: Trial) -> None:
    running = deployment.running
    failovers = deployment.failovers()
    with deployment.extra_worker("prefill-0", "other-clock", wrapper=OTHER_CLOCK):
        await asyncio.to_thread(running.wait_for_new_epoch, "other-clock", None)
        async with deployment.client() as client:
            for number in range(4):  # other prompts, because their KV is not cached elsewhere
                replies = [client.ask(case) for case in cases(f"clock {number}", 4, 600, 12)]
                for reply in replies:
                    await reply.check()
        assert running.metric("other-clock", "headrace_worker_generation_tokens_total") > 0
        assert running.metric("other-clock", "headrace_kv_lease_expired_total") == 0
    assert deployment.failovers() == failovers
    await deployment.check_recovered()
