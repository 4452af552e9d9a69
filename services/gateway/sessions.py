"""One session with each decode worker, carrying all our streams there."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import structlog
from grpc import aio

from headrace.v1 import decode_pb2, decode_pb2_grpc, error_pb2
from services.common.errors import ServiceError, Unavailable
from services.common.grpc_server import credentials, open_channel
from services.common.placement import WorkerAddress

log = structlog.get_logger()

WORKER_LOST = "worker_lost"


class WorkerFailure(Exception):
    """A stream ended without its answer.

    Args:
        code: what the worker said, or UNSPECIFIED where it died without a word.
        blame: the worker that failed, where somebody is.
    """

    def __init__(
        self, message: str, code: "error_pb2.ErrorCode.ValueType", blame: str | None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.blame = blame

    @property
    def reason(self) -> str:
        """A bounded label: the protocol's code, or ``worker_lost``."""
        if self.code == error_pb2.ERROR_CODE_UNSPECIFIED:
            return WORKER_LOST
        return error_pb2.ErrorCode.Name(self.code).removeprefix("ERROR_CODE_").lower()


class WorkerStream:
    """One request's stream on a worker. Always `close` it."""

    def __init__(self, session: "WorkerSession", number: int, max_held: int) -> None:
        self._session = session
        self._number = number
        self._max_held = max_held
        self._held: list[decode_pb2.StreamDelta] = []
        self._held_tokens = 0
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Sequence[decode_pb2.StreamDelta]:
        """All that came since the last call; waits for at least one delta.

        Raises:
            WorkerFailure: the worker, or the way to it, failed. What came before was returned.
            ServiceError: the gateway ended the stream itself.
        """
        while not self._held:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        held, self._held, self._held_tokens = self._held, [], 0
        return held

    def deliver(self, delta: decode_pb2.StreamDelta) -> None:
        """Keeps a delta for `next`; its error, if it has one, comes after its tokens."""
        if self._failure is not None:
            return
        self._held_tokens += len(delta.tokens)
        if self._held_tokens > self._max_held:
            self.fail(
                Unavailable(f"{self._held_tokens} tokens wait for a client that reads slowly")
            )
            return
        self._held.append(delta)
        if delta.HasField("error"):
            self.fail(_failure(delta.error, self._session.worker.worker_id))
        else:
            self._wake()

    def fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            self._wake()

    def close(self, *, cancel: bool = True) -> None:
        """Ends the stream here, and on the worker unless it has ended there. Idempotent."""
        self._session.forget(self._number, cancel=cancel)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _failure(error: error_pb2.Error, worker_id: str) -> WorkerFailure:
    code = error.code or error_pb2.ERROR_CODE_INTERNAL
    return WorkerFailure(error.message, code, error.worker_id or worker_id)


class WorkerSession:
    """The bidirectional call to one epoch of one worker, from its first stream to its end."""

    def __init__(
        self,
        worker: WorkerAddress,
        *,
        token: str | None,
        connect_timeout_s: float,
        max_held: int,
        on_end: Callable[["WorkerSession"], None],
    ) -> None:
        self.worker = worker
        self.alive = True
        self._token = token
        self._connect_timeout_s = connect_timeout_s
        self._max_held = max_held
        self._on_end = on_end
        self._streams: dict[int, WorkerStream] = {}
        self._next_number = 1
        self._outbox: asyncio.Queue[decode_pb2.DecodeCommand] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def start(self, message: decode_pb2.StartStream) -> WorkerStream:
        """Starts a stream; ``message.stream`` is set here."""
        number = message.stream = self._next_number
        self._next_number += 1
        stream = WorkerStream(self, number, self._max_held)
        self._streams[number] = stream
        self._outbox.put_nowait(decode_pb2.DecodeCommand(start=message))
        return stream

    def forget(self, number: int, *, cancel: bool) -> None:
        if self._streams.pop(number, None) is not None and cancel and self.alive:
            message = decode_pb2.CancelStream(stream=number)
            self._outbox.put_nowait(decode_pb2.DecodeCommand(cancel=message))

    def end(self, failure: Exception) -> None:
        """Fails every stream at once, and hangs up."""
        if not self.alive:
            return
        self.alive = False
        for stream in self._streams.values():
            stream.fail(failure)
        self._streams.clear()
        self._on_end(self)
        self._task.cancel()

    async def wait_closed(self) -> None:
        with suppress(asyncio.CancelledError):
            await self._task

    def lost(self, why: str) -> WorkerFailure:
        name = self.worker.worker_id
        return WorkerFailure(
            f"worker {name} was lost: {why}", error_pb2.ERROR_CODE_UNSPECIFIED, name
        )

    async def _run(self) -> None:
        """Connects, then carries commands and steps until either side ends."""
        why = "it ended the session"
        async with open_channel(self.worker.address) as channel:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    await channel.channel_ready()
                stub = decode_pb2_grpc.DecodeStub(channel)
                call = stub.Session(self._commands(), metadata=credentials(self._token))
                async for step in call:
                    self._dispatch(step)
            except TimeoutError:
                why = f"no connection within {self._connect_timeout_s} s"
            except aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            finally:
                if self.alive:
                    log.warning("session lost", worker=self.worker.worker_id, reason=why)
                    self.end(self.lost(why))

    def _dispatch(self, step: decode_pb2.DecodeStep) -> None:
        streams = self._streams
        for delta in step.deltas:
            stream = streams.get(delta.stream)
            if stream is not None:  # else it was cancelled, and this crossed the news
                stream.deliver(delta)

    async def _commands(self) -> AsyncIterator[decode_pb2.DecodeCommand]:
        while True:
            yield await self._outbox.get()


class Sessions:
    """The sessions of one gateway, opened as placements name workers.

    Args:
        max_held: tokens kept for a stream whose client reads slowly; past it the stream fails.
    """

    def __init__(self, *, token: str | None, connect_timeout_s: float, max_held: int) -> None:
        self._token = token
        self._connect_timeout_s = connect_timeout_s
        self._max_held = max_held
        self._by_worker: dict[str, WorkerSession] = {}

    def get(self, worker: WorkerAddress) -> WorkerSession:
        """The session with this epoch of a worker; one with another epoch is dropped."""
        session = self._by_worker.get(worker.worker_id)
        if session is not None and session.worker != worker:
            session.end(session.lost("another life of it was placed"))
            session = None
        if session is None:
            session = WorkerSession(
                worker,
                token=self._token,
                connect_timeout_s=self._connect_timeout_s,
                max_held=self._max_held,
                on_end=self._remove,
            )
            self._by_worker[worker.worker_id] = session
        return session

    def fail_all(self, failure: ServiceError) -> None:
        """Ends every stream with an error of the gateway's own."""
        for session in tuple(self._by_worker.values()):
            session.end(failure)

    async def close(self) -> None:
        sessions = tuple(self._by_worker.values())
        self.fail_all(Unavailable("the gateway is going away"))
        await asyncio.gather(*(session.wait_closed() for session in sessions))

    def _remove(self, session: WorkerSession) -> None:
        if self._by_worker.get(session.worker.worker_id) is session:
            del self._by_worker[session.worker.worker_id]
