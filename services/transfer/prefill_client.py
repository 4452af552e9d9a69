"""A decode worker's sessions with prefill workers: one for each, carrying all their sequences."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import structlog
from grpc import aio

from headrace.v1 import decode_pb2, error_pb2
from headrace.v1 import prefill_pb2 as pb
from headrace.v1.prefill_pb2_grpc import PrefillStub
from services.common.grpc_server import MessageStream, credentials, next_message, open_channel
from services.transfer.agent import TransferAgent
from services.transfer.errors import TransferError

log = structlog.get_logger()


class FetchFailed(Exception):
    """A prompt's KV did not come; ``code`` tells the gateway whether to try elsewhere."""

    def __init__(
        self, code: "error_pb2.ErrorCode.ValueType", message: str, worker_id: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.worker_id = worker_id


class Subscription:
    """One sequence's end of a link."""

    def __init__(self, link: "PrefillLink", start: pb.StartPrefill) -> None:
        self._link = link
        self._start = start
        self.events: asyncio.Queue[pb.PrefillEvent | FetchFailed] = asyncio.Queue()
        self.welcome = link.welcome

    def send_start(self) -> None:
        self._link.send(pb.PrefillCommand(start=self._start))

    def credit(self, segments: int) -> None:
        credit = pb.Credit(sequence=self._start.sequence, segments=segments)
        self._link.send(pb.PrefillCommand(credit=credit))

    def acknowledge(self, index: int, read_s: float, decode_s: float) -> None:
        """The segment is here; the seconds are those of `pb.SegmentTiming`."""
        timing = pb.SegmentTiming(read_s=read_s, decode_s=decode_s)
        done = pb.Acknowledge(sequence=self._start.sequence, index=index, timing=timing)
        self._link.send(pb.PrefillCommand(acknowledge=done))

    def release(self) -> None:
        end = pb.ReleaseLease(sequence=self._start.sequence)
        self._link.send(pb.PrefillCommand(release=end))

    def hang_up(self) -> None:
        self._link.hang_up()

    async def next_event(self) -> pb.PrefillEvent:
        event = await self.events.get()
        if isinstance(event, FetchFailed):
            raise event
        return event


class PrefillLink:
    """An open session with one life of one prefill worker."""

    def __init__(self, worker: decode_pb2.WorkerAddress, welcome: pb.Welcome) -> None:
        self.worker = worker
        self.welcome = welcome
        self.alive = True
        self.ended = asyncio.Event()  # nothing of it is left: another session may be opened
        self._subscriptions: dict[int, Subscription] = {}
        self._next_sequence = 1
        self._outbox: asyncio.Queue[pb.PrefillCommand] = asyncio.Queue()
        self._call: MessageStream | None = None

    @contextmanager
    def subscribe(self, start: pb.StartPrefill) -> Iterator[Subscription]:
        """Names the sequence within this session and receives its events until the block ends."""
        if not self.alive:
            raise self._lost()
        start.sequence = self._next_sequence
        self._next_sequence += 1
        subscription = Subscription(self, start)
        self._subscriptions[start.sequence] = subscription
        try:
            yield subscription
        finally:
            del self._subscriptions[start.sequence]

    def send(self, command: pb.PrefillCommand) -> None:
        if self.alive:
            self._outbox.put_nowait(command)

    def hang_up(self) -> None:
        """Ends the session: NIXL has lost the peer, and only a new session reaches it again."""
        self.alive = False
        if self._call is not None:
            self._call.cancel()

    async def run(self, call: MessageStream) -> None:
        """Carries commands and events until the session ends; every sequence on it fails then."""
        self._call = call
        writer = asyncio.create_task(self._write(call))
        try:
            while (event := await next_message(call)) is not None:
                self._dispatch(event)
        except aio.AioRpcError as error:
            log.info("prefill session ended", worker=self.worker.worker_id, reason=error.details())
        finally:
            self.alive = False
            writer.cancel()
            call.cancel()
            for subscription in self._subscriptions.values():
                subscription.events.put_nowait(self._lost())

    async def _write(self, call: MessageStream) -> None:
        try:
            while True:
                await call.write(await self._outbox.get())
        except (aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reading side ends with it, and tells everyone

    def _dispatch(self, event: pb.PrefillEvent) -> None:
        kind = event.WhichOneof("event")
        if kind is None or kind == "welcome":
            return
        subscription = self._subscriptions.get(getattr(event, kind).sequence)
        if subscription is not None:  # else it was released while this event was on its way
            subscription.events.put_nowait(event)

    def _lost(self) -> FetchFailed:
        return FetchFailed(
            error_pb2.ERROR_CODE_PREFILL_LOST,
            f"prefill worker {self.worker.worker_id} is gone",
            self.worker.worker_id,
        )


class PrefillLinks:
    """The sessions of one decode worker, opened on first use and dropped when they end.

    Args:
        hello: who we are and what we are compatible with; the expected epoch is filled in here.
        handshake_s: for connecting, the handshake and the exchange of NIXL metadata.
    """

    def __init__(
        self, agent: TransferAgent, hello: pb.Hello, *, token: str | None, handshake_s: float
    ) -> None:
        self._agent = agent
        self._hello = hello
        self._metadata = credentials(token)
        self._handshake_s = handshake_s
        self._links: dict[tuple[str, str], asyncio.Task[PrefillLink]] = {}
        self._runs: set[asyncio.Task[None]] = set()

    async def connect(self, worker: decode_pb2.WorkerAddress) -> PrefillLink:
        """The open session with this life of this worker; callers share one attempt to open it.

        Raises:
            FetchFailed: INCOMPATIBLE where the handshake was refused, else PREFILL_LOST.
        """
        key = (worker.worker_id, worker.epoch)
        while True:
            opening = self._links.get(key)
            if opening is None:
                opening = asyncio.create_task(self._open(worker))
                self._links[key] = opening
                opening.add_done_callback(partial(self._forget_failed, key))
            link = await asyncio.shield(opening)
            if link.alive:
                return link
            await link.ended.wait()

    def _forget_failed(self, key: tuple[str, str], opening: asyncio.Task[PrefillLink]) -> None:
        """The next request tries anew, whether or not anybody still waited for this one."""
        if opening.cancelled() or opening.exception() is not None:
            del self._links[key]

    async def close(self) -> None:
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)

    async def _open(self, worker: decode_pb2.WorkerAddress) -> PrefillLink:
        channel = open_channel(worker.address)
        session: Any = PrefillStub(channel).Session  # without an iterator: the call is written to
        call: MessageStream = session(metadata=self._metadata)
        welcome: pb.Welcome | None = None
        try:
            async with asyncio.timeout(self._handshake_s):
                welcome = await self._shake_hands(call, worker)
                await asyncio.wrap_future(
                    self._agent.add_peer(welcome.agent_name, welcome.agent_metadata)
                )
        except BaseException as error:
            call.cancel()
            if welcome is not None:  # the peer may be there, though nobody waited for it
                self._agent.remove_peer(welcome.agent_name)
            await channel.close(None)
            if isinstance(error, aio.AioRpcError | TransferError | TimeoutError):
                raise _handshake_failure(error, worker.worker_id) from error
            raise
        link = PrefillLink(worker, welcome)
        run = asyncio.create_task(self._run(link, call, channel))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        log.info("prefill session opened", worker=worker.worker_id, epoch=worker.epoch)
        return link

    async def _shake_hands(
        self,
        call: MessageStream,
        worker: decode_pb2.WorkerAddress,
    ) -> pb.Welcome:
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        hello.expected_epoch = worker.epoch
        await call.write(pb.PrefillCommand(hello=hello))
        event: pb.PrefillEvent | None = await next_message(call)
        if event is None or event.WhichOneof("event") != "welcome":
            raise FetchFailed(
                error_pb2.ERROR_CODE_PREFILL_LOST, "no welcome in answer to hello", worker.worker_id
            )
        return event.welcome

    async def _run(
        self,
        link: PrefillLink,
        call: MessageStream,
        channel: aio.Channel,
    ) -> None:
        try:
            await link.run(call)
        finally:
            self._links.pop((link.worker.worker_id, link.worker.epoch), None)
            self._agent.remove_peer(link.welcome.agent_name)
            link.ended.set()
            await channel.close(None)


def _handshake_failure(error: Exception, worker_id: str) -> FetchFailed:
    if isinstance(error, aio.AioRpcError):
        refused = error.code() in (
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.UNAUTHENTICATED,
        )
        code = error_pb2.ERROR_CODE_INCOMPATIBLE if refused else error_pb2.ERROR_CODE_PREFILL_LOST
        return FetchFailed(code, f"prefill worker {worker_id}: {error.details()}", worker_id)
    return FetchFailed(
        error_pb2.ERROR_CODE_PREFILL_LOST, f"prefill worker {worker_id}: {error!r}", worker_id
    )
