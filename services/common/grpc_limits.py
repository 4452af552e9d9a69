"""Limits of a public gRPC port, on connections, calls and the memory of arriving messages."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from services.common.client_limit import ClientLimit
from services.common.errors import Overloaded, detached
from services.common.fair_slots import FairSlots

_CHECK = "/grpc.health.v1.Health/Check"
OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Prefixes of the methods of health and reflection, which need no credentials."""
_MAX_ARRIVING = 32
"""Maximum number of requests that are received at the same time."""
_MAX_ARRIVING_OF_OWNER = 16
_MAX_CHECKS = 64
"""Maximum number of requests of Health/Check that are received at the same time."""
_SLOT_S = 1.0
"""Time in seconds after which a request that has not arrived ends, if another one waits."""
_CHECK_TIMEOUT_S = 5.0
"""Maximum time in seconds until the request of Health/Check has arrived."""
_MAX_OPEN_STREAMS = 64
"""Maximum number of concurrent streams of health and reflection, which need no key."""
_MIN_PING_INTERVAL_MS = 5_000
"""A client that sends pings at shorter intervals is disconnected."""
_OPEN_STREAM_S = 600.0
"""Time in seconds after which a stream of health or reflection ends. Clients open a new one."""

Handler = Any
"""`grpc.RpcMethodHandler`, which is generic in the type stubs only."""
Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one port.

    Attributes:
        max_message_bytes: size above which a message is rejected before it is parsed.
        max_connections: number above which connections are closed at once.
        max_calls: maximum concurrent calls, without those of health and reflection.
        max_client_calls: maximum of these calls for one client.
        client_of: function that returns the name of the client of a call.
        owner_of: function that returns the owner of a call, such as a tenant. Calls that wait until
            their request may be received are served fairly among owners.
        idle_s: time after which a connection without calls is closed, seconds.
        request_timeout_s: maximum time until a connection is set up, and until the request of a
            call has arrived (except `_CHECK_TIMEOUT_S` for ``Health/Check``), seconds.
    """

    max_message_bytes: int
    max_connections: int
    max_calls: int
    max_client_calls: int
    client_of: Callable[[Context], str]
    owner_of: Callable[[Context], str]
    idle_s: float
    request_timeout_s: float

    @property
    def options(self) -> list[tuple[str, int]]:
        """The limits that gRPC enforces, as channel arguments."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            # One client may use all calls, and watch health or use reflection beside them.
            ("grpc.max_concurrent_streams", self.max_calls + 2 * _MAX_OPEN_STREAMS),
            # A call gets memory for more than the initial window only once it is being received.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.max_connection_idle_ms", int(self.idle_s * 1000)),
            ("grpc.server_handshake_timeout_ms", int(self.request_timeout_s * 1000)),
        ]


class CallLimiter(aio.ServerInterceptor):
    """Bounds concurrent calls, and the time until the request of a call arrives.

    Only `_MAX_ARRIVING` requests are received at the same time, in an order that is fair among
    owners. This bounds the memory for incomplete messages, whose size is not known yet. gRPC does
    not tell whether a part of a message has arrived. A call that sends nothing thus counts as well,
    but cannot block others: while calls wait, a call whose request has not arrived within `_SLOT_S`
    ends. It is chosen from the owner with the most requests that are being received.

    Health and reflection need no key, so their calls must not use up the limits of other calls.
    Their streams have separate limits on number and duration, and their requests do not wait for
    other requests. ``Health/Check`` has no maximum number and never waits, since probes must not
    fail because of other clients. If `_MAX_CHECKS` of its requests are being received, the oldest
    one ends. This does not affect probes, whose requests arrive with their calls.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._calls = ClientLimit(limits.max_calls, limits.max_client_calls)
        self._open_streams = ClientLimit(_MAX_OPEN_STREAMS, _MAX_OPEN_STREAMS)
        self._arriving, self._arriving_open = (
            FairSlots(
                _MAX_ARRIVING, per_tenant=_MAX_ARRIVING_OF_OWNER, max_waiting=limits.max_calls
            )
            for _ in range(2)
        )
        # The timeouts of the health checks that are being received.
        self._checks: deque[asyncio.Timeout] = deque()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:  # unknown method
            return None
        if method == _CHECK:
            return self._bounded(handler, None, None)
        if method.startswith(OPEN_SERVICES):
            return self._bounded(handler, self._open_streams, _OPEN_STREAM_S)
        return self._bounded(handler, self._calls, None)

    def _bounded(
        self, handler: Handler, counter: ClientLimit | None, duration_s: float | None
    ) -> Handler:
        """Return a handler with limits. It is called before the request has arrived."""

        async def call(requests: Any, context: Context) -> Any:
            client = self._limits.client_of(context)
            if counter is not None and not counter.take(client):
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, "there are too many concurrent calls"
                )
            try:
                if handler.request_streaming:
                    request = requests
                elif counter is None:
                    request = await self._receive_check(requests)
                elif counter is self._open_streams:
                    request = await self._receive(requests, client, self._arriving_open)
                else:
                    owner = self._limits.owner_of(context)
                    request = await self._receive(requests, owner, self._arriving)
                async with asyncio.timeout(duration_s):
                    return await _answer(handler, request, context)
            except aio.AbortError as error:
                request = None
                raise detached(error) from None  # gRPC stores it in the call
            except DecodeError:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be decoded"
                )
            except Overloaded as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
            except _NoRequest as error:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
            except TimeoutError:
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    f"the server ended this stream after {duration_s:g} s; open it again",
                )
            finally:
                if counter is not None:
                    counter.release(client)

        wrap = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return wrap(call, handler.request_deserializer, handler.response_serializer)

    async def _receive(self, requests: Any, owner: str, arriving: FairSlots) -> Any:
        """Return the request of a call when it has arrived."""
        try:
            async with asyncio.timeout(self._limits.request_timeout_s), arriving.hold(owner):
                request = asyncio.ensure_future(_first(requests))
                try:
                    while not (await asyncio.wait([request], timeout=_SLOT_S))[0]:
                        if arriving.is_wanted(owner):
                            raise _NoRequest
                    return request.result()
                finally:
                    request.cancel()
                    del request  # an error in it would form a reference cycle with this frame
        except TimeoutError:
            raise _NoRequest from None

    async def _receive_check(self, requests: Any) -> Any:
        if len(self._checks) >= _MAX_CHECKS:
            oldest = self._checks.popleft()
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S) as timeout:
                self._checks.append(timeout)
                try:
                    return await _first(requests)
                finally:
                    with suppress(ValueError):  # a later check has removed it
                        self._checks.remove(timeout)
        except TimeoutError:
            raise _NoRequest from None


class _NoRequest(Exception):
    def __init__(self) -> None:
        super().__init__("the request of the call did not arrive")


async def _first(requests: Any) -> Any:
    try:
        return await anext(requests)
    except StopAsyncIteration:
        raise _NoRequest from None


async def _answer(handler: Handler, request: Any, context: Context) -> Any:
    """Call the method; write its messages if it is an asynchronous generator."""
    kind = ("unary", "stream")
    name = f"{kind[handler.request_streaming]}_{kind[handler.response_streaming]}"
    result = getattr(handler, name)(request, context)
    if not hasattr(result, "__aiter__"):
        return await result
    async for message in result:
        await context.write(message)
    return None
