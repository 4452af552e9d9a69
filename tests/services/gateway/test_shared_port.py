"""Two gateways on one address, as `headrace up --gateways 2` starts them."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest

from tests.ports import free_ports

pytestmark = pytest.mark.slow

CONNECTIONS = 24  # all to one of two gateways: once in 2^23 runs
START_S = 60.0


@contextmanager
def gateway(port: int, grpc_port: int, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    ports = ("--port", str(port), "--grpc-port", str(grpc_port))
    command = [sys.executable, "-m", "services.cli", "gateway", *ports, *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def listens(process: "subprocess.Popen[bytes]", *ports: int) -> bool:
    connections = psutil.Process(process.pid).net_connections(kind="tcp")
    open_ports = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return open_ports >= {*ports}


def connections(process: "subprocess.Popen[bytes]", port: int) -> int:
    found = psutil.Process(process.pid).net_connections(kind="tcp")
    return sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in found)


async def test_gateways_share_connections_and_one_takes_over_when_the_other_drains() -> None:
    port, grpc_port = free_ports(2)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(gateway(port, grpc_port, "--reuse-port")) for _ in range(2)
        )
        async with asyncio.timeout(START_S):
            while not all(listens(each, port, grpc_port) for each in (first, second)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        url = f"http://127.0.0.1:{port}/version"
        limits = httpx.Limits(max_keepalive_connections=CONNECTIONS)
        async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=30) as client:
            answers = await asyncio.gather(*(client.get(url) for _ in range(CONNECTIONS)))
            assert {answer.status_code for answer in answers} == {200}
            assert connections(first, port) > 0
            assert connections(second, port) > 0
        first.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            while first.poll() is None and listens(first, port):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for _ in range(CONNECTIONS):
            async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
                assert (await client.get(url)).status_code == 200


def test_port_is_not_shared_unless_both_gateways_do() -> None:
    port, grpc_port = free_ports(2)
    with gateway(port, grpc_port) as first:
        while not listens(first, port, grpc_port):
            assert first.poll() is None
            time.sleep(0.1)
        with gateway(port, grpc_port, "--reuse-port") as second:
            assert second.wait(START_S) == 2
