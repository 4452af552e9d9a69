"""Connections to encoder workers: one channel for each epoch of a worker, opened on first use."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import structlog
from grpc import aio

from headrace.v1 import encode_pb2, encode_pb2_grpc, error_pb2
from services.common.grpc_server import credentials, open_channel
from services.common.placement import WorkerAddress
from services.gateway.sessions import connected
from services.gateway.settings import GatewaySettings
from services.gateway.worker_failure import WorkerFailure

log = structlog.get_logger()

_IDLE_S = 60.0
"""Time without calls after which a channel is closed, seconds."""


@dataclass(eq=False)
class _Link:
    channel: aio.Channel
    calls: int = 0
    used_at: float = field(default_factory=time.monotonic)
    lost: bool = False


class EncoderLinks:
    """Channels of one gateway to encoder workers.

    A channel is closed after its last call if the call failed, or if it was unused for a while: the
    worker may have ended.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._links: dict[WorkerAddress, _Link] = {}

    async def encode(
        self, worker: WorkerAddress, request: encode_pb2.EncodeRequest
    ) -> encode_pb2.EncodeReply:
        """Call a worker.

        Raises:
            WorkerFailure: if the worker refuses or fails, or the connection does.
        """
        async with self._use(worker) as link:
            await self._connect(worker, link)
            stub = encode_pb2_grpc.EncoderStub(link.channel)
            try:
                reply: encode_pb2.EncodeReply = await stub.Encode(
                    request, metadata=credentials(self._settings.token)
                )
            except aio.AioRpcError as error:
                link.lost = True
                raise _failure(worker, error) from None
        if reply.HasField("error"):
            raise WorkerFailure.of(reply.error, worker.worker_id)
        return reply

    async def close(self) -> None:
        """Close all channels."""
        links, self._links = self._links, {}
        await asyncio.gather(*(link.channel.close() for link in links.values()))

    async def _connect(self, worker: WorkerAddress, link: _Link) -> None:
        """Wait until the channel is connected, so that a failure shows whether it was."""
        limit_s = self._settings.connect_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await connected(link.channel)
        except (TimeoutError, ConnectionError) as error:
            link.lost = True
            reason = str(error) or f"no connection within {limit_s} s"
            raise _lost(worker, reason, reached=False) from None

    @asynccontextmanager
    async def _use(self, worker: WorkerAddress) -> AsyncGenerator[_Link]:
        link = self._links.get(worker)
        if link is None or link.lost:
            settings = self._settings
            channel = open_channel(
                worker.address, settings.tls, ping_timeout_s=settings.ping_timeout_s
            )
            link = self._links[worker] = _Link(channel)
        link.calls += 1
        try:
            yield link
        finally:
            link.calls -= 1
            link.used_at = time.monotonic()
            await self._close_unused()
            if link.lost and not link.calls and self._links.get(worker) is not link:
                await link.channel.close()

    async def _close_unused(self) -> None:
        oldest = time.monotonic() - _IDLE_S
        unused = {
            worker: link
            for worker, link in self._links.items()
            if not link.calls and (link.lost or link.used_at < oldest)
        }
        for worker, link in unused.items():
            del self._links[worker]
            await link.channel.close()


def _failure(worker: WorkerAddress, error: aio.AioRpcError) -> WorkerFailure:
    reason = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        log.warning("encoder worker lost", worker=worker.worker_id, reason=reason)
        return _lost(worker, reason, reached=True)
    return WorkerFailure(reason, error_pb2.ERROR_CODE_INTERNAL, worker.worker_id)


def _lost(worker: WorkerAddress, reason: str, *, reached: bool) -> WorkerFailure:
    name = worker.worker_id
    return WorkerFailure(
        f"encoder worker {name} was lost: {reason}",
        error_pb2.ERROR_CODE_UNSPECIFIED,
        name,
        reached=reached,
    )
