"""The prefill worker: computes prompts, returns first tokens, serves encoded KV.

With `PrefillSettings.decodes` it also serves whole requests, as a colocated worker does.
"""

import asyncio
import uuid

import grpc
import structlog
import uvloop
from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString

from headrace.v1 import decode_pb2_grpc, error_pb2, prefill_pb2_grpc
from headrace.v1 import prefill_pb2 as pb
from runtime.engine import StepOutput
from services.common.grpc_server import GrpcServer, MessageStream, next_message
from services.common.placement import Role
from services.prefill.session import Job, PrefillSession
from services.prefill.settings import PrefillSettings
from services.transfer.errors import TransferError
from services.transfer.local_endpoint import Endpoints
from services.transfer.policy import LinkPolicy
from services.transfer.routes import Route, heads_of, routes_between
from services.transfer.sender import Sender
from services.worker.device import torch_device
from services.worker.endpoints import open_endpoints
from services.worker.lifecycle import Worker, run_worker
from services.worker.loading import Loaded, running_ranks
from services.worker.stream_service import SERVICE as DECODE_SERVICE
from services.worker.stream_service import StreamService
from services.worker.wire import fault_to_code

log = structlog.get_logger()

SERVICE = "headrace.v1.Prefill"

loop_factory = uvloop.new_event_loop


