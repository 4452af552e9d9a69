"""Sessions with decode workers: one bidirectional call per worker carries all streams.

A step of a worker produces a token for each of its running streams, and the time of a gRPC message
in Python hardly depends on the number of tokens in it. The worker therefore sends all tokens of a
step that belong to one gateway in one message, instead of one for each request. The end of the call
is the end of all its streams, so that one keepalive detects the loss of the worker for all of them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import structlog
from grpc import ChannelConnectivity, aio

from headrace.v1 import decode_pb2, decode_pb2_grpc, error_pb2
from services.common.errors import ServiceError, TooLarge, Unavailable
from services.common.grpc_server import MAX_ITEM_BYTES, credentials, open_channel
from services.common.placement import WorkerAddress
from services.gateway.settings import GatewaySettings
from services.gateway.worker_failure import WorkerFailure

log = structlog.get_logger()


class WorkerStream:
    """The stream of one request on a worker. The caller must `close` it."""

    def __init__(self, session: "WorkerSession", number: int, max_buffered_tokens: int) -> None:
        self._session = session
        self._number = number
        self._max_buffered_tokens = max_buffered_tokens
        self._buffer: list[decode_pb2.StreamDelta] = []
        self._buffered_tokens = 0
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Sequence[decode_pb2.StreamDelta]:
        """Return all deltas since the last call; wait until there is at least one.

        Raises:
            WorkerFailure: if the worker or the connection failed, after all earlier deltas were
                returned.
            ServiceError: if the gateway ended the stream.
        """
        while not self._buffer:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._buffer, self._buffered_tokens = self._buffer, [], 0
        return deltas

    def deliver(self, delta: decode_pb2.StreamDelta) -> None:
        """Buffer a delta for `next`. If it has an error, `next` raises it after all deltas."""
        if self._failure is not None:
            return
        # Check before adding this delta, which has many tokens after a pause of this process.
        if self._buffered_tokens > self._max_buffered_tokens:
            self.fail(
                Unavailable(
                    f"the client reads too slowly: {self._buffered_tokens} tokens are buffered"
                )
            )
            return
        self._buffered_tokens += len(delta.tokens)
        self._buffer.append(delta)
        if delta.HasField("error"):
            self.fail(WorkerFailure.of(delta.error, self._session.worker.worker_id))
        else:
            self._wake()

    def fail(self, failure: Exception) -> None:
        """Make `next` raise ``failure`` once the buffer is empty. Later failures are ignored."""
        if self._failure is None:
            self._failure = failure
            self._wake()

    def cancel_choice(self, choice: int) -> None:
        """Stop the worker from decoding one choice, while others continue."""
        self._session.cancel_choice(self._number, choice)

    def close(self, *, cancel: bool = True) -> None:
        """Stop receiving, and cancel the stream on the worker if ``cancel``. Idempotent."""
        self._session.remove(self._number, cancel=cancel)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WorkerSession:
    """A bidirectional call to one worker, for one epoch of that worker.

    Attributes:
        worker: id, epoch and address of the worker.
        alive: False once the session has ended.

    Args:
        on_confirmed: called once, when the worker has shown that it runs this epoch.
        on_end: called when the session has ended.
    """

    def __init__(
        self,
        worker: WorkerAddress,
        settings: GatewaySettings,
        *,
        on_confirmed: Callable[["WorkerSession"], None],
        on_end: Callable[["WorkerSession"], None],
    ) -> None:
        self.worker = worker
        self.alive = True
        self._settings = settings
        self._on_confirmed = on_confirmed
        self._on_end = on_end
        self._connected = self._confirmed = False
        self._streams: dict[int, WorkerStream] = {}
        self._next_number = 1
        # None ends `_commands`.
        self._outbox: asyncio.Queue[decode_pb2.DecodeCommand | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def start(self, message: decode_pb2.StartStream) -> WorkerStream:
        """Start a stream; sets the stream number of ``message``.

        Raises:
            TooLarge: if the message would end the session.
        """
        if (size := message.ByteSize()) > MAX_ITEM_BYTES:
            raise TooLarge(
                f"the request is too large: its tokens and options have {size} bytes, at most "
                f"{MAX_ITEM_BYTES} can be sent to a worker"
            )
        number = message.stream = self._next_number
        self._next_number += 1
        stream = WorkerStream(self, number, self._settings.stream_buffer_tokens)
        self._streams[number] = stream
        self._outbox.put_nowait(decode_pb2.DecodeCommand(start=message))
        return stream

    def remove(self, number: int, *, cancel: bool) -> None:
        """Stop delivering to a stream, and cancel it on the worker if ``cancel``.

        A session that is not confirmed ends with its last stream: its epoch may have ended.
        """
        if self._streams.pop(number, None) is not None and cancel:
            message = decode_pb2.CancelStream(stream=number)
            self._outbox.put_nowait(decode_pb2.DecodeCommand(cancel=message))
        if not self._streams and not self._confirmed:
            self.end(self.lost("its epoch was not confirmed"))

    def cancel_choice(self, number: int, choice: int) -> None:
        """Cancel one choice of a stream on the worker."""
        if number in self._streams:
            message = decode_pb2.CancelChoice(stream=number, choice=choice)
            self._outbox.put_nowait(decode_pb2.DecodeCommand(cancel_choice=message))

    def end(self, failure: Exception) -> None:
        """Fail every stream with ``failure`` and close the call. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        for stream in self._streams.values():
            stream.fail(failure)
        self._streams.clear()
        self._on_end(self)
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the call is closed."""
        with suppress(asyncio.CancelledError):
            await self._task

    def lost(self, reason: str) -> WorkerFailure:
        """Return the failure to report when this worker is lost."""
        name = self.worker.worker_id
        return WorkerFailure(
            f"worker {name} was lost: {reason}",
            error_pb2.ERROR_CODE_UNSPECIFIED,
            name,
            reached=self._connected,
        )

    async def _run(self) -> None:
        """Connect, then send commands and receive steps until either side ends the call."""
        settings = self._settings
        reason = "the worker ended the session"
        async with open_channel(
            self.worker.address, settings.tls, ping_timeout_s=settings.ping_timeout_s
        ) as channel:
            try:
                async with asyncio.timeout(settings.connect_timeout_s):
                    await connected(channel)
                self._connected = True
                stub = decode_pb2_grpc.DecodeStub(channel)
                call = stub.Session(self._commands(), metadata=credentials(settings.token))
                async for step in call:
                    if step is None:  # gRPC could not decode it
                        reason = "cannot parse a DecodeStep message"
                        break
                    self._dispatch(step)
                    await asyncio.sleep(0)  # let streams be read before the next step is buffered
            except TimeoutError:
                reason = f"no connection within {settings.connect_timeout_s} s"
            except ConnectionError as error:
                reason = str(error)
            except aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            finally:
                # If the worker has ended the call, gRPC still waits for the next command.
                self._outbox.put_nowait(None)
                if self.alive:
                    log.warning("session lost", worker=self.worker.worker_id, reason=reason)
                    self.end(self.lost(reason))

    def _dispatch(self, step: decode_pb2.DecodeStep) -> None:
        streams = self._streams
        for delta in step.deltas:
            if not self._confirmed and not self._is_stale(delta):
                self._confirmed = True
                self._on_confirmed(self)
            stream = streams.get(delta.stream)
            if stream is not None:  # None if the stream was cancelled while the delta was in flight
                stream.deliver(delta)

    def _is_stale(self, delta: decode_pb2.StreamDelta) -> bool:
        """Return whether the worker has refused a stream because it runs another epoch."""
        error = delta.error
        incompatible = error.code == error_pb2.ERROR_CODE_INCOMPATIBLE
        return incompatible and error.worker_id in ("", self.worker.worker_id)

    async def _commands(self) -> AsyncIterator[decode_pb2.DecodeCommand]:
        while (command := await self._outbox.get()) is not None:
            yield command


async def connected(channel: aio.Channel) -> None:
    """Wait until a channel is connected.

    Raises:
        ConnectionError: nothing listens at its address, for example because the worker was killed.
    """
    while (state := channel.get_state(try_to_connect=True)) is not ChannelConnectivity.READY:
        if state is ChannelConnectivity.TRANSIENT_FAILURE:
            raise ConnectionError("it accepts no connections")
        await channel.wait_for_state_change(state)


class SessionPool:
    """Sessions of one gateway, opened on first use.

    Two routers may briefly know different epochs of one worker. Each epoch has its own session, so
    that a placement on an ended epoch does not disturb the streams of the current one. A session
    whose worker confirms its epoch ends those of other epochs.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._sessions: dict[WorkerAddress, WorkerSession] = {}

    def get(self, worker: WorkerAddress) -> WorkerSession:
        """Return the session with an epoch of a worker."""
        session = self._sessions.get(worker)
        if session is None:
            session = WorkerSession(
                worker,
                self._settings,
                on_confirmed=self._end_other_epochs,
                on_end=self._remove,
            )
            self._sessions[worker] = session
        return session

    def fail_all(self, failure: ServiceError) -> None:
        """End every stream with an error."""
        for session in tuple(self._sessions.values()):
            session.end(failure)

    async def close(self) -> None:
        """End all sessions and wait until their calls are closed."""
        sessions = tuple(self._sessions.values())
        self.fail_all(Unavailable("the gateway is shutting down"))
        await asyncio.gather(*(session.wait_closed() for session in sessions))

    def _end_other_epochs(self, confirmed: WorkerSession) -> None:
        for session in tuple(self._sessions.values()):
            if session is not confirmed and session.worker.worker_id == confirmed.worker.worker_id:
                session.end(session.lost("the worker restarted with another epoch"))

    def _remove(self, session: WorkerSession) -> None:
        del self._sessions[session.worker]
