"""The service `headrace.v1.Prefill`: sends KV that this worker computes or has cached to readers.

Prefill workers serve it for decode workers, and decode workers for prefill workers; see
`services.worker.prefill_session`.
"""

import asyncio
import uuid
from functools import partial

import grpc
import structlog
from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString

from headrace.v1 import error_pb2, prefill_pb2_grpc
from headrace.v1 import prefill_pb2 as pb
from runtime.engine import StepOutput
from services.common.grpc_server import MessageStream, next_message
from services.transfer.errors import TransferError
from services.transfer.known_peers import KnownPeers
from services.transfer.routes import Route, heads_of, routes_between
from services.transfer.sender import Sender
from services.worker.lifecycle import Worker
from services.worker.prefill_session import History, Job, PrefillSession
from services.worker.wire import fault_to_code

log = structlog.get_logger()

SERVICE = "headrace.v1.Prefill"


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """The sessions of readers, and the sequences whose KV they read.

    Args:
        peers: agents that the endpoints of the worker know.
        lease_s: see `Sender`.
        computes, history: see `PrefillSession`.
        kv_digest: whether to log a digest of the KV of each sequence that is computed.

    Attributes:
        jobs: sequences of all sessions, by the engine's id.
    """

    def __init__(
        self,
        worker: Worker,
        sender: Sender,
        peers: KnownPeers,
        *,
        lease_s: float,
        computes: bool = True,
        history: History | None = None,
        kv_digest: bool = False,
    ) -> None:
        self._worker = worker
        self._sender = sender
        self._peers = peers
        self._lease_s = lease_s
        self._history = history
        self._kv_digest = kv_digest
        self.jobs: dict[str, Job] = {}
        self._new_session = partial(PrefillSession, computes=computes, history=history)
        self._sessions: list[PrefillSession] = []

    def end_all(self) -> None:
        """End every sequence with DRAINING."""
        for key, job in list(self.jobs.items()):
            job.session.fail(key, error_pb2.ERROR_CODE_DRAINING, "this worker is shutting down")

    async def Session(  # type: ignore[override]  # noqa: N802 - named by the schema
        self,
        _commands: object,
        context: MessageStream,
    ) -> None:
        """Serve one reader, from the handshake to the end of its session."""
        hello, routes = await self._shake_hands(context)
        name = uuid.uuid4().hex[:12]
        session = self._new_session(name, hello, routes, self._worker, self._sender, self.jobs)
        self._sessions.append(session)
        log.info("decode session opened", worker=hello.worker_id, epoch=hello.epoch)
        try:
            if hello.endpoints:
                await self._connect(session, hello.endpoints[0])
            await session.run(context)
        finally:
            self._sessions.remove(session)
            self._forget(session)
            log.info("decode session ended", worker=hello.worker_id, epoch=hello.epoch)

    def _forget(self, session: PrefillSession) -> None:
        """Drop what is kept for a reader that has no other session."""
        if all(other.peer != session.peer for other in self._sessions):
            self._sender.forget_peer(session.peer)
            if self._history is not None:
                self._history.forget(session.peer)
        for rank in range(len(self._worker.endpoints)):
            self._peers.remove(rank, session.agent, session)

    def deliver(self, output: StepOutput) -> None:
        """Pass a step's output to the sessions; sequences that have ended are skipped."""
        for key, fault in output.refused:
            if job := self.jobs.get(key):
                job.session.fail(key, fault_to_code(fault), str(fault))
        for reserved in output.reserved:
            if job := self.jobs.get(reserved.id):
                job.session.receive(job, reserved)
        for key in output.started:
            if job := self.jobs.get(key):
                job.session.computing(job)
        for key, tokens in output.reused:
            if job := self.jobs.get(key):
                job.reused = tokens
        for key, logprobs in output.prompt_logprobs:
            if job := self.jobs.get(key):
                job.session.scored(job, logprobs)
        complete = []
        for key, token in output.tokens:  # sent before the encodes are planned
            if job := self.jobs.get(key):
                self._worker.metrics.generation_tokens.inc()
                if job.session.sampled(job, token):
                    complete.append(key)
        for chunk in output.computed:
            if job := self.jobs.get(chunk.id):
                job.add_pages(chunk.page_tables)
                if not job.ends_at_once:
                    self._sender.add_computed(chunk)
                if chunk.completes and not chunk.samples:
                    job.session.report_computed(job)
                    complete.append(chunk.id)
        for key in complete:
            if job := self.jobs.get(key):
                self._sender.finish_computing(key)
                self._log_computed(job)

    def observe(self) -> None:
        """Set the gauges of the sender and end expired leases."""
        self._sender.expire()
        self._sender.set_gauges()

    def _log_computed(self, job: Job) -> None:
        if not self._kv_digest or job.start.cached:
            return

        def log_digest(digest: "asyncio.Future[str]") -> None:
            if not digest.cancelled() and (error := digest.exception()):
                log.error("KV digest failed", **job.outgoing.log_fields, error=repr(error))
            elif not digest.cancelled():
                log.info("kv computed", **job.outgoing.log_fields, digest=digest.result())

        digest = self._worker.digest(job.page_tables, job.outgoing.sent)
        digest.add_done_callback(log_digest)

    async def _shake_hands(self, context: MessageStream) -> tuple[pb.Hello, tuple[Route, ...]]:
        message: pb.PrefillCommands | None = await next_message(context)
        commands = list(message.commands) if message is not None else []
        if len(commands) != 1 or commands[0].WhichOneof("command") != "hello":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the first message of a session must be hello alone",
            )
        hello = commands[0].hello
        mine = self._worker.identity.compatibility_message()
        differing = [
            f"{field.name}: decode worker has {_text(getattr(hello.compatibility, field.name))}, "
            f"prefill worker has {_text(getattr(mine, field.name))}"
            for field in pb.Compatibility.DESCRIPTOR.fields
            if getattr(hello.compatibility, field.name) != getattr(mine, field.name)
        ]
        if hello.expected_epoch != self._worker.identity.epoch:
            differing.append("epoch: the prefill worker has restarted")
        routes: tuple[Route, ...] = ()
        try:
            routes = self._routes(hello)
        except ValueError as error:
            differing.append(f"KV heads: {error}")
        else:
            most_heads = max(len(route.kv_heads) for route in routes)
            least = self._worker.endpoints[0].codecs.max_page_frame_bytes(most_heads)
            if hello.slot_bytes < least:
                differing.append(
                    f"slot_bytes: decode worker has {hello.slot_bytes}, "
                    f"but one page of one layer takes {least}"
                )
        if differing:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "; ".join(differing))
        welcome = pb.Welcome(
            worker_id=self._worker.identity.worker_id,
            epoch=self._worker.identity.epoch,
            compatibility=mine,
            slot_bytes=self._worker.endpoints[0].slot_bytes,
            endpoints=[endpoint.readable for endpoint in self._worker.endpoints],
            lease_s=self._lease_s,
        )
        await context.write(pb.PrefillEvents(events=[pb.PrefillEvent(welcome=welcome)]))
        return hello, routes

    def _routes(self, hello: pb.Hello) -> tuple[Route, ...]:
        """Return the routes to the ranks of a decode worker.

        Raises:
            ValueError: the workers do not have the same KV heads.
        """
        senders = [endpoint.kv_heads for endpoint in self._worker.endpoints]
        readers = list(map(heads_of, hello.endpoints))
        if not readers:
            readers = [range(max(heads.stop for heads in senders))]
        return routes_between(senders, readers)

    async def _connect(self, session: PrefillSession, reader: pb.Endpoint) -> None:
        """Connect to a reader's agent. On failure, that worker gets no notifications."""
        adding = [
            asyncio.wrap_future(self._peers.add(rank, reader, session))
            for rank in range(len(self._worker.endpoints))
        ]
        try:
            await asyncio.gather(*adding)
        except TransferError as error:
            log.warning(
                "cannot send NIXL notifications, using gRPC",
                worker=session.peer,
                reason=str(error),
            )


def _text(value: object) -> str:
    return MessageToString(value, as_one_line=True) if isinstance(value, Message) else repr(value)