class PrefillWorker(Worker, prefill_pb2_grpc.PrefillServicer):
    """A prefill worker: engine thread, sender, and the sessions of decode workers."""

    def __init__(self, settings: PrefillSettings, loaded: Loaded, endpoints: Endpoints) -> None:
        super().__init__(loaded, endpoints)
        self._settings = settings
        self.sender = Sender(
            endpoints,
            LinkPolicy.of(settings.codec, has_codebooks=endpoints[0].codecs.has_codebooks),
            epoch=loaded.identity.epoch,
            lease_s=settings.lease_s,
            metrics=self.transfers,
        )
        self.jobs: dict[str, Job] = {}
        self.service = StreamService(self)
        self._sessions: list[PrefillSession] = []

    @property
    def idle(self) -> bool:
        """Whether no sequence is being computed or transferred, and no stream is open."""
        return not self.jobs and not self.service.streams

    def end_requests(self) -> None:
        """End every sequence and every stream with DRAINING."""
        self.service.end_all()
        for key, job in list(self.jobs.items()):
            job.session.fail(key, error_pb2.ERROR_CODE_DRAINING, "this worker is shutting down")

    async def Session(  # type: ignore[override]  # noqa: N802 - named by the schema
        self,
        _commands: object,
        context: MessageStream,
    ) -> None:
        """Serve one decode worker, from the handshake to the end of its session."""
        hello, routes = await self._shake_hands(context)
        session = PrefillSession(uuid.uuid4().hex[:12], hello, routes, self, self.sender, self.jobs)
        is_connected = any(other.agent == session.agent for other in self._sessions)
        self._sessions.append(session)
        log.info("decode session opened", worker=hello.worker_id, epoch=hello.epoch)
        try:
            if hello.endpoints and not is_connected:  # else an earlier session has not ended yet
                await self._connect(hello.worker_id, hello.endpoints[0])
            await session.run(context)
        finally:
            self._sessions.remove(session)
            self._forget(session)
            log.info("decode session ended", worker=hello.worker_id, epoch=hello.epoch)

    def _forget(self, session: PrefillSession) -> None:
        """Drop what is kept for a decode worker that has no other session."""
        if all(other.peer != session.peer for other in self._sessions):
            self.sender.forget_peer(session.peer)
        if session.agent and all(other.agent != session.agent for other in self._sessions):
            for endpoint in self.endpoints:
                endpoint.remove_peer(session.agent)

    async def _shake_hands(self, context: MessageStream) -> tuple[pb.Hello, tuple[Route, ...]]:
        message: pb.PrefillCommands | None = await next_message(context)
        commands = list(message.commands) if message is not None else []
        if len(commands) != 1 or commands[0].WhichOneof("command") != "hello":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the first message of a session must be hello alone",
            )
        hello = commands[0].hello
        mine = self.identity.compatibility_message()
        differing = [
            f"{field.name}: decode worker has {_text(getattr(hello.compatibility, field.name))}, "
            f"prefill worker has {_text(getattr(mine, field.name))}"
            for field in pb.Compatibility.DESCRIPTOR.fields
            if getattr(hello.compatibility, field.name) != getattr(mine, field.name)
        ]
        if hello.expected_epoch != self.identity.epoch:
            differing.append("epoch: the prefill worker has restarted")
        routes: tuple[Route, ...] = ()
        try:
            routes = self._routes(hello)
        except ValueError as error:
            differing.append(f"KV heads: {error}")
        else:
            most_heads = max(len(route.kv_heads) for route in routes)
            least = self.endpoints[0].codecs.max_page_frame_bytes(most_heads)
            if hello.slot_bytes < least:
                differing.append(
                    f"slot_bytes: decode worker has {hello.slot_bytes}, "
                    f"but one page of one layer takes {least}"
                )
        if differing:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "; ".join(differing))
        welcome = pb.Welcome(
            worker_id=self.identity.worker_id,
            epoch=self.identity.epoch,
            compatibility=mine,
            slot_bytes=self.endpoints[0].slot_bytes,
            endpoints=[endpoint.readable for endpoint in self.endpoints],
            lease_s=self._settings.lease_s,
        )
        await context.write(pb.PrefillEvents(events=[pb.PrefillEvent(welcome=welcome)]))
        return hello, routes

    def _routes(self, hello: pb.Hello) -> tuple[Route, ...]:
        """Return the routes to the ranks of a decode worker.

        Raises:
            ValueError: the workers do not have the same KV heads.
        """
        senders = [endpoint.kv_heads for endpoint in self.endpoints]
        readers = list(map(heads_of, hello.endpoints))
        if not readers:
            readers = [range(max(heads.stop for heads in senders))]
        return routes_between(senders, readers)

    async def _connect(self, worker_id: str, reader: pb.Endpoint) -> None:
        """Connect to a decode worker's agent. On failure, that worker gets no notifications."""
        adding = [
            asyncio.wrap_future(endpoint.add_peer(reader.agent_name, reader.agent_metadata))
            for endpoint in self.endpoints
        ]
        try:
            await asyncio.gather(*adding)
        except TransferError as error:
            log.warning(
                "cannot send NIXL notifications, using gRPC", worker=worker_id, reason=str(error)
            )

    def _deliver(self, output: StepOutput) -> None:
        """Pass a step's output to sessions and streams; sequences that have ended are skipped."""
        self.service.deliver(output)
        for key, fault in output.refused:
            if job := self.jobs.get(key):
                job.session.fail(key, fault_to_code(fault), str(fault))
        for key in output.started:
            if job := self.jobs.get(key):
                job.session.computing(job)
        for key, tokens in output.reused:
            if job := self.jobs.get(key):
                job.reused = tokens
        complete = []
        for key, token in output.tokens:  # sent before the encodes are planned
            if job := self.jobs.get(key):
                self.metrics.generation_tokens.inc()
                if job.session.sampled(job, token):
                    complete.append(key)
        for chunk in output.computed:
            if job := self.jobs.get(chunk.id):
                job.add_pages(chunk.page_tables)
                if not job.ends_at_once:
                    self.sender.add_computed(chunk)
                if chunk.completes and not chunk.samples:
                    job.session.report_computed(job)
                    complete.append(chunk.id)
        for key in complete:
            if job := self.jobs.get(key):
                self.sender.finish_computing(key)
                self._log_computed(job)

    def _log_computed(self, job: Job) -> None:
        if not self._settings.kv_digest:
            return

        def log_digest(digest: "asyncio.Future[str]") -> None:
            if not digest.cancelled() and (error := digest.exception()):
                log.error("KV digest failed", **job.outgoing.log_fields, error=repr(error))
            elif not digest.cancelled():
                log.info("kv computed", **job.outgoing.log_fields, digest=digest.result())

        self.digest(job.page_tables, job.outgoing.sent).add_done_callback(log_digest)

    def observe(self) -> None:
        """Set the gauges and end expired leases."""
        super().observe()
        self.sender.expire()
        self.sender.set_gauges()


def _text(value: object) -> str:
    return MessageToString(value, as_one_line=True) if isinstance(value, Message) else repr(value)


async def serve(settings: PrefillSettings) -> None:
    """Run one prefill worker until SIGTERM or SIGINT, then drain.

    Raises:
        SettingsError: the worker cannot start with these settings.
    """
    tls = settings.tls  # invalid files are reported before the model is loaded
    decodes = settings.decodes
    if decodes == "auto":
        decodes = torch_device(settings.device).type == "cuda"
    async with (
        running_ranks(settings, "prefill", decodes=decodes) as loaded,
        open_endpoints(loaded, "prefill", settings.transfer_network) as endpoints,
    ):
        worker = PrefillWorker(settings, loaded, endpoints)
        worker.decodes = decodes
        services = [SERVICE, DECODE_SERVICE] if decodes else [SERVICE]
        server = GrpcServer(settings.endpoint, services, token_check=settings.token_check, tls=tls)
        prefill_pb2_grpc.add_PrefillServicer_to_server(worker, server.server)
        if decodes:
            decode_pb2_grpc.add_DecodeServicer_to_server(worker.service, server.server)
        await run_worker(worker, server, settings, Role.PREFILL)
