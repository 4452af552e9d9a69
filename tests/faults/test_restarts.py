"""Restarts: a prefill worker many times under one name and port, and SIGTERM with unread KV."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.harness.reference import cases
from tests.harness.trial import Trial, trial
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

RESTARTS = int(os.environ.get("FAULT_RESTARTS", "2"))
"""Number of restarts; `make faults` sets 50."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    environment = {"HEADRACE_PREFILL_LEASE_S": "30"}
    with trial(
        tmp_path_factory.mktemp("points"), "--prefill", "2", environment=environment
    ) as running:
        yield running


async def test_drained_prefill_worker_waits_until_its_kv_is_read(deployment: Trial) -> None:
    deployment.points.hold("pull", deployment.workers("decode"))
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        await deployment.points.reached("pull")
        victim = deployment.busy("prefill")
        deployment.signal(victim, signal.SIGTERM)
        async with asyncio.timeout(25):
            while deployment.running.workers()[victim]["state"] != "draining":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        deployment.points.release()
        await reply.check()
    assert deployment.failovers() == 0, "the KV was not read from the draining worker"
    await deployment.check_recovered(victim)


async def test_prefill_worker_restarted_under_one_name_and_port(deployment: Trial) -> None:
    """Each epoch serves, and ends with a request in progress, by SIGKILL or SIGTERM in turn.

    Its cache is empty. It gets prompts because no other worker has them.
    """
    port = free_port()
    epochs: list[object] = [None]
    for number in range(RESTARTS):
        last = (signal.SIGKILL, signal.SIGTERM)[number % 2]
        with deployment.extra_worker("prefill-0", "prefill-x", "--port", str(port)) as worker:
            running = deployment.running
            await asyncio.to_thread(running.wait_for_new_epoch, "prefill-x", epochs[-1])
            epochs.append(running.workers()["prefill-x"]["epoch"])
            deployment.points.hold("computing", ["prefill-x"])
            async with deployment.client() as client:
                replies = [client.ask(case) for case in cases(f"restart {number}", 6, 600, 12)]
                assert await deployment.points.reached("computing") == "prefill-x"
                worker.send_signal(last)
                deployment.points.release()
                for reply in replies:
                    await reply.check()
    assert len(set(epochs)) == RESTARTS + 1
    await deployment.check_recovered()
