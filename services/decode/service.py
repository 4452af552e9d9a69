"""The decode worker: fetches prompts' KV from prefill workers and decodes them in one batch."""

import asyncio
import time
import uuid
from functools import partial

import structlog
import uvloop

from headrace.v1 import decode_pb2_grpc, error_pb2, prefill_pb2
from runtime.engine import Add, Arrived, Cancel, Reserve, StepOutput
from runtime.errors import RuntimeFault
from runtime.kv.pages import pages_for
from services.common.grpc_server import GrpcServer, MessageStream
from services.common.placement import Role
from services.decode.session import DecodeSession, Stream
from services.decode.settings import DecodeSettings
from services.transfer.agent import TransferAgent
from services.transfer.fetch import Fetch, FetchFailed, FetchTimes
from services.transfer.metrics import TransferMetrics
from services.transfer.prefill_client import PrefillClients
from services.transfer.receiver import Receiver
from services.transfer.slab import Slab
from services.worker.codec_warm_up import warm_up_transfers
from services.worker.lifecycle import Worker, live
from services.worker.loading import PAGE_SIZE, Loaded, digest_pages, load_worker
from services.worker.wire import fault_to_code, token_from_message

log = structlog.get_logger()

SERVICE = "headrace.v1.Decode"

loop_factory = uvloop.new_event_loop


