"""One reader's session with a worker that sends it KV.

Usually a decode worker reads the KV of prompts from a prefill worker, which computes them. The
engine then holds the prompt (`Add`). A prefill worker, in turn, reads the history of a chat from
the decode worker that has it in cached pages. The engine of the decode worker pins these (`Pin`),
and nothing is computed or sampled. Everything else is the same in both directions.

First tokens are sent as soon as they are sampled, before the KV of the last chunk is encoded. The
client gets its first token without waiting for the transfer, and the decode worker needs the KV
only for the second one. Segments of earlier chunks are sent while later ones are computed. A
sequence that `max_tokens` ends with its first token sends no KV (`Job.ends_at_once`).
"""

import asyncio
import time
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple, Protocol

import grpc
import structlog

from headrace.v1 import decode_pb2, error_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.core.request import PromptLogprobs, Request, SampledToken
from runtime.engine import Add, Cancel, Pin, Reserved
from runtime.errors import InvalidRequest
from runtime.pages.sent import SentTokens
from services.common.error_codes import error_reason
from services.common.grpc_server import MessageStream, next_batch, next_message
from services.common.token_ids import count_tokens
from services.transfer.outgoing import Outgoing
from services.transfer.routes import Route
from services.transfer.sender import Sender
from services.worker.lifecycle import Worker
from services.worker.wire import (
    deadline_from_message,
    prompt_logprobs_to_messages,
    request_from_message,
    request_span,
    token_to_message,
)

log = structlog.get_logger()

_PIN_S = 60.0
"""Maximum time for which cached pages are kept for a reader, in seconds."""


class WantedHistory(NamedTuple):
    """KV of a prompt to receive from its reader: `Add.receives` and `Add.worth`."""

    receives: int = 0
    worth: int = 1


_NO_HISTORY = WantedHistory()


@dataclass
class Job:
    """State of one sequence that this worker computes, or has cached.

    Attributes:
        start: the reader's message.
        ends_at_once: whether the next token reaches the maximum length, so that no KV is sent.
        expiry: timer that ends the sequence at its deadline.
        accepted: time of acceptance, in seconds of `time.perf_counter`.
        computing_since: start time of the first chunk, on the same clock; 0 until then.
        page_tables: pages with computed KV in each page group, by the index of the page in the
            sequence.
        computed: time of the first tokens, on the same clock; 0 until then.
        reused: number of tokens of the request that this worker does not compute.
        compiling: task that compiles the grammar and submits the job; None without a constraint.
        wanted: KV to receive from the reader.
        receiving: task that receives the KV of the first tokens; None if there is nothing to
            receive. The pages must not be freed before it has ended.
        first: first tokens sampled so far, one per choice.
    """

    session: "PrefillSession"
    start: pb.StartPrefill
    outgoing: Outgoing
    request: Request
    ends_at_once: bool
    expiry: asyncio.TimerHandle
    accepted: float = field(default_factory=time.perf_counter)
    computing_since: float = 0.0
    computed: float = 0.0
    reused: int = 0
    compiling: asyncio.Task[None] | None = None
    wanted: WantedHistory = _NO_HISTORY
    receiving: asyncio.Task[None] | None = None
    page_tables: tuple[tuple[int, ...], ...] = ()
    first: list[SampledToken] = field(default_factory=list)

    def add_pages(self, page_tables: tuple[tuple[int, ...], ...]) -> None:
        """Add the pages of a computed chunk."""
        before = self.page_tables or ((),) * len(page_tables)
        self.page_tables = tuple(map(add, before, page_tables))

    def end_span(self) -> None:
        """Record a child span for each stage that was reached, then end the span."""
        span, encodes = self.outgoing.span, self.outgoing.encodes
        if self.computing_since:
            stage = "pin" if self.start.cached else "queue"
            span.record(stage, self.accepted, self.computing_since)
        if self.computed and not self.start.cached:
            span.record("prefill", self.computing_since, self.computed)
        if encodes.end > encodes.start:
            segments = {"headrace.kv.segments": self.outgoing.issued}
            span.record("encode", encodes.start, encodes.end, segments)
        span.end()


class History(Protocol):
    """Receives KV of the first tokens of prompts from the readers, which have it cached."""

    def wanted(self, reader: decode_pb2.WorkerAddress, job: Job) -> WantedHistory:
        """Return which KV to receive for a new sequence, before the engine takes it."""

    def receive(self, reader: decode_pb2.WorkerAddress, job: Job, reserved: Reserved) -> None:
        """Start `Job.receiving`, which ends with a `HistoryArrived` unless it is cancelled."""

    def forget(self, peer: str) -> None:
        """Drop what is known of a reader that has left."""


