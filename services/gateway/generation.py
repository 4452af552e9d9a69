"""The life of an admitted request: placement, streaming, and retries after a worker failure.

A request ends exactly once, with its output or with a `ServiceError`, and every placement is
released exactly once. After a failure before the first token, the request starts over on other
workers. After a later failure, the next attempt replays the prompt and the delivered tokens, so
that no token is repeated or changed.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

import structlog

from headrace.v1 import decode_pb2, sampling_pb2
from services.common.error_codes import Cause
from services.common.errors import Unavailable
from services.common.placement import Outcome, Placement
from services.common.tracing import Span
from services.gateway.metrics import GatewayMetrics
from services.gateway.placer import Placer, Siblings
from services.gateway.progress import Progress
from services.gateway.recent import RecentRequests
from services.gateway.requests import GenerationRequest
from services.gateway.retries import Retries, backoff_s, final_error
from services.gateway.router_client import RoutedPlacement
from services.gateway.sessions import SessionPool, WorkerStream
from services.gateway.settings import GatewaySettings
from services.gateway.spans import attempt_span, end_attempt, generation_span
from services.gateway.text import Stops, TextAssembler, TextDelta
from services.gateway.timeline import RequestTimeline
from services.gateway.wire import start_stream_message
from services.gateway.worker_failure import WorkerFailure
from services.tokenizer.identity import TokenizerIdentity
from services.tokenizer.tokenizer import Tokenizer

log = structlog.get_logger()


class Generator:
    """Generates the output of requests through routers and workers."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        model: str,
        tokenizer: Tokenizer,
        identity: TokenizerIdentity,
        placer: Placer,
        sessions: SessionPool,
        metrics: GatewayMetrics,
        recent: RecentRequests,
    ) -> None:
        self._settings = settings
        self._model = model
        self._tokenizer = tokenizer
        self._identity = identity
        self._placer = placer
        self._sessions = sessions
        self._metrics = metrics
        self._recent = recent

    async def run(
        self, request: GenerationRequest, siblings: Siblings | None = None
    ) -> AsyncGenerator[list[TextDelta]]:
        """Yield the output as it arrives. Closing the generator cancels the stream on the worker.

        The caller enforces the deadline of the request.

        Args:
            siblings: state that the prompts of one client request share; None for a single prompt.

        Raises:
            ServiceError: if the request cannot be completed.
        """
        text = self._assembler(request)
        progress = Progress(request)
        self._metrics.prompt_tokens.inc(request.prompt_tokens)
        retries, siblings = Retries(), siblings or Siblings()
        span = generation_span(request, self._model)
        with span, self._recent.follow(request, span) as timeline:
            while not text.done:
                timeline.route()
                replayed = len(progress.replayed)
                placing = self._placer.place(request, siblings, retries, span, replayed=replayed)
                if (routed := await placing) is None:  # no worker has space for further tokens
                    yield text.push((), ((0, sampling_pb2.FINISH_REASON_LENGTH),))
                    break
                with routed:
                    timeline.placed(routed.placement)
                    ends = self._identity.stop_token_ids(routed.placement.model)
                    progress.begin(routed.placement, ends)
                    attempt, stream = attempt_span(span, routed, retries.number), None
                    try:
                        stream = self._start(request, routed.placement, progress, retries, attempt)
                        while not text.done:
                            received = await stream.next()
                            progress.accept(received, routed.placement)
                            deltas = _assemble(received, text, timeline, progress)
                            if not text.done:  # else the whole stream is closed
                                _cancel_stopped(stream, deltas, progress)
                            if deltas:
                                _report_cached(deltas[0], progress, timeline)
                                yield deltas
                        routed.outcome = Outcome.OK
                    except WorkerFailure as failure:
                        attempt.fail(failure.reason, failure.message)
                        timeline.fail(failure.reason)
                        _record_failure(failure, routed, retries, progress)
                        if not progress.finish_reason():
                            self._check_retry(failure, progress, retries)
                    finally:
                        if stream is not None:
                            stream.close(cancel=bool(progress.unfinished))
                        end_attempt(attempt, routed.outcome, routed.blame)
                if routed.outcome is not Outcome.OK:
                    if reason := progress.finish_reason():
                        yield text.push((), ((0, reason),))
                    else:
                        await asyncio.sleep(backoff_s(retries.failures))
            timeline.finish(text.finish_reasons)

    def _assembler(self, request: GenerationRequest) -> TextAssembler:
        options = request.options
        stops = Stops(
            options.stop,
            frozenset(options.stop_token_ids),
            min_tokens=options.min_tokens,
            included=options.include_stop_str_in_output,
        )
        return TextAssembler(
            self._tokenizer, options.n, stops, request.shown, discards=options.max_tokens == 0
        )

    def _start(
        self,
        request: GenerationRequest,
        placement: Placement,
        progress: Progress,
        retries: Retries,
        attempt: Span,
    ) -> WorkerStream:
        """Start a stream on the decode worker of a placement.

        Raises:
            WorkerFailure: if the tokenizer does not fit the worker's model, or if the worker has
                another version of the model that has generated the output so far.
        """
        worker_id = placement.decode.worker_id
        if fault := self._identity.mismatch(placement.model):
            raise WorkerFailure.unfit(
                f"the gateway's tokenizer does not match the workers' model: {fault}", worker_id
            )
        if progress.model_hash != placement.model.model_hash:
            raise WorkerFailure.unfit(
                f"workers serve different versions of {placement.model.name!r}", worker_id
            )
        message = start_stream_message(
            request,
            placement,
            attempt=retries.number,
            max_tokens=progress.max_tokens,
            replayed=progress.replayed,
            stop_token_ids=progress.stop_token_ids,
            deadline_s=request.context.deadline - time.monotonic(),
            trace=attempt.headers,
            prompt_logprobs=progress.prompt_logprobs,
        )
        return self._sessions.get(placement.decode).start(message)

    def _check_retry(self, failure: WorkerFailure, progress: Progress, retries: Retries) -> None:
        """Check that the request may be retried, and count the failover.

        Raises:
            ServiceError: if the failure ends the request.
        """
        log.warning(
            "worker failed a request",
            reason=failure.reason,
            blame=failure.blame,
            attempt=retries.number,
            started=progress.started,
            error=failure.message[:300],
        )
        error = final_error(
            failure,
            retries,
            max_attempts=self._settings.max_attempts,
            max_lost_workers=self._settings.max_lost_workers,
        )
        several = progress.started and len(progress.delivered) > 1
        if several and failure.verdict.error is None:
            error = Unavailable(
                f"{failure.message}; a request with n > 1 cannot continue on another worker"
            )
        if error is not None:
            raise error
        self._metrics.failovers.labels(failure.reason).inc()


