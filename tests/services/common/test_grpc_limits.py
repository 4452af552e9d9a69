"""Limits of a public gRPC port: connections, idle time, calls, and requests that do not arrive."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from services.common import grpc_limits
from services.common.clients import split_grpc_peer
from services.common.grpc_limits import ServerLimits
from services.common.grpc_server import GrpcServer

LIMITS = ServerLimits(
    max_message_bytes=1 << 20,
    max_connections=100,
    max_calls=1,
    max_client_calls=100,
    client_of=lambda context: split_grpc_peer(context.peer()) or "",
    owner_of=lambda context: split_grpc_peer(context.peer()) or "",
    idle_s=60.0,
    request_timeout_s=30.0,
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and SETTINGS
ECHO, CHECK_METHOD = "/test.Echo/Echo", "/grpc.health.v1.Health/Check"
CHECK = health_pb2.HealthCheckRequest()


@asynccontextmanager
async def serving(**changes: Any) -> AsyncIterator[tuple[GrpcServer, aio.Channel]]:
    """Serve ``/test.Echo/Echo``, which answers after a request ``wait`` only when cancelled."""

    async def echo(request: bytes, context: Any) -> bytes:
        if request == b"wait":
            await context.send_initial_metadata(())  # the client then knows that the call has begun
            await asyncio.Event().wait()
        return request

    server = GrpcServer("127.0.0.1:0", ["test.Echo"], limits=replace(LIMITS, **changes))
    method: Any = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", method),)
    )
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, channel
    finally:
        await server.stop(0)


def other_channel(server: GrpcServer) -> aio.Channel:
    """Return a channel with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return aio.insecure_channel(f"127.0.0.1:{server.port}", options=options)


def named(context: Any) -> str:
    """Return the owner in the metadata of a call."""
    return str(dict(context.invocation_metadata() or ()).get("owner", ""))


async def echo(channel: aio.Channel, request: bytes = b"x", owner: str = "") -> bytes:
    method: Any = channel.unary_unary(ECHO)
    answer: bytes = await method(request, timeout=10, metadata=(("owner", owner),))
    return answer


async def open_silent(channel: aio.Channel, method: str = ECHO, owner: str = "") -> Any:
    """Open a call without sending its request."""
    call: Any = channel.stream_unary(method)(metadata=(("owner", owner),))
    await call.wait_for_connection()
    return call


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    code: grpc.StatusCode = caught.value.code()
    return code


def watch(channel: aio.Channel) -> Any:
    return HealthStub(channel).Watch(CHECK)


def reflect(channel: aio.Channel) -> Any:
    return ServerReflectionStub(channel).ServerReflectionInfo()


async def first_done(calls: list[Any]) -> Any:
    """Return the first call that ends; the others remain open."""
    async with asyncio.timeout(30):
        while not any(call.done() for call in calls):  # noqa: ASYNC110 - a call has no event
            await asyncio.sleep(0.01)
    return next(call for call in calls if call.done())


@pytest.mark.parametrize("open_stream", [watch, reflect])
async def test_open_streams_do_not_use_up_calls(open_stream: Callable[..., Any]) -> None:
    async with serving(max_calls=100) as (_, channel):
        streams = [open_stream(channel) for _ in range(grpc_limits._MAX_OPEN_STREAMS)]
        streams.append(open_stream(channel))
        refused = await first_done(streams)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert sum(stream.done() for stream in streams) == 1
        assert (await HealthStub(channel).Check(CHECK)).status
        assert await echo(channel) == b"x"


async def test_open_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_limits, "_OPEN_STREAM_S", 0.2)
    async with serving() as (_, channel):
        stream = watch(channel)
        assert (await stream.read()).status
        async with asyncio.timeout(30):
            assert await code_of(stream.read()) is grpc.StatusCode.UNAVAILABLE


async def test_calls_above_the_limit_are_rejected() -> None:
    async with serving() as (server, channel), other_channel(server) as other:
        # gRPC passes on the initial metadata of a unary call only with its response.
        method: Any = channel.unary_stream("/test.Echo/Echo")
        waiting = method(b"wait", timeout=60)
        await waiting.initial_metadata()
        assert await code_of(echo(other)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await HealthStub(other).Check(CHECK)).status
        waiting.cancel()
        async with asyncio.timeout(30):
            while True:
                with suppress(aio.AioRpcError):  # until the server has seen the cancellation
                    assert await echo(other) == b"x"
                    break
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("method", [ECHO, CHECK_METHOD])
async def test_call_without_a_request_ends(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(grpc_limits, "_CHECK_TIMEOUT_S", 2.0)
    async with serving(request_timeout_s=2.0) as (server, channel), other_channel(server) as other:
        silent = await open_silent(channel, method)
        async with asyncio.timeout(20):
            assert await code_of(silent) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await echo(other) == b"x"


async def test_silent_calls_of_all_slots_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_limits, "_MAX_ARRIVING", 2)
    monkeypatch.setattr(grpc_limits, "_MAX_ARRIVING_OF_OWNER", 1)
    async with serving(max_calls=100, owner_of=named) as (_, channel):
        silent = [await open_silent(channel, owner=owner) for owner in "aabb"]
        assert await echo(channel) == b"x"
        assert await echo(channel, owner="a") == b"x"
        assert (await HealthStub(channel).Check(CHECK)).status
        for call in silent:
            call.cancel()


async def test_slow_request_of_an_owner_with_few_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_limits, "_MAX_ARRIVING", 3)
    monkeypatch.setattr(grpc_limits, "_MAX_ARRIVING_OF_OWNER", 2)
    monkeypatch.setattr(grpc_limits, "_SLOT_S", 0.1)
    async with serving(max_calls=100, owner_of=named) as (_, channel):
        slow = await open_silent(channel, owner="slow")
        flood = [await open_silent(channel, owner="flood") for _ in range(2)]
        for _ in range(2):
            assert await echo(channel) == b"x"
        ended = await first_done(flood)
        assert await ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert sum(call.done() for call in flood) == 1
        await slow.write(b"late")
        await slow.done_writing()
        assert await slow == b"late"


async def test_silent_checks_do_not_block_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_limits, "_MAX_CHECKS", 2, raising=False)
    monkeypatch.setattr(grpc_limits, "_MAX_ARRIVING", 2)
    async with serving() as (_, channel):
        silent = [await open_silent(channel, CHECK_METHOD) for _ in range(3)]
        assert (await HealthStub(channel).Check(CHECK, timeout=10)).status
        assert await code_of(silent[0]) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not silent[2].done()


@pytest.mark.parametrize("greeting", [b"", PREFACE], ids=["silent", "idle"])
async def test_unused_connection_is_closed(greeting: bytes) -> None:
    async with serving(idle_s=0.5, request_timeout_s=0.5) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(greeting)
        async with asyncio.timeout(10):
            await reader.read()  # until the server closes the connection
        writer.close()


async def test_connections_above_the_limit_are_closed() -> None:
    async with serving(max_connections=2) as (server, _), AsyncExitStack() as stack:
        opened = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            stack.callback(writer.close)
            writer.write(PREFACE)
            opened.append(asyncio.create_task(reader.read()))
            await asyncio.sleep(0.2)
        done, _ = await asyncio.wait(opened, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert done == {opened[2]}
        for reading in opened:
            reading.cancel()
        await asyncio.gather(*opened, return_exceptions=True)