class PrefillSession:
    """Executes the commands of one reader, and sends it the resulting events.

    Args:
        hello: the reader's message of the handshake.
        routes: ranks and KV heads between which KV is sent.
        worker: this worker.
        jobs: sequences of all sessions, by the engine's id.
        computes: whether this worker computes prompts for readers. Otherwise it sends only KV that
            it has cached.
        history: receives KV from the reader; None to compute all tokens that are not cached here.

    Attributes:
        peer: id of the reader.
        agent: name of the NIXL agent of its first rank, or "".
        reader: the reader, at the address at which it serves its own KV; that is "" if it does not.
    """

    def __init__(
        self,
        name: str,
        hello: pb.Hello,
        routes: tuple[Route, ...],
        worker: Worker,
        sender: Sender,
        jobs: dict[str, Job],
        *,
        computes: bool = True,
        history: History | None = None,
    ) -> None:
        self._name = name
        self.peer = hello.worker_id
        self.reader = decode_pb2.WorkerAddress(
            worker_id=hello.worker_id, epoch=hello.epoch, address=hello.address
        )
        self.agent = hello.endpoints[0].agent_name if hello.endpoints else ""
        self._computes = computes
        self._history = history
        self._slot_bytes = hello.slot_bytes
        self._routes = routes
        self._worker = worker
        self._sender = sender
        self._jobs = jobs
        # Number of the newest sequence; later ones have larger numbers.
        self._newest = -1
        self._outbox: asyncio.Queue[pb.PrefillEvent] = asyncio.Queue()

    async def run(self, commands: MessageStream) -> None:
        """Serve until the reader disconnects, then end its sequences."""
        writer = asyncio.create_task(self._write(commands))
        try:
            while (message := await next_message(commands)) is not None:
                for command in message.commands:
                    await self._apply(command, commands)
                    await asyncio.sleep(0)  # send events before the next start is processed
        finally:
            writer.cancel()
            for key, job in list(self._jobs.items()):
                if job.session is self:
                    self.end(key)

    async def _write(self, stream: MessageStream) -> None:
        while True:
            await stream.write(pb.PrefillEvents(events=await next_batch(self._outbox)))

    async def _apply(
        self,
        command: pb.PrefillCommand,
        context: MessageStream,
    ) -> None:
        match command.WhichOneof("command"):
            case "start":
                try:
                    self._start(command.start)
                except InvalidRequest as error:
                    self._fail(command.start.sequence, error_pb2.ERROR_CODE_INVALID, str(error))
            case "credit":
                credit = command.credit
                self._sender.credit(self._key(credit.sequence), credit.rank, credit.segments)
            case "acknowledge":
                done = command.acknowledge
                self._sender.acknowledge(self._key(done.sequence), done.index, done.timing)
            case "release":
                self.end(self._key(command.release.sequence))
            case _:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, "hello must be the first command only"
                )

    def _key(self, sequence: int) -> str:
        return f"{self._name}/{sequence}"

    def _start(self, start: pb.StartPrefill) -> None:
        key = self._key(start.sequence)
        message = start.request
        if start.sequence <= self._newest:  # its output could be mistaken for the first one's
            log.error("sequence started twice", request_id=message.request_id)
            return
        self._newest = start.sequence
        if self._worker.draining:
            self._fail(start.sequence, error_pb2.ERROR_CODE_DRAINING, "this worker is draining")
            return
        limits = self._worker.sizes.limits
        if len(self._jobs) >= limits.max_running + limits.max_waiting:
            self._fail(
                start.sequence,
                error_pb2.ERROR_CODE_OVERLOADED,
                f"the prefill worker is full: {len(self._jobs)} sequences",
            )
            return
        job = self._new_job(key, start)
        self._jobs[key] = job
        self._sender.open(job.outgoing)
        if job.request.sampling.constrained and not start.cached:
            job.compiling = asyncio.create_task(self._submit_constrained(key, job))
        else:
            self._submit(job)
        log.debug("prefill admitted", **job.outgoing.log_fields, tokens=len(job.request.tokens))

    def _new_job(self, key: str, start: pb.StartPrefill) -> Job:
        """Return the job of a new sequence.

        Raises:
            InvalidRequest: the message is malformed, or asks for what this worker does not do.
        """
        message = start.request
        request = request_from_message(key, message)
        sent = self._sent(start)
        deadline_s = deadline_from_message(start.deadline_s)
        outgoing = Outgoing(
            key=key,
            reader=self._name,
            peer=self.peer,
            sequence=start.sequence,
            sent=sent,
            request_id=message.request_id,
            attempt=message.attempt,
            agent=self.agent,
            slot_bytes=self._slot_bytes,
            routes=self._routes,
            emit=self._outbox.put_nowait,
            fail=lambda code, message: self.fail(key, code, message),
            span=request_span("Prefill/StartPrefill", start),
        )
        expiry = asyncio.get_running_loop().call_later(
            min(deadline_s, _PIN_S) if start.cached else deadline_s,
            self.fail,
            key,
            error_pb2.ERROR_CODE_DEADLINE,
            "the request's deadline passed",
        )
        limit = request.limit(self._worker.identity.model.context_length)
        ends_at_once = sent.samples_first and len(request.tokens) + 1 >= limit
        return Job(self, start, outgoing, request, ends_at_once, expiry)

    def _sent(self, start: pb.StartPrefill) -> SentTokens:
        """Return which KV a reader asks for.

        Raises:
            InvalidRequest: it cannot be sent.
        """
        try:
            if start.cached:
                plan, known = self._worker.engine.page_plan, count_tokens(start.request.tokens)
                return SentTokens.cached(plan, known, start.first_token)
            if not self._computes:
                raise ValueError("this worker does not compute prompts for other workers")
            return self._worker.sent_tokens(start.request, start.first_token)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    async def _submit_constrained(self, key: str, job: Job) -> None:
        """Submit a job once its grammar is compiled, or end it with an error."""
        code, message = error_pb2.ERROR_CODE_INVALID, ""
        try:
            job.request = await self._worker.with_grammar(job.request, job.start.request)
        except InvalidRequest as error:
            message = str(error)
        except Exception as error:
            log.exception("compiling a grammar failed", **job.outgoing.log_fields)
            code, message = error_pb2.ERROR_CODE_INTERNAL, f"compiling failed: {error!r}"
        if self._jobs.get(key) is job:
            if message:
                self.fail(key, code, message)
            else:
                self._submit(job)

    def _submit(self, job: Job) -> None:
        """Let the engine compute the prompt, or pin its pages."""
        if job.start.cached:
            self._worker.engine.submit(Pin(job.request))
            return
        if self._history is not None and job.request.sampling.prompt_logprobs is None:
            job.wanted = self._history.wanted(self.reader, job)
        self._worker.engine.submit(Add(job.request, True, *job.wanted))
        self._worker.report_admitted(job.start.request.placement_id)

    def receive(self, job: Job, reserved: Reserved) -> None:
        """Receive KV into pages that the engine has allocated for it."""
        assert self._history is not None
        self._history.receive(self.reader, job, reserved)

    def computing(self, job: Job) -> None:
        """Record the start of the first chunk; request credits if KV will be sent."""
        job.computing_since = time.perf_counter()
        if not job.ends_at_once:
            computing = pb.Computing(sequence=job.outgoing.sequence)
            self._outbox.put_nowait(pb.PrefillEvent(computing=computing))

    def scored(self, job: Job, logprobs: PromptLogprobs) -> None:
        """Send log probabilities of prompt tokens."""
        for piece in prompt_logprobs_to_messages(logprobs):
            scored = pb.PromptScored(sequence=job.outgoing.sequence, logprobs=piece)
            self._outbox.put_nowait(pb.PrefillEvent(scored=scored))

    def sampled(self, job: Job, token: SampledToken) -> bool:
        """Add one choice's first token; once all choices have one, send them and return True."""
        job.first.append(token)
        if len(job.first) < job.request.choices:
            return False
        self.report_computed(job)
        return True

    def report_computed(self, job: Job) -> None:
        """Send the first tokens of a computed prompt, if any are sampled."""
        job.computed = time.perf_counter()
        first = pb.FirstTokens(
            sequence=job.outgoing.sequence,
            tokens=[token_to_message(t) for t in job.first],
            queue_s=job.computing_since - job.accepted,
            prefill_s=job.computed - job.computing_since,
            reused_tokens=job.reused,
        )
        self._outbox.put_nowait(pb.PrefillEvent(first_tokens=first))

    def fail(self, key: str, code: "error_pb2.ErrorCode.ValueType", message: str) -> None:
        """End a sequence with an error."""
        job = self._jobs[key]
        job.outgoing.span.fail(error_reason(code), message)
        self._fail(job.outgoing.sequence, code, message)
        self.end(key)

    def end(self, key: str) -> None:
        """End a sequence and free its pages, slots and lease. Idempotent."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        job.expiry.cancel()
        job.end_span()
        self._sender.close(key)
        if job.receiving is None or job.receiving.done():
            self._worker.engine.submit(Cancel(key))
        else:
            job.receiving.add_done_callback(lambda _: self._worker.engine.submit(Cancel(key)))
            job.receiving.cancel()

    def _fail(self, sequence: int, code: "error_pb2.ErrorCode.ValueType", message: str) -> None:
        failed = pb.PrefillFailed(
            sequence=sequence, error=error_pb2.Error(code=code, message=message)
        )
        self._outbox.put_nowait(pb.PrefillEvent(failed=failed))
