"""A prefill and a decode worker with their gRPC ports, and raw calls to these."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from grpc import aio

from headrace.v1 import decode_pb2_grpc
from services.common.cluster_token import TokenCheck
from services.common.grpc_server import GrpcServer, open_channel
from services.worker.stream_service import SERVICE
from tests.programs.fuzzing.ports.base import Wrong
from tests.services.workers import LIMIT_S, Decode, Prefill, Site, open_stream, output_of, until

TOKEN = "token-of-the-cluster"
START_S = 120.0  # the first request in a new environment compiles kernels
PROMPT = 100
"""Prompt tokens of an ordinary request: several chunks and segments."""
TYPED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,  # by the client
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,  # the connection was closed
}
REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.CANCELLED,  # by the client
    grpc.StatusCode.ABORTED,
}
_PACE_S = 5e-4
"""Pause after each message, in seconds, so that few are sent after a worker has ended a session."""
_LOST = "Internal error from Core"  # replaces the status of a call that ends during a write


@dataclass
class Workers:
    """Two workers over a tiny model, and the tokens that they generate for an ordinary request."""

    prefill: Prefill
    decode: Decode
    decode_port: int
    reference: list[int] = field(default_factory=list)
    _numbers: int = 0

    @classmethod
    @asynccontextmanager
    async def opened(cls, **changes: Any) -> AsyncIterator[Self]:
        """Start the workers, which need `TOKEN`."""
        site = Site()
        prefill = await site.prefill(cluster_token=TOKEN, **changes)
        decode = await site.decode(cluster_token=TOKEN, colocated=True, **changes)
        server = GrpcServer("127.0.0.1:0", [SERVICE], token_check=TokenCheck(TOKEN))
        decode_pb2_grpc.add_DecodeServicer_to_server(decode.worker.service, server.server)
        await server.start()
        workers = cls(prefill, decode, server.port)
        try:
            workers.reference = await workers.tokens(limit_s=START_S)
            yield workers
        finally:
            await server.stop(0)
            await site.close()

    async def tokens(self, limit_s: float = LIMIT_S) -> list[int]:
        """Return the tokens of an ordinary request."""
        self._numbers += 1
        stream = open_stream(self.decode, self.prefill, self._numbers, PROMPT)
        async with asyncio.timeout(limit_s):
            while stream.session.streams:  # noqa: ASYNC110 - the stream has no event
                await asyncio.sleep(0.005)
        output = output_of(stream.session)
        if output.HasField("error"):
            raise Wrong(f"an ordinary request failed: {output.error}")
        return [token.token for token in output.tokens]

    async def check(self) -> None:
        """Check an ordinary request, and that both workers are alive and hold nothing."""
        prefill, decode = self.prefill.worker, self.decode.worker
        for worker in (prefill, decode):
            if worker.fault.done():
                worker.fault.result()
        assert await self.tokens() == self.reference
        await until(lambda: prefill.idle and decode.idle)
        await until(lambda: not prefill.sender.active and not prefill.sender.slots_in_use)
        for engine in (prefill.engine, decode.engine):
            await until(lambda engine=engine: engine.load.pages_free == engine.pages_total)  # type: ignore[misc]
        landing = decode.receiver.landing[0]
        await until(lambda: (landing.held, landing.quarantined) == (0, 0))
        prefill.observe()
        assert self.prefill.metric("headrace_kv_lease_active") == 0


class RawCall:
    """A bidirectional call whose messages are bytes. Answers are collected."""

    def __init__(self, channel: aio.Channel, method: str, token: str | None = TOKEN) -> None:
        metadata = [("authorization", f"Bearer {token}")] if token is not None else []
        self._call: Any = channel.stream_stream(method)(metadata=metadata)
        self.answers: list[bytes] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with suppress(aio.AioRpcError, asyncio.CancelledError):
            while (answer := await self._call.read()) is not aio.EOF:
                self.answers.append(answer)

    async def write(self, message: bytes) -> bool:
        """Send a message; return False if the call has ended."""
        try:
            await self._call.write(message)
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return False
        await asyncio.sleep(_PACE_S)
        return not self._call.done()

    async def end(self, *, cancel: bool) -> grpc.StatusCode:
        """End the call and return its status; ABORTED if it ended during a write.

        Raises:
            Wrong: the status is not typed.
        """
        if cancel:
            self._call.cancel()
        else:
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.done_writing()
        await self._reading
        status: grpc.StatusCode = await self._call.code()
        details = await self._call.details()
        if details == _LOST:
            return grpc.StatusCode.ABORTED
        if status not in TYPED:
            raise Wrong(f"the call ended with {status}: {details}")
        return status


@asynccontextmanager
async def channel_to(port: int) -> AsyncIterator[aio.Channel]:
    """Open a channel to a port of this machine."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel


Action = Callable[[], Awaitable[None]]
