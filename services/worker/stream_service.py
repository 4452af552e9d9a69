"""The decode service of a worker: streams of gateways whose prompts the worker computes itself."""

import asyncio
import time
import uuid

import structlog

from headrace.v1 import decode_pb2_grpc, error_pb2
from runtime.engine import Add, Cancel, CancelChoice, Reserve, StepOutput
from runtime.errors import InvalidRequest
from services.common.grpc_server import MessageStream
from services.worker.lifecycle import Worker
from services.worker.streams import Stream, StreamSession
from services.worker.wire import fault_to_code, prompt_logprobs_to_messages

log = structlog.get_logger()

SERVICE = "headrace.v1.Decode"


class StreamService(decode_pb2_grpc.DecodeServicer):
    """Admits the streams of gateways, and passes tokens of the engine to them.

    The worker computes the prompts and decodes them, as a colocated worker does. The decode worker
    extends it by prompts whose KV it fetches.

    Attributes:
        streams: open streams by the engine's id of the sequence.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.streams: dict[str, Stream] = {}

    async def Session(  # type: ignore[override]  # noqa: N802 - named by the schema
        self, _commands: object, context: MessageStream
    ) -> None:
        """Serve one gateway until it disconnects."""
        session = StreamSession(uuid.uuid4().hex[:12], self.open, self.drop, self.cancel_choice)
        await session.run(context)

    def open(self, stream: Stream) -> None:
        """Check a new stream and admit it, or end it with an error."""
        start = stream.start
        me = self._worker.identity
        if start.epoch != me.epoch:
            self._fail(stream, error_pb2.ERROR_CODE_INCOMPATIBLE, "this worker has restarted")
            return
        if self._worker.draining:
            self._fail(stream, error_pb2.ERROR_CODE_DRAINING, "this worker is draining")
            return
        if refusal := self._refusal(stream):
            self._fail(stream, error_pb2.ERROR_CODE_INVALID, refusal)
            return
        stream.expiry = asyncio.get_running_loop().call_later(
            stream.deadline_s,
            stream.session.fail,
            stream,
            error_pb2.ERROR_CODE_DEADLINE,
            "the request's deadline passed",
        )
        self.streams[stream.key] = stream
        self._worker.metrics.prompt_tokens.inc(start.request.prompt_tokens)
        if stream.request.sampling.constrained:
            stream.compiling = asyncio.create_task(self._admit_constrained(stream))
        else:
            self._admit(stream)
        log.debug(
            "stream admitted",
            **stream.log_fields,
            attempt=start.request.attempt,
            tokens=len(stream.request.tokens),
            prefill=start.prefill.worker_id or me.worker_id,
        )

    async def _admit_constrained(self, stream: Stream) -> None:
        """Admit a stream once its grammar is compiled, or end it with an error."""
        code, message = error_pb2.ERROR_CODE_INVALID, ""
        try:
            stream.request = await self._worker.with_grammar(stream.request, stream.start.request)
        except InvalidRequest as error:
            message = str(error)
        except Exception as error:
            log.exception("compiling a grammar failed", **stream.log_fields)
            code, message = error_pb2.ERROR_CODE_INTERNAL, f"compiling failed: {error!r}"
        if stream.key not in self.streams:  # it has ended, and its number may be used again
            return
        if message:
            self._fail(stream, code, message)
            return
        self._admit(stream)
        for choice in set(range(stream.request.choices)) - stream.unfinished:
            self.cancel_choice(stream, choice)

    def drop(self, stream: Stream) -> None:
        """Free everything that an ended stream holds."""
        if stream.expiry is not None:
            stream.expiry.cancel()
        if self.streams.pop(stream.key, None) is None:
            return
        self._worker.metrics.streams.inc()
        self._worker.report_ended(stream.start.request.placement_id)
        self._free(stream)

    def cancel_choice(self, stream: Stream, choice: int) -> None:
        """Stop decoding one choice of a stream."""
        self._worker.engine.submit(CancelChoice(stream.key, choice))

    def end_all(self) -> None:
        """End every stream with DRAINING."""
        for stream in list(self.streams.values()):
            self._fail(stream, error_pb2.ERROR_CODE_DRAINING, "this worker is shutting down")

    def deliver(self, output: StepOutput) -> None:
        """Pass a step's output to the streams that are still open."""
        self._mark_stages(output)
        for key, fault in output.refused:
            if stream := self.streams.get(key):
                self._fail(stream, fault_to_code(fault), str(fault))
        for key, logprobs in output.prompt_logprobs:
            if stream := self.streams.get(key):
                for piece in prompt_logprobs_to_messages(logprobs):
                    stream.session.push_scored(stream, piece)
        delivered = 0
        for key, token in output.tokens:
            if stream := self.streams.get(key):
                if stream.reserved is None and not stream.decoding_since:
                    self._computed(stream)  # forced decode steps have followed the prompt
                stream.session.push(stream, token)
                delivered += 1
        self._worker.metrics.generation_tokens.inc(delivered)
        for key, choice, reason in output.finished:
            if stream := self.streams.get(key):
                stream.session.finish(stream, choice, reason)

    def _mark_stages(self, output: StepOutput) -> None:
        """Record when the prompts that this worker computes were started and completed.

        A preempted sequence is computed again, which counts as decoding.
        """
        for key, tokens in output.reused:
            stream = self.streams.get(key)
            if stream and stream.reserved is None and not stream.computing_since:
                stream.cached_tokens = tokens
        for key in output.started:
            stream = self.streams.get(key)
            if stream and stream.reserved is None and not stream.computing_since:
                stream.computing_since = time.perf_counter()
        for chunk in output.computed:
            stream = self.streams.get(chunk.id)
            if chunk.samples and stream and stream.reserved is None and not stream.decoding_since:
                self._computed(stream)

    def _computed(self, stream: Stream) -> None:
        """Record that this worker has computed the prompt of a stream, and now decodes it."""
        stream.start_decoding()
        self._worker.metrics.observe_stages(
            queue=stream.stages.queue, prefill=stream.stages.prefill
        )

    def _fail(self, stream: Stream, code: "error_pb2.ErrorCode.ValueType", message: str) -> None:
        """End a stream with an error of this worker."""
        stream.session.fail(stream, code, message, self._worker.identity.worker_id)

    def _refusal(self, stream: Stream) -> str | None:
        """Return the reason why this service cannot take a stream, if there is one."""
        if stream.start.HasField("prefill"):
            return "this worker computes prompts itself, but a prefill worker was given"
        return None

    def _admit(self, stream: Stream) -> None:
        """Start to work on a stream."""
        self._submit(stream, Add(stream.request))

    def _submit(self, stream: Stream, command: Add | Reserve) -> None:
        self._worker.engine.submit(command)
        self._worker.report_admitted(stream.start.request.placement_id)

    def _free(self, stream: Stream) -> None:
        """Free the engine's sequence of an ended stream."""
        self._worker.engine.submit(Cancel(stream.key))
