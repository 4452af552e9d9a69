"""Channels between services: a stopped peer is detected, an idle one keeps its connection."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from services.common.grpc_server import GrpcServer, MessageStream, open_channel

pytestmark = pytest.mark.slow

DETECTED_S = 10.0  # detection takes 2 s; the keepalive of servers alone would take 15 s


async def serve() -> None:
    server = GrpcServer("127.0.0.1:0", [])
    await server.start()
    print(server.port, flush=True)  # noqa: T201
    await server.server.wait_for_termination()


@pytest.fixture
def peer() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.services.common.test_stopped_peer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def watched(channel: aio.Channel) -> MessageStream:
    """Open a stream that stays open, and return it after its first message."""
    stream: MessageStream = HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    async with asyncio.timeout(DETECTED_S):
        await stream.read()
    return stream


async def test_streams_of_a_stopped_peer_end(peer: "subprocess.Popen[str]") -> None:
    assert peer.stdout is not None
    port = await asyncio.to_thread(peer.stdout.readline)
    async with open_channel(f"127.0.0.1:{port.strip()}") as channel:
        stream = await watched(channel)
        peer.send_signal(signal.SIGSTOP)
        with pytest.raises(aio.AioRpcError) as lost:
            async with asyncio.timeout(DETECTED_S):
                await stream.read()
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_ping_timeout_is_the_time_to_answer(peer: "subprocess.Popen[str]") -> None:
    assert peer.stdout is not None
    port = await asyncio.to_thread(peer.stdout.readline)
    async with open_channel(f"127.0.0.1:{port.strip()}", ping_timeout_s=60) as channel:
        stream = await watched(channel)
        peer.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4.0):
                await stream.read()


async def test_idle_streams_of_a_live_peer_stay_open(peer: "subprocess.Popen[str]") -> None:
    """The peer answers several pings without closing the connection for their number."""
    assert peer.stdout is not None
    port = await asyncio.to_thread(peer.stdout.readline)
    async with open_channel(f"127.0.0.1:{port.strip()}", ping_timeout_s=60) as channel:
        stream = await watched(channel)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4.0):
                await stream.read()


if __name__ == "__main__":
    asyncio.run(serve())
