"""A worker's sessions with those that send it KV: one session for each worker.

They are prefill workers for a decode worker. A prefill worker reads from decode workers, too.
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import grpc
import structlog
from grpc import aio

from headrace.v1 import decode_pb2, error_pb2, request_pb2
from headrace.v1 import prefill_pb2 as pb
from headrace.v1.prefill_pb2_grpc import PrefillStub
from services.common.grpc_server import (
    PING_TIMEOUT_S,
    MessageStream,
    credentials,
    next_batch,
    next_message,
    open_channel,
)
from services.common.tls import MutualTls
from services.transfer.endpoint import KVEndpoint
from services.transfer.errors import TransferClosed, TransferError
from services.transfer.fetch import Fetch, FetchFailed
from services.transfer.known_peers import KnownPeers
from services.transfer.routes import Route, heads_of, routes_between

log = structlog.get_logger()


class Subscription:
    """Commands and events of one sequence of a session.

    Attributes:
        client: the session.
    """

    def __init__(self, client: "PrefillClient", sequence: int) -> None:
        self.client = client
        self._sequence = sequence
        self._events: asyncio.Queue[pb.PrefillEvent | FetchFailed | None] = asyncio.Queue()

    def send_start(self, fetch: Fetch, deadline_s: float) -> None:
        """Request a prefill, to be ended by the prefill worker after ``deadline_s`` seconds."""
        trace = fetch.span.headers
        start = pb.StartPrefill(
            sequence=self._sequence,
            request=fetch.request,
            deadline_s=deadline_s,
            first_token=fetch.sent.first,
            cached=fetch.cached,
            trace=request_pb2.TraceContext(**trace) if trace else None,
        )
        self.client.send(pb.PrefillCommand(start=start))

    def credit(self, rank: int, segments: int) -> None:
        """Grant credits for a number of further segments to a rank of this worker."""
        credit = pb.Credit(sequence=self._sequence, segments=segments, rank=rank)
        self.client.send(pb.PrefillCommand(credit=credit))

    def acknowledge(self, index: int, read_s: float, decode_s: float) -> None:
        """Acknowledge a decoded segment, with the seconds of `pb.SegmentTiming`."""
        done = pb.Acknowledge(
            sequence=self._sequence,
            index=index,
            timing=pb.SegmentTiming(read_s=read_s, decode_s=decode_s),
        )
        self.client.send(pb.PrefillCommand(acknowledge=done))

    def put(self, event: pb.PrefillEvent | FetchFailed | None) -> None:
        """Queue an event, or None to wake the reader of events."""
        self._events.put_nowait(event)

    async def next_event(self) -> pb.PrefillEvent | None:
        """Wait for the sequence's next event; return None if `put` was called with None.

        Raises:
            FetchFailed: the session has ended.
        """
        event = await self._events.get()
        if isinstance(event, FetchFailed):
            raise event
        return event


class PrefillClient:
    """An open session with one epoch of one prefill worker.

    Args:
        routes: routes from the ranks of the prefill worker to those of this worker.
        sequences: numbers for the sequences of all sessions of this process, without repetition,
            so that a late notification is not taken for that of another sequence.

    Attributes:
        split: ranks of this worker to which a route is split, see `Route`.
        alive: whether new sequences can be subscribed.
        unreachable: whether NIXL has lost the peer.
        ended: event set after the session's cleanup; another session may be opened then.
    """

    def __init__(
        self,
        worker: decode_pb2.WorkerAddress,
        welcome: pb.Welcome,
        routes: Sequence[Route],
        sequences: Iterator[int],
    ) -> None:
        self.worker = worker
        self.welcome = welcome
        self.routes = routes
        self.split = frozenset(route.reader for route in routes if route.split)
        self.alive = True
        self.unreachable = False
        self.ended = asyncio.Event()
        self._subscriptions: dict[int, Subscription] = {}
        self._sequences = sequences
        self._outbox: asyncio.Queue[pb.PrefillCommand] = asyncio.Queue()
        self._call: MessageStream | None = None

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Add a sequence to the session; it receives events until the block ends.

        The end of the block ends its lease.

        Raises:
            FetchFailed: the session has ended.
        """
        if not self.alive:
            raise self._lost()
        sequence = next(self._sequences)
        subscription = self._subscriptions[sequence] = Subscription(self, sequence)
        try:
            yield subscription
        finally:
            del self._subscriptions[sequence]
            self.send(pb.PrefillCommand(release=pb.ReleaseLease(sequence=sequence)))

    def send(self, command: pb.PrefillCommand) -> None:
        """Queue a command; it is dropped if the session has ended."""
        if self.alive:
            self._outbox.put_nowait(command)

    def disconnect(self) -> None:
        """End the session: NIXL has lost the peer, and only a new session can add it again."""
        self.alive = False
        self.unreachable = True
        if self._call is not None:
            self._call.cancel()

    async def run(self, call: MessageStream) -> None:
        """Exchange commands and events until the session ends, then fail all its sequences."""
        self._call = call
        writer = asyncio.create_task(self._write(call))
        try:
            while (events := await next_message(call)) is not None:
                for event in events.events:
                    self._dispatch(event)
        except aio.AioRpcError as error:
            log.info("prefill session ended", worker=self.worker.worker_id, reason=error.details())
        finally:
            self.alive = False
            writer.cancel()
            call.cancel()
            for subscription in self._subscriptions.values():
                subscription.put(self._lost())

    async def _write(self, call: MessageStream) -> None:
        try:
            while True:
                await call.write(pb.PrefillCommands(commands=await next_batch(self._outbox)))
        except (aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader of events then ends the session

    def _dispatch(self, event: pb.PrefillEvent) -> None:
        kind = event.WhichOneof("event")
        if kind is None or kind == "welcome":
            return
        subscription = self._subscriptions.get(getattr(event, kind).sequence)
        if subscription is not None:  # else the sequence was released before the event arrived
            subscription.put(event)

    def _lost(self) -> FetchFailed:
        return FetchFailed(
            error_pb2.ERROR_CODE_PREFILL_LOST,
            f"the session with prefill worker {self.worker.worker_id} has ended",
            self.worker.worker_id,
        )


class PrefillClients:
    """The sessions of one reader, opened on first use and dropped when they end.

    Args:
        endpoints: endpoint of each rank of the reader.
        peers: agents that the endpoints know.
        hello: handshake message of the reader; `connect` fills in the expected epoch.
        handshake_s: deadline for connecting, the handshake and the exchange of NIXL metadata.
        ping_timeout_s: see `services.common.grpc_server.open_channel`.
    """

    def __init__(
        self,
        endpoints: Sequence[KVEndpoint],
        peers: KnownPeers,
        hello: pb.Hello,
        *,
        token: str | None,
        handshake_s: float,
        ping_timeout_s: float = PING_TIMEOUT_S,
        tls: MutualTls | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._peers = peers
        self._hello = hello
        self._metadata = credentials(token)
        self._tls = tls
        self._handshake_s = handshake_s
        self._ping_timeout_s = ping_timeout_s
        self._clients: dict[tuple[str, str], asyncio.Task[PrefillClient]] = {}
        self._sequences = count(1)
        self._runs: set[asyncio.Task[None]] = set()

    async def connect(self, worker: decode_pb2.WorkerAddress) -> PrefillClient:
        """Return the session with this epoch of a worker; open it if there is none.

        Concurrent callers share one attempt.

        Raises:
            FetchFailed: INCOMPATIBLE if the handshake was refused, INTERNAL if an agent of this
                worker has ended, TRANSFER_FAILED if its agents did not connect in time, else
                PREFILL_LOST.
        """
        key = (worker.worker_id, worker.epoch)
        while True:
            opening = self._clients.get(key)
            if opening is None:
                opening = asyncio.create_task(self._open(worker))
                self._clients[key] = opening
                opening.add_done_callback(partial(self._forget_failed, key))
            client = await asyncio.shield(opening)
            if client.alive:
                return client
            await client.ended.wait()

    def _forget_failed(self, key: tuple[str, str], opening: asyncio.Task[PrefillClient]) -> None:
        """Drop a failed attempt, so that the next request tries again."""
        if opening.cancelled() or opening.exception() is not None:
            del self._clients[key]

    async def close(self) -> None:
        """End all sessions."""
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)

    async def _open(self, worker: decode_pb2.WorkerAddress) -> PrefillClient:
        channel = open_channel(worker.address, self._tls, ping_timeout_s=self._ping_timeout_s)
        session: Any = PrefillStub(channel).Session  # no request iterator: `write` sends requests
        call: MessageStream = session(metadata=self._metadata)
        added: list[tuple[int, str]] = []
        try:
            async with asyncio.timeout(self._handshake_s):
                welcome, routes = await self._shake_hands(call, worker)
                adding: list[Future[None]] = []
                for own, sender in _agents(welcome, routes):
                    adding.append(self._peers.add(own, sender, call))
                    added.append((own, sender.agent_name))
                await asyncio.gather(*map(asyncio.wrap_future, adding))
        except BaseException as error:
            call.cancel()
            for own, agent in added:  # NIXL may add a peer after the timeout
                self._peers.remove(own, agent, call)
            await channel.close(None)
            if isinstance(error, aio.AioRpcError | TransferError | TimeoutError):
                raise _handshake_failure(error, worker.worker_id, answered=bool(added)) from error
            raise
        for sender in welcome.endpoints:
            sender.ClearField("agent_metadata")  # READs send the rest to the processes of ranks
        client = PrefillClient(worker, welcome, routes, self._sequences)
        run = asyncio.create_task(self._run(client, call, channel))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        log.info("prefill session opened", worker=worker.worker_id, epoch=worker.epoch)
        return client

    async def _shake_hands(
        self,
        call: MessageStream,
        worker: decode_pb2.WorkerAddress,
    ) -> tuple[pb.Welcome, tuple[Route, ...]]:
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        hello.expected_epoch = worker.epoch
        await call.write(pb.PrefillCommands(commands=[pb.PrefillCommand(hello=hello)]))
        events: pb.PrefillEvents | None = await next_message(call)
        event = events.events[0] if events is not None and events.events else pb.PrefillEvent()
        if event.WhichOneof("event") != "welcome":
            raise FetchFailed(
                error_pb2.ERROR_CODE_PREFILL_LOST, "no answer to the handshake", worker.worker_id
            )
        welcome = event.welcome
        if (welcome.worker_id, welcome.epoch) != (worker.worker_id, worker.epoch):
            raise FetchFailed(
                error_pb2.ERROR_CODE_INCOMPATIBLE,
                f"the worker at {worker.address} is {welcome.worker_id}, not {worker.worker_id}",
                worker.worker_id,
            )
        try:
            routes = routes_from(welcome, self._endpoints)
        except ValueError as error:
            raise FetchFailed(
                error_pb2.ERROR_CODE_INCOMPATIBLE,
                f"KV heads of worker {worker.worker_id}: {error}",
                worker.worker_id,
            ) from error
        return welcome, routes

    async def _run(
        self,
        client: PrefillClient,
        call: MessageStream,
        channel: aio.Channel,
    ) -> None:
        try:
            await client.run(call)
        finally:
            self._clients.pop((client.worker.worker_id, client.worker.epoch), None)
            for own, sender in _agents(client.welcome, client.routes):
                if client.unreachable:
                    self._peers.forget(own, sender.agent_name)
                else:
                    self._peers.remove(own, sender.agent_name, call)
            client.ended.set()
            await channel.close(None)


def routes_from(welcome: pb.Welcome, endpoints: Sequence[KVEndpoint]) -> tuple[Route, ...]:
    """Return the routes from the ranks of a prefill worker.

    Args:
        endpoints: those of this worker's ranks.

    Raises:
        ValueError: the prefill worker lacks a KV head of this worker.
    """
    senders = list(map(heads_of, welcome.endpoints))
    return routes_between(senders, [endpoint.kv_heads for endpoint in endpoints])


def _agents(welcome: pb.Welcome, routes: Sequence[Route]) -> list[tuple[int, pb.Endpoint]]:
    """Return pairs of a rank of the reader and a rank of the sender from which it reads."""
    pairs = {(route.reader, route.sender): None for route in routes}
    return [(own, welcome.endpoints[peer]) for own, peer in pairs]


def _handshake_failure(error: Exception, worker_id: str, *, answered: bool) -> FetchFailed:
    """Return the failure of a session that was not opened.

    Args:
        answered: whether the prefill worker has answered, so that only agents were to connect.
    """
    if isinstance(error, TransferClosed):
        return FetchFailed(error_pb2.ERROR_CODE_INTERNAL, str(error))  # of this worker's own agent
    if isinstance(error, TimeoutError) and answered:
        return FetchFailed(
            error_pb2.ERROR_CODE_TRANSFER_FAILED,
            f"agents did not connect to prefill worker {worker_id} in time",
            worker_id,
        )
    if isinstance(error, aio.AioRpcError):
        refused = error.code() in (
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.UNAUTHENTICATED,
        )
        code = error_pb2.ERROR_CODE_INCOMPATIBLE if refused else error_pb2.ERROR_CODE_PREFILL_LOST
        return FetchFailed(code, f"prefill worker {worker_id}: {error.details()}", worker_id)
    reason = "the handshake timed out" if isinstance(error, TimeoutError) else str(error)
    return FetchFailed(
        error_pb2.ERROR_CODE_PREFILL_LOST, f"prefill worker {worker_id}: {reason}", worker_id
    )
