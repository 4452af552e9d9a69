"""Replacements of a transfer agent and a gRPC call, which the search completes step by step."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from grpc import StatusCode, aio

from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.announced import AnnouncedSegments
from services.transfer.codec_calls import CodecCalls, CodecJob, Timed
from services.transfer.errors import PeerLost, ReadFailed, ReadTimeout, TransferClosed
from services.transfer.slab import Slab
from tests.services.transfer.protocol.parts import SLOT_BYTES, Call, Violation

T = TypeVar("T")


@dataclass
class Read:
    """A READ that has not ended, of a remote slot."""

    peer: str
    remote: int
    future: "Future[ReadDone]" = field(default_factory=Future)
    drained: "Future[None] | None" = None


class Agent(TransferAgent):
    """A transfer agent whose READs and codec calls end when they are told to.

    Attributes:
        sent: notifications, as (name of the peer, message).
        reads: READs by landing slot.
        started: landing slots of READs that were started since the last input.
    """

    def __init__(self, name: str, slab: Slab) -> None:
        self.name = name
        self.fault = Future()
        self.closed = False
        self.calls = CodecCalls(on_gpu=False)
        self.sent: list[tuple[str, bytes]] = []
        self.reads: dict[int, Read] = {}
        self.started: list[int] = []
        self.listener: AnnouncedSegments | None = None
        self._slab = slab
        self._peers: set[str] = set()

    def register(self, slab: Slab) -> None:
        pass

    @property
    def metadata(self) -> bytes:
        return b""

    @property
    def connection_metadata(self) -> bytes:
        return b""

    def run_codec(self, job: CodecJob[T]) -> "Future[Timed[T] | None]":
        return self._add(job)

    def codec_idle(self) -> "Future[None]":
        return self._add(None)

    def _add(self, job: CodecJob[Any] | None) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        if self.closed:
            future.set_exception(TransferClosed("the worker has ended"))
        else:
            self.calls.add(job, future)
        return future

    def close(self, grace_s: float = 0.0) -> None:
        self.closed = True
        self.calls.close()

    def start_codec(self) -> None:
        """Start the calls that are queued."""
        self.calls.start_queued()
        self.calls.poll()

    def end_codec(self) -> None:
        """End the oldest call."""
        call = self.calls._running[0][0]
        if call is not None:
            cast(Call, call).done = True
        self.calls.poll()

    def add_peer(self, name: str, metadata: bytes) -> "Future[None]":
        self._peers.add(name)
        return _done()

    def remove_peer(self, name: str) -> "Future[None]":
        self._peers.discard(name)
        return _done()

    def notify(self, peer: str, message: bytes) -> None:
        self.sent.append((peer, message))

    def listen(self, listener: AnnouncedSegments) -> None:
        self.listener = listener

    def wake(self) -> None:
        pass

    def read(
        self,
        peer: str,
        remote_address: int,
        length: int,
        local: torch.Tensor,
        *,
        deadline_s: float,
        kind: str = "DRAM",
        device: int = 0,
    ) -> "Future[ReadDone]":
        slot = (local.data_ptr() - self._slab.address) // SLOT_BYTES
        read = Read(peer, remote_address // SLOT_BYTES)
        if peer not in self._peers:
            read.future.set_exception(PeerLost(f"peer {peer} is not known"))
            return read.future
        if slot in self.reads:
            raise Violation(f"landing slot {slot} is read into, while another READ may write to it")
        self.reads[slot] = read
        self.started.append(slot)
        return read.future

    def end_read(self, slot: int, how: str) -> None:
        """End a READ that is not overdue, or make it overdue; ``how`` says which."""
        read = self.reads[slot]
        if how == "overdue":
            read.drained = Future()
            read.drained.set_running_or_notify_cancel()
            read.future.set_exception(ReadTimeout("no READ has ended", read.drained))
            return
        del self.reads[slot]
        if read.drained is not None:
            read.drained.set_result(None)
        elif how == "lost":
            read.future.set_exception(PeerLost(f"peer {read.peer} has disconnected"))
        elif how == "failed":
            read.future.set_exception(ReadFailed(f"READ from {read.peer} failed"))
        else:
            read.future.set_result(ReadDone(0.0, 0.0))


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


class Stream:
    """One side of a session's call.

    Attributes:
        written: messages that were written.
        cancelled: whether this side has cancelled the call.
    """

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.cancelled = False
        self._ended = False
        self._inbox: list[Any] = []
        self._arrived: asyncio.Future[None] | None = None

    def deliver(self, message: Any) -> None:
        """Let a message of the other side arrive."""
        self._inbox.append(message)
        self._wake()

    def end(self) -> None:
        """Let the connection end; messages that have arrived can be read."""
        self._ended = True
        self._wake()

    def cancel(self) -> None:
        self.cancelled = True
        self._wake()

    async def read(self) -> Any:
        while not self._inbox and not self._ended and not self.cancelled:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        if self.cancelled:
            raise asyncio.CancelledError
        if self._inbox:
            return self._inbox.pop(0)
        none = aio.Metadata()
        raise aio.AioRpcError(StatusCode.UNAVAILABLE, none, none, "connection lost")

    async def write(self, message: Any) -> None:
        if self._ended or self.cancelled:
            raise asyncio.InvalidStateError("the call has ended")
        self.written.append(message)

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