def _assemble(
    received: Sequence[decode_pb2.StreamDelta],
    text: TextAssembler,
    timeline: RequestTimeline,
    progress: Progress,
) -> list[TextDelta]:
    """Return the text of deltas from a worker, and record them."""
    if len(received) == 1:
        tokens: Sequence[sampling_pb2.Token] = received[0].tokens
        ended = [(end.choice, end.reason) for end in received[0].ended]
    else:
        tokens = [token for delta in received for token in delta.tokens]
        ended = [(end.choice, end.reason) for delta in received for end in delta.ended]
    deltas = text.push(tokens, ended)
    timeline.record_tokens({d.choice: len(d.tokens) for d in deltas if d.tokens})
    if received[-1].HasField("stages"):
        timeline.record_stages(received[-1].stages)
    if scored := progress.newly_scored():
        deltas.insert(0, TextDelta(0, scored=scored))
    return deltas


def _report_cached(delta: TextDelta, progress: Progress, timeline: RequestTimeline) -> None:
    """Add the change of the number of cached prompt tokens to a delta, and record it."""
    delta.cached_tokens = progress.newly_cached()
    timeline.cached_tokens += delta.cached_tokens


def _cancel_stopped(stream: WorkerStream, deltas: Sequence[TextDelta], progress: Progress) -> None:
    """Cancel the choices that a stop string has ended, and that the worker still decodes."""
    for delta in deltas:
        if delta.finish and delta.choice in progress.unfinished:
            progress.unfinished.discard(delta.choice)
            stream.cancel_choice(delta.choice)


def _record_failure(
    failure: WorkerFailure, routed: RoutedPlacement, retries: Retries, progress: Progress
) -> None:
    """Set the outcome of a failed attempt, and count it.

    The router may blame the worker that the failure names only if the placement has it.
    """
    progress.fail(failure)
    refused = failure.verdict.cause is Cause.REFUSAL
    routed.outcome = Outcome.REFUSED if refused else Outcome.FAILED
    decode, prefill = routed.placement.decode, routed.placement.prefill
    named = [worker for worker in (decode, prefill) if worker and worker.worker_id == failure.blame]
    if named and failure.verdict.blames_worker:
        routed.blame = failure.blame
    retries.add(failure, named[0] if named else decode, progressed=progress.advanced)