class DecodeWorker(Worker, decode_pb2_grpc.DecodeServicer):
    """A decode worker: engine thread, receiver, and the sessions of gateways."""

    def __init__(
        self, settings: DecodeSettings, loaded: Loaded, agent: TransferAgent, landing: Slab
    ) -> None:
        super().__init__(loaded, agent)
        self._settings = settings
        hello = prefill_pb2.Hello(
            worker_id=loaded.identity.worker_id,
            epoch=loaded.identity.epoch,
            compatibility=loaded.identity.compatibility_message(),
            slot_bytes=landing.slot_bytes,
            agent_name=agent.name,
            agent_metadata=agent.connection_metadata,
        )
        self._clients = PrefillClients(
            agent, hello, token=settings.token, handshake_s=settings.handshake_s
        )
        self.receiver = Receiver(
            agent,
            loaded.engine.cache,
            landing,
            self._clients,
            loaded.codecs,
            credits_per_sequence=settings.credits_per_sequence,
            read_timeout_s=settings.read_timeout_s,
            metrics=TransferMetrics(self.metrics.registry),
        )
        self.streams: dict[str, Stream] = {}

    @property
    def idle(self) -> bool:
        """Whether no stream is open."""
        return not self.streams

    async def Session(  # type: ignore[override]  # noqa: N802 - named by the schema
        self, _commands: object, context: MessageStream
    ) -> None:
        """Serve one gateway until it disconnects."""
        session = DecodeSession(uuid.uuid4().hex[:12], self._open, self._drop)
        await session.run(context)

    def _open(self, stream: Stream) -> None:
        """Check a new stream and admit it, or end it with an error."""
        start, request, session = stream.start, stream.start.request, stream.session
        me = self.identity.worker_id
        if start.epoch != self.identity.epoch:
            session.fail(stream, error_pb2.ERROR_CODE_INCOMPATIBLE, "this worker has restarted", me)
            return
        if self.draining:
            session.fail(stream, error_pb2.ERROR_CODE_DRAINING, "this worker is draining", me)
            return
        local = not start.HasField("prefill")
        if local and not self._settings.colocated:
            message = "no prefill worker was given, and this worker is not colocated"
            session.fail(stream, error_pb2.ERROR_CODE_INVALID, message, me)
            return
        loop = asyncio.get_running_loop()
        deadline_s = min(start.deadline_s, self._settings.max_deadline_s)
        stream.expiry = loop.call_later(
            deadline_s,
            session.fail,
            stream,
            error_pb2.ERROR_CODE_DEADLINE,
            "the request's deadline passed",
        )
        self.streams[stream.key] = stream
        self.metrics.prompt_tokens.inc(request.prompt_tokens)
        if local:
            self._submit(stream, Add(stream.request))
        else:
            stream.reserved = loop.create_future()
            stream.transfer = asyncio.create_task(self._fetch(stream, deadline_s))
            stream.transfer.add_done_callback(lambda _: self._end_transfer(stream))
        log.debug(
            "stream admitted",
            request_id=request.request_id,
            attempt=request.attempt,
            tokens=len(stream.request.tokens),
            prefill=start.prefill.worker_id or me,
        )

    def _submit(self, stream: Stream, command: Add | Reserve) -> None:
        self.engine.submit(command)
        self._admitted(stream.start.request.placement_id)

    def _drop(self, stream: Stream) -> None:
        """Free everything that an ended stream holds."""
        if stream.expiry is not None:
            stream.expiry.cancel()
        if self.streams.pop(stream.key, None) is None:
            return
        self.metrics.requests.labels("decode", "ended").inc()
        if stream.transfer is None or stream.decoding:
            self.engine.submit(Cancel(stream.key))
        elif stream.transfer is not asyncio.current_task():
            stream.transfer.cancel()

    def _end_transfer(self, stream: Stream) -> None:
        """Free the pages of a stream that ended while its transfer might still write to them."""
        stream.transfer = None
        if stream.key not in self.streams:
            self.engine.submit(Cancel(stream.key))

    async def _fetch(self, stream: Stream, deadline_s: float) -> None:
        """Fetch the prompt's KV into reserved pages, then add the sequence to the batch."""
        request, session = stream.start.request, stream.session
        if stream.reserved is None:
            raise RuntimeError("the stream has no page reservation")
        began = time.perf_counter()
        reserve = partial(self._submit, stream, Reserve(stream.request))
        digest: asyncio.Future[str] | None = None

        def start_decoding(times: FetchTimes) -> None:
            nonlocal digest
            if stream.key in self.streams:
                digest = self._digest(stream)  # runs before the next step
                self.engine.submit(Arrived(stream.key, tuple(stream.first)))
                stream.decoding, stream.decoding_since = True, time.perf_counter()
                stages = stream.stages
                stages.queue, stages.prefill = times.queue, times.prefill
                stages.transfer, stages.verify = times.transfer, times.decode_kv

        try:
            has_room = self._has_room()
            if not has_room:  # a prompt is not computed before there are pages for it
                reserve()
                await stream.reserved
            fetch = Fetch(
                key=stream.key,
                prefill=stream.start.prefill,
                request=request,
                reserved=stream.reserved,
                on_first=lambda first: self._take_first(stream, first),
                on_verified=start_decoding,
                deadline_s=deadline_s,
                on_requested=reserve if has_room else None,
            )
            times = await self.receiver.fetch(fetch)
            found = None if digest is None else await digest
        except FetchFailed as failure:
            log.warning("fetch failed", request_id=request.request_id, reason=failure.message[:300])
            session.fail(stream, failure.code, failure.message, failure.worker_id)
            return
        except Exception as error:
            log.exception("fetch failed unexpectedly", request_id=request.request_id)
            me = self.identity.worker_id
            session.fail(stream, error_pb2.ERROR_CODE_INTERNAL, f"fetch failed: {error!r}", me)
            return
        self._record(stream, times, time.perf_counter() - began, found)

    def _has_room(self) -> bool:
        """Return whether the next step will reserve the pages of all streams that wait for them.

        Half of the pages and of the batch are left for running sequences.
        """
        load = self.engine.load
        waiting = [s for s in self.streams.values() if s.reserved and not s.reserved.done()]
        pages = sum(pages_for(len(s.request.tokens), PAGE_SIZE) for s in waiting)
        fits = 2 * (load.running + len(waiting)) <= self.sizes.max_running
        return fits and load.waiting == 0 and 2 * pages < load.pages_free

    def _take_first(self, stream: Stream, message: prefill_pb2.FirstTokens) -> bool:
        """Send the first tokens before the KV arrives; return True if all choices end with them."""
        with_logprobs = stream.request.sampling.logprobs is not None
        for wire_token in message.tokens:
            token = token_from_message(wire_token, with_logprobs=with_logprobs)
            stream.first.append(token)
            stream.session.push(stream, token)
            self.metrics.generation_tokens.inc()
        for token in stream.first:
            if reason := stream.ends_with(token, self.identity.model.context_length):
                stream.session.finish(stream, token.choice, reason)
        return not stream.unfinished

    def _digest(self, stream: Stream) -> "asyncio.Future[str] | None":
        """Start to compute the digest of a prompt's pages, if that is enabled."""
        if not self._settings.kv_digest or stream.reserved is None:
            return None
        pages, tokens = stream.reserved.result().pages, len(stream.request.tokens)
        return self.engine.run(lambda engine: digest_pages(engine, pages, tokens))

    def _record(
        self, stream: Stream, times: FetchTimes, total_s: float, digest: str | None
    ) -> None:
        for stage in ("queue", "prefill", "transfer"):
            self.metrics.stages.labels(stage).observe(getattr(times, stage))
        self.metrics.stages.labels("decode_kv").observe(times.decode_kv)
        log.debug(
            "kv arrived",
            request_id=stream.start.request.request_id,
            segments=times.segments,
            raw_bytes=times.raw_bytes,
            wire_bytes=times.wire_bytes,
            seconds=round(total_s, 4),
        )
        if digest is not None:
            log.info("kv verified", request_id=stream.start.request.request_id, digest=digest)

    def _deliver(self, output: StepOutput) -> None:
        """Pass a step's output to the streams that are still open."""
        for reserved in output.reserved:
            stream = self.streams.get(reserved.id)
            if stream and stream.reserved and not stream.reserved.done():
                stream.reserved.set_result(reserved)
        for key, fault in output.refused:
            if stream := self.streams.get(key):
                self._refuse(stream, fault)
        for key, token in output.tokens:
            if stream := self.streams.get(key):
                stream.session.push(stream, token)
        self.metrics.generation_tokens.inc(len(output.tokens))
        for key, choice, reason in output.finished:
            if stream := self.streams.get(key):
                stream.session.finish(stream, choice, reason)

    def _refuse(self, stream: Stream, fault: RuntimeFault) -> None:
        stream.session.fail(stream, fault_to_code(fault), str(fault), self.identity.worker_id)

    def observe(self) -> None:
        """Set the gauges of the worker and the landing slots."""
        super().observe()
        self.receiver.observe()

    async def close(self) -> None:
        """End the sessions with prefill workers and the engine's thread."""
        await self._clients.close()
        await super().close()


async def serve(settings: DecodeSettings) -> None:
    """Run one decode worker until SIGTERM or SIGINT, then drain.

    Raises:
        SettingsError: the worker cannot start with these settings.
    """
    loaded = await asyncio.to_thread(load_worker, settings, decodes=True)
    landing = loaded.new_slab()
    agent = TransferAgent(
        f"decode-{loaded.identity.epoch}", loaded.device, network=settings.transfer_network
    )
    agent.register(landing)
    await warm_up_transfers(loaded, agent, landing)
    worker = DecodeWorker(settings, loaded, agent, landing)
    server = GrpcServer(settings.endpoint, [SERVICE], token=settings.token)
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server.server)
    role = Role.COLOCATED if settings.colocated else Role.DECODE
    try:
        await live(worker, server, settings, role)
    finally:
        await asyncio.to_thread(agent.close)
