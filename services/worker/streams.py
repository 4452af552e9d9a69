"""A gateway's session with a worker that decodes: many streams, one message per step."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import grpc
import structlog

from headrace.v1 import decode_pb2 as pb
from headrace.v1 import error_pb2, sampling_pb2
from runtime.core.request import FinishReason, Request, SampledToken
from runtime.engine import Reserved
from runtime.errors import InvalidRequest
from services.common.error_codes import error_reason
from services.common.grpc_server import MessageStream, next_message
from services.common.prompt_scores import PromptScores
from services.common.tracing import NO_SPAN, Span
from services.worker.step_outbox import StepOutbox
from services.worker.wire import (
    FINISH_REASONS,
    deadline_from_message,
    request_from_message,
    request_span,
    token_to_message,
)

log = structlog.get_logger()


@dataclass
class Stream:
    """One request's stream.

    Attributes:
        number: number of the stream, chosen by the gateway.
        key: the engine's id of the sequence.
        start: the gateway's message.
        request: the same request, converted for the engine.
        unfinished: choices that have not ended.
        first: first tokens from the prefill worker; empty if this worker computes the prompt.
        scores: log probabilities of the prompt that a prefill worker has sent; None if they are
            not wanted.
        span: span of the stream on this worker.
        stages: seconds per stage, sent with the last delta.
        reserved: future of the sequence's pages; None if this worker computes the prompt.
        transfer: task that reserves pages and fetches the KV; None if there is nothing to fetch.
        compiling: task that compiles the grammar and admits the stream; None without a constraint.
        early: timeout scope that can cancel a fetch which began before its pages were reserved;
            None for other fetches.
        asked_from: first token whose KV an early fetch has asked for.
        may_compute: number of prompt tokens that a decode worker is to compute itself instead of
            the assigned prefill worker; 0 if it fetches their KV.
        cached_tokens: number of tokens of the request that no worker has computed; None after this
            number was sent to the gateway, with the first token.
        deadline_s: seconds from the start of the stream to its end by ``expiry``.
        expiry: timer that ends the stream at its deadline.
        began: receipt of the gateway's message, in seconds of `time.perf_counter`.
        computing_since: start of the prompt's first chunk, on the same clock, if this worker
            computes the prompt; 0 until then.
        decoding_since: start of decoding, on the same clock; 0 until then. If the KV is fetched, it
            is complete then, and nothing writes to the pages any more.
    """

    number: int
    key: str
    session: "StreamSession"
    start: pb.StartStream
    request: Request
    unfinished: set[int]
    scores: PromptScores | None = None
    span: Span = NO_SPAN
    first: list[SampledToken] = field(default_factory=list)
    stages: pb.StageTimes = field(default_factory=pb.StageTimes)
    reserved: asyncio.Future[Reserved] | None = None
    transfer: asyncio.Task[None] | None = None
    compiling: asyncio.Task[None] | None = None
    early: asyncio.Timeout | None = None
    asked_from: int = 0
    may_compute: int = 0
    cached_tokens: int | None = 0
    deadline_s: float = 0.0
    expiry: asyncio.TimerHandle | None = None
    began: float = field(default_factory=time.perf_counter)
    computing_since: float = 0.0
    decoding_since: float = 0.0

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log lines about this stream."""
        return {"request_id": self.start.request.request_id, **self.span.ids}

    def ends_with(self, token: SampledToken, context_length: int) -> FinishReason | None:
        """Return the finish reason if a first token ends its choice, else None."""
        length = self.request.prompt_tokens + token.index + 1
        return self.request.finish_reason(token.token, length, self.request.limit(context_length))

    def start_decoding(self) -> None:
        """Record the start of decoding, and earlier stages if this worker computed the prompt."""
        self.decoding_since = time.perf_counter()
        if self.computing_since:
            self.stages.queue = self.computing_since - self.began
            self.stages.prefill = self.decoding_since - self.computing_since

    def end_span(self) -> None:
        """Record a child span for each stage that the engine has reached, then end the span."""
        if self.computing_since:
            computed = self.decoding_since or time.perf_counter()
            self.span.record("queue", self.began, self.computing_since)
            self.span.record("prefill", self.computing_since, computed)
        if self.decoding_since:
            self.span.record("decode", self.decoding_since, time.perf_counter())
        self.span.end()


