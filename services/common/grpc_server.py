"""gRPC servers and channels of the services: authentication, size limits, health, reflection."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_reflection.v1alpha import reflection

from services.common.cluster_token import TokenCheck
from services.common.errors import SettingsError
from services.common.grpc_limits import OPEN_SERVICES, CallLimiter, Handler, ServerLimits
from services.common.tls import MutualTls

M = TypeVar("M", bound=Message)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Size above which a receiver ends the call, and with it all streams of a session."""
MAX_BATCH_BYTES = 1024 * 1024
"""Size up to which a sender adds items to a message."""
MAX_ITEM_BYTES = MAX_MESSAGE_BYTES - 2 * MAX_BATCH_BYTES
"""Largest item that a sender may put into a message, alone or as the last one of a batch."""

PING_TIMEOUT_S = 1.5
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),
]
_SERVER_OPTIONS = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.http2.ping_timeout_ms": 5_000,
    "grpc.http2.min_ping_interval_without_data_ms": 250,
}


MessageStream = Any
"""Either side of a bidirectional call. The type stubs lack ``read`` and ``EOF``."""


class TokenInterceptor(aio.ServerInterceptor):
    """Reject calls without the cluster token. Health and reflection need no token."""

    def __init__(self, check: TokenCheck) -> None:
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        is_open = handler_call_details.method.startswith(OPEN_SERVICES)
        if is_open or self._check.accepts(given) or handler is None:  # None: an unknown method
            return handler
        # Aborts calls of all kinds of methods, before their request has arrived.
        return grpc.stream_stream_rpc_method_handler(_abort)


async def _abort(_requests: object, context: aio.ServicerContext[object, object]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")


class GrpcServer:
    """A listening gRPC server with health and reflection.

    Args:
        address: ``host:port``; port 0 selects a free port.
        services: full names of the services, for health and reflection.
        token_check: check of the cluster token, or None for a server that requires none.
        tls: certificates for mutual TLS, or None for a server without it.
        limits: limits of a public port, or None for a port between services.
        reuse_port: see `services.common.http_server.listen`.
        interceptors: called before the limits apply. Calls that they reject do not count towards
            any limit.

    Attributes:
        port: TCP port that the server listens on.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[str],
        *,
        token_check: TokenCheck | None = None,
        tls: MutualTls | None = None,
        limits: ServerLimits | None = None,
        reuse_port: bool = False,
        interceptors: Sequence[aio.ServerInterceptor] = (),
    ) -> None:
        chain = [*([TokenInterceptor(token_check)] if token_check else []), *interceptors]
        options = {**dict(_OPTIONS), **_SERVER_OPTIONS, "grpc.so_reuseport": int(reuse_port)}
        if limits is not None:
            chain.append(CallLimiter(limits))
            options |= dict(limits.options)
        self.server = aio.server(options=list(options.items()), interceptors=chain)
        try:
            self.port = (
                self.server.add_secure_port(address, tls.server_credentials())
                if tls
                else self.server.add_insecure_port(address)
            )
        except RuntimeError as error:  # grpc writes the reason to its own log only
            raise SettingsError(
                f"cannot listen on {address} for gRPC: "
                "the port is in use, or the address does not belong to this machine"
            ) from error
        self._services = tuple(services)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            (*services, HEALTH_SERVICE, reflection.SERVICE_NAME), self.server
        )

    async def start(self) -> None:
        """Start serving. Health reports NOT_SERVING until ``set_serving(True)``."""
        await self.set_serving(False)
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        """Set the readiness that ``grpc.health.v1`` reports for every service."""
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serving else states.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, state)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and cancel calls that still run after ``grace_s`` seconds."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def open_channel(
    address: str, tls: MutualTls | None = None, *, ping_timeout_s: float = PING_TIMEOUT_S
) -> aio.Channel:
    """Open a channel to another Headrace service, with mutual TLS if there are certificates.

    After 0.5 s without data it sends a ping. A peer that does not answer within ``ping_timeout_s``
    is stopped or cut off, and its calls end with UNAVAILABLE. gRPC's own threads answer pings, so
    that a busy event loop does not delay them.
    """
    timeout_ms = round(1_000 * ping_timeout_s)
    options = [
        *_OPTIONS,
        ("grpc.keepalive_time_ms", 500),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # a minute by default
    ]
    if tls is None:
        return aio.insecure_channel(address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return aio.secure_channel(address, tls.channel_credentials(), options=options)


def credentials(token: str | None) -> list[tuple[str, str]]:
    """Return the call metadata that carries the cluster token."""
    return [("authorization", f"Bearer {token}")] if token else []


async def next_message(stream: MessageStream) -> Any | None:
    """Return the next message of a bidirectional call, or None at its end.

    A message that cannot be decoded ends the call: a server answers INVALID_ARGUMENT, and on a
    client, gRPC returns None.
    """
    try:
        message = await stream.read()
    except DecodeError:
        await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, "a message cannot be decoded")
    return None if message is aio.EOF else message


async def next_batch(queue: "asyncio.Queue[M]") -> list[M]:
    """Wait for a message; return it and others that are queued, in order.

    At most one message is added after `MAX_BATCH_BYTES`, so that they fit into one message if none
    is larger than `MAX_ITEM_BYTES`.
    """
    items = [await queue.get()]
    size = items[0].ByteSize()
    while not queue.empty() and size < MAX_BATCH_BYTES:
        items.append(queue.get_nowait())
        size += items[-1].ByteSize()
    return items
