"""Only the link between a prefill and a decode worker is cut.

The deployment runs in a network namespace. Rules of the kernel's routing drop the packets between
the two workers, and those of all other connections pass.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.faults.trial import Trial, trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")
INSIDE = "HEADRACE_FAULT_NAMESPACE"
SET_UP = (
    "ip link set lo up",
    "ip rule add pref 10 lookup local",  # so that other rules can come before it
    "ip rule del pref 0 lookup local",
)


def has_network_namespaces() -> bool:
    try:
        done = subprocess.run([*NAMESPACE, "ip", "link", "set", "lo", "up"], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(INSIDE in os.environ, reason="runs outside of the namespace")
@pytest.mark.skipif(not has_network_namespaces(), reason="this system has no network namespaces")
def test_in_a_network_namespace() -> None:
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", f'{" && ".join(SET_UP)} && exec "$@"', "sh", *tests],
        env={**os.environ, INSIDE: "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


inside = pytest.mark.skipif(INSIDE not in os.environ, reason="runs in a network namespace")


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


@inside
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


@inside
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
