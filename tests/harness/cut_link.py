"""Tests that `tests.faults.test_cut_link` runs in a network namespace.

Rules of the kernel's routing drop the packets between two workers. All other connections live.
"""

import asyncio
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from tests.harness.trial import Trial, trial


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    with trial(tmp_path_factory.mktemp("points"), "--prefill", "2") as running:
        yield running


def cut(deployment: Trial, prefill: str, decode: str) -> None:
    """Drop the packets of all connections between two workers, and of new ones to the first."""
    pids = deployment.running.state.pids
    connections = {
        name: psutil.Process(pids[name]).net_connections("tcp") for name in (prefill, decode)
    }
    metrics = deployment.running.records(prefill, "ready")[-1]["metrics_port"]
    theirs = {c.laddr.port for c in connections[decode]}
    ports = {
        c.laddr.port
        for c in connections[prefill]
        if c.status == psutil.CONN_LISTEN or (c.raddr and c.raddr.port in theirs)
    }
    for port in ports - {metrics}:
        for side in ("sport", "dport"):
            rule = f"ip rule add pref 5 ipproto tcp {side} {port} blackhole"
            subprocess.run(rule.split(), check=True)


def heal() -> None:
    while subprocess.run(["ip", "rule", "del", "pref", "5"], capture_output=True).returncode == 0:
        pass


async def test_link_cut_during_a_read(deployment: Trial) -> None:
    """The request continues on the other prefill worker, and the first one serves again later."""
    deployment.points.hold("pull", deployment.workers("decode"))
    async with deployment.client() as client:
        reply = client.ask(deployment.long)
        await deployment.points.reached("pull")
        victim = deployment.busy("prefill")
        cut(deployment, victim, "decode-0")
        try:
            deployment.points.release()
            await reply.check()
            assert deployment.failovers() > 0
            later = [client.ask(deployment.short) for _ in range(4)]
            for reply in later:
                await reply.check()
        finally:
            heal()
    await deployment.check_recovered()


async def test_link_cut_while_idle(deployment: Trial) -> None:
    cut(deployment, "prefill-0", "decode-0")
    try:
        async with deployment.client() as client:
            replies = [client.ask(deployment.long) for _ in range(6)]
            for reply in replies:
                await reply.check()
    finally:
        heal()
    await asyncio.sleep(1)
    await deployment.check_recovered()
