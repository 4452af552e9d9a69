"""gRPC servers: limits that apply before a handler runs, the error for a used port, batching."""

import asyncio
import socket
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from services.common.cluster_token import TokenCheck
from services.common.errors import SettingsError
from services.common.grpc_server import GrpcServer, next_batch
from tests.services.common.test_grpc_limits import LIMITS


async def code_of(call: aio.UnaryUnaryCall[object, object]) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_message_above_the_size_limit_is_rejected() -> None:
    server = GrpcServer("127.0.0.1:0", [], limits=replace(LIMITS, max_message_bytes=1000))
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = HealthStub(channel)
            long = health_pb2.HealthCheckRequest(service="x" * 1000)
            assert await code_of(stub.Check(long)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            short = health_pb2.HealthCheckRequest(service="x" * 900)
            assert await code_of(stub.Check(short)) is grpc.StatusCode.NOT_FOUND
    finally:
        await server.stop(0)


async def test_unknown_method_without_the_token_is_unimplemented() -> None:
    server = GrpcServer("127.0.0.1:0", [], token_check=TokenCheck("secret"))
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            method: Any = channel.unary_unary("/headrace.v1.Decode/Session")
            assert await code_of(method(b"")) is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)


async def test_port_in_use_is_a_settings_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingsError, match=f"cannot listen on {address} for gRPC"):
            GrpcServer(address, [])


async def test_queued_messages_are_batched_in_order_up_to_a_size() -> None:
    queue: asyncio.Queue[health_pb2.HealthCheckRequest] = asyncio.Queue()
    sent = [health_pb2.HealthCheckRequest(service=str(n) + "x" * 400_000) for n in range(5)]
    for message in sent:
        queue.put_nowait(message)
    batches = []
    while not queue.empty():
        batches.append(await next_batch(queue))
    assert [message for batch in batches for message in batch] == sent
    assert [len(batch) for batch in batches] == [3, 2]