class StreamSession:
    """Executes one gateway's commands, and sends it the output of the engine's steps.

    Unsent output is merged into one delta per stream, and sent in messages of bounded size. The
    memory for a slow gateway is therefore bounded by the tokens of its own streams.

    Args:
        open_stream: called with every new stream.
        drop_stream: called with every stream that has ended.
        cancel_choice: called with a stream and a choice that was cancelled, if others continue.

    Attributes:
        streams: open streams by their number.
        outbox: output that is not sent yet.
    """

    def __init__(
        self,
        name: str,
        open_stream: Callable[[Stream], None],
        drop_stream: Callable[[Stream], None],
        cancel_choice: Callable[[Stream, int], None],
    ) -> None:
        self._name = name
        self._open = open_stream
        self._drop = drop_stream
        self._cancel_choice = cancel_choice
        self.streams: dict[int, Stream] = {}
        self.outbox = StepOutbox()
        self._keys = count(1)
        self._wake = asyncio.Event()

    async def run(self, context: MessageStream) -> None:
        """Serve until the gateway disconnects, then end all its streams."""
        # Otherwise the first write sends the metadata, and the call could not be aborted meanwhile.
        await context.send_initial_metadata(())
        writer = asyncio.create_task(self._write(context))
        try:
            while (command := await next_message(context)) is not None:
                match command.WhichOneof("command"):
                    case "start":
                        self._start(command.start)
                    case "cancel":
                        if stream := self.streams.get(command.cancel.stream):
                            self.end(stream)
                    case "cancel_choice":
                        self.cancel_choice(command.cancel_choice)
                    case _:
                        await context.abort(
                            grpc.StatusCode.INVALID_ARGUMENT, "the command is empty"
                        )
        finally:
            writer.cancel()
            for stream in list(self.streams.values()):
                self.end(stream)

    async def _write(self, context: MessageStream) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.outbox.deltas:
                await context.write(self.outbox.take())

    def _delta(self, number: int) -> pb.StreamDelta:
        self._wake.set()
        return self.outbox.delta(number)

    def _start(self, start: pb.StartStream) -> None:
        if start.stream in self.streams:
            log.error("stream started twice", request_id=start.request.request_id)
            return
        # The stream's number is no key: a gateway may repeat it, and the engine refuses known ids.
        key = f"{self._name}/{next(self._keys)}"
        try:
            request = request_from_message(key, start.request)
            deadline_s = deadline_from_message(start.deadline_s)
        except InvalidRequest as error:
            self._delta(start.stream).error.CopyFrom(
                error_pb2.Error(code=error_pb2.ERROR_CODE_INVALID, message=str(error))
            )
            return
        top = request.sampling.prompt_logprobs
        stream = Stream(
            number=start.stream,
            key=key,
            session=self,
            start=start,
            request=request,
            unfinished=set(range(request.choices)),
            scores=None if top is None else PromptScores(request.prompt_tokens, top),
            span=request_span("Decode/StartStream", start),
            deadline_s=deadline_s,
        )
        self.streams[start.stream] = stream
        self._open(stream)

    def cancel_choice(self, command: pb.CancelChoice) -> None:
        """End one choice without reporting it; a stream without another choice ends as well."""
        stream = self.streams.get(command.stream)
        if stream is None or command.choice not in stream.unfinished:
            return
        stream.unfinished.discard(command.choice)
        if stream.unfinished:
            self._cancel_choice(stream, command.choice)
        else:
            self.end(stream)

    def push(self, stream: Stream, token: SampledToken) -> None:
        """Send one token."""
        self._wake.set()
        self.outbox.add(stream.number, token_to_message(token))
        if stream.cached_tokens is not None:
            self.outbox.delta(stream.number).cached_tokens = stream.cached_tokens
            stream.cached_tokens = None

    def push_scored(self, stream: Stream, piece: sampling_pb2.PromptLogprobs) -> None:
        """Send log probabilities of prompt tokens."""
        self._wake.set()
        self.outbox.add_scored(stream.number, piece)

    def finish(self, stream: Stream, choice: int, reason: FinishReason) -> None:
        """End one choice; the stream ends with its last choice."""
        if choice not in stream.unfinished:
            return
        stream.unfinished.discard(choice)
        delta = self._delta(stream.number)
        delta.ended.append(pb.ChoiceEnd(choice=choice, reason=FINISH_REASONS[reason]))
        if not stream.unfinished:
            if stream.decoding_since:
                stream.stages.decode = time.perf_counter() - stream.decoding_since
            delta.stages.CopyFrom(stream.stages)
            self.end(stream)

    def fail(
        self,
        stream: Stream,
        code: "error_pb2.ErrorCode.ValueType",
        message: str,
        worker_id: str = "",
    ) -> None:
        """End a stream with an error."""
        if stream.number in self.streams:
            error = error_pb2.Error(code=code, message=message, worker_id=worker_id)
            self._delta(stream.number).error.CopyFrom(error)
            stream.span.fail(error_reason(code), message)
            self.end(stream)

    def end(self, stream: Stream) -> None:
        """Drop a stream and free what it holds. Idempotent."""
        if self.streams.pop(stream.number, None) is not None:
            stream.end_span()
            self._drop(stream)
