"""The life of an admitted request: placement, streaming, and retries after a worker failure.

A request ends exactly once, with its output or with a `ServiceError`, and every placement is
released exactly once. After a failure before the first token, the request starts over on other
workers. After a later failure, the next attempt replays the prompt and the delivered tokens, so
that no token is repeated or changed.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from headrace.v1 import decode_pb2, error_pb2, sampling_pb2
from services.common.errors import (
    DeadlineExceeded,
    InternalFault,
    InvalidRequest,
    Overloaded,
    ServiceError,
    TooLarge,
    Unavailable,
)
from services.common.placement import Outcome, Placement, PlaceRequest, WorkerAddress
from services.common.tokenizer import Tokenizer
from services.common.tokenizer_identity import TokenizerIdentity
from services.common.tracing import Kind, Span
from services.gateway.metrics import GatewayMetrics
from services.gateway.progress import MAX_VOCAB_SIZE, Progress
from services.gateway.requests import GenerationRequest
from services.gateway.router_client import NoRouter, RoutedPlacement, RouterClient
from services.gateway.sessions import SessionPool, WorkerFailure, WorkerStream
from services.gateway.settings import GatewaySettings
from services.gateway.spans import attempt_span, end_attempt, generation_span
from services.gateway.text import TextAssembler, TextDelta
from services.gateway.timeline import RecentRequests, RequestTimeline
from services.gateway.wire import start_stream_message

log = structlog.get_logger()

_BACKOFF_S = 0.05  # delay before the second attempt; doubles with each further attempt
_MAX_BACKOFF_S = 1.0
_REFUSALS = (error_pb2.ERROR_CODE_OVERLOADED, error_pb2.ERROR_CODE_DRAINING)
_LOST_WORKER = (error_pb2.ERROR_CODE_UNSPECIFIED, error_pb2.ERROR_CODE_PREFILL_LOST)
_FINAL = {
    error_pb2.ERROR_CODE_INVALID: InvalidRequest,
    error_pb2.ERROR_CODE_DEADLINE: DeadlineExceeded,
    error_pb2.ERROR_CODE_CANCELLED: InternalFault,
}
_BLAMELESS = (*_FINAL, error_pb2.ERROR_CODE_LEASE_EXPIRED)  # caused by the request or by congestion


@dataclass
class _Retries:
    """Attempts of one request that did not complete it.

    Attributes:
        number: number of all of them.
        failures: number of those that count towards ``max_attempts``. An attempt that a draining
            worker ended after it had delivered tokens does not count: in a rolling restart, a long
            stream moves once for each worker.
        lost: workers that were lost. One that is tried again before the router knows is one loss.
        excluded: ids of workers that are used only as a last resort.
    """

    number: int = 0
    failures: int = 0
    lost: set[WorkerAddress] = field(default_factory=set)
    excluded: set[str] = field(default_factory=set)

    def add(self, failure: WorkerFailure, worker: WorkerAddress, *, progressed: bool) -> None:
        """Add an attempt that ``worker`` failed; ``progressed``: it had delivered tokens."""
        self.number += 1
        if failure.code in _LOST_WORKER:
            self.lost.add(worker)
        if progressed and failure.code == error_pb2.ERROR_CODE_DRAINING:
            self.excluded = {worker.worker_id}
        else:
            self.failures += 1
            self.excluded.add(worker.worker_id)


class Generator:
    """Generates the output of requests through routers and workers."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        model: str,
        tokenizer: Tokenizer,
        identity: TokenizerIdentity,
        router: RouterClient,
        sessions: SessionPool,
        metrics: GatewayMetrics,
        recent: RecentRequests,
    ) -> None:
        self._settings = settings
        self._model = model
        self._tokenizer = tokenizer
        self._identity = identity
        self._router = router
        self._sessions = sessions
        self._metrics = metrics
        self._recent = recent
        self._placing: set[asyncio.Timeout] = set()
        self._shutdown: ServiceError | None = None

    def stop_placing(self, error: ServiceError) -> None:
        """End the requests that wait for a placement, or for another one, with an error."""
        self._shutdown = error
        while self._placing:
            self._placing.pop().reschedule(0)  # now

    async def run(self, request: GenerationRequest) -> AsyncGenerator[list[TextDelta]]:
        """Yield the output as it arrives. Closing the generator cancels the stream on the worker.

        The caller enforces the deadline of the request.

        Raises:
            ServiceError: if the request cannot be completed.
        """
        options = request.options
        text = TextAssembler(self._tokenizer, options.n, options.stop)
        stop_token_ids = () if options.ignore_eos else self._tokenizer.eos_ids
        progress = Progress(request, stop_token_ids)
        self._metrics.prompt_tokens.inc(len(request.prompt))
        retries = _Retries()
        span = generation_span(request, self._model)
        timeline = self._recent.add(request, span)
        with span, timeline.ending():
            while not text.done:
                timeline.route()
                routed = await self._place(request, progress, retries, span)
                timeline.placed(routed.placement)
                worker, delivered = routed.placement.decode, progress.count
                model = routed.placement.model
                vocab_size = model.vocab_size if model else MAX_VOCAB_SIZE
                outcome, blame, stream = Outcome.CANCELLED, None, None
                attempt = attempt_span(span, routed, retries.number)
                try:
                    stream = self._start(
                        request, routed.placement, progress, retries, attempt.headers
                    )
                    while not text.done:
                        received = await stream.next()
                        progress.accept(received, worker.worker_id, vocab_size)
                        deltas = _assemble(received, text, timeline)
                        if deltas:
                            yield deltas
                    outcome = Outcome.OK
                except WorkerFailure as failure:
                    attempt.fail(failure.reason, failure.message)
                    timeline.fail(failure.reason)
                    outcome = Outcome.REFUSED if failure.code in _REFUSALS else Outcome.FAILED
                    failed, blame = _failed_worker(failure, routed)
                    retries.add(failure, failed or worker, progressed=progress.count > delivered)
                    if not progress.finish_reason():
                        self._check_retry(failure, progress, retries)
                finally:
                    if stream is not None:
                        stream.close(cancel=bool(progress.unfinished))
                    self._router.release(routed, outcome, blame)
                    end_attempt(attempt, outcome, blame)
                if outcome is not Outcome.OK:
                    if reason := progress.finish_reason():
                        yield text.push((), ((0, reason),))
                    else:
                        await asyncio.sleep(_backoff_s(retries.failures))
            timeline.finish(text.finish_reasons)

    def _start(
        self,
        request: GenerationRequest,
        placement: Placement,
        progress: Progress,
        retries: _Retries,
        trace: Mapping[str, str],
    ) -> WorkerStream:
        """Start a stream on the decode worker of a placement."""
        message = start_stream_message(
            request,
            placement,
            attempt=retries.number,
            replayed=progress.replayed,
            stop_token_ids=progress.stop_token_ids,
            deadline_s=request.context.deadline - time.monotonic(),
            trace=trace,
        )
        return self._sessions.get(placement.decode).start(message)

    async def _place(
        self, request: GenerationRequest, progress: Progress, retries: _Retries, parent: Span
    ) -> RoutedPlacement:
        """Place an attempt, in a span of its own, unless `stop_placing` was called."""
        if self._shutdown is not None:
            raise self._shutdown
        with parent.child("route", Kind.CLIENT, {"headrace.attempt": retries.number}) as span:
            try:
                async with asyncio.timeout(None) as scope:
                    self._placing.add(scope)
                    return await self._place_traced(request, progress, retries, span.headers)
            except TimeoutError:
                if self._shutdown is None or not scope.expired():
                    raise
                raise self._shutdown from None
            finally:
                self._placing.discard(scope)

    async def _place_traced(
        self,
        request: GenerationRequest,
        progress: Progress,
        retries: _Retries,
        trace: Mapping[str, str],
    ) -> RoutedPlacement:
        """Place an attempt. Workers that failed this request are used only as a last resort.

        A request waits while no router is reachable, and while workers register with a router that
        has just started. If a worker has already begun it, it also waits for workers to be ready.
        """
        began = time.monotonic()
        context, replayed = request.context, len(progress.replayed)
        until = min(began + self._settings.queue_wait_s, context.deadline)
        tries = 0
        while True:
            call = PlaceRequest(
                request_id=context.request_id,
                attempt=retries.number,
                model=self._model,
                prompt_tokens=len(request.prompt) + replayed,
                max_tokens=request.max_tokens - replayed,
                choices=request.options.n,
                tenant=context.tenant.id if context.tenant else None,
                weight=context.tenant.weight if context.tenant else 1,
                priority=-request.options.priority,  # routers place larger values first
                exclude=sorted(retries.excluded),
                wait_s=max(0.0, until - time.monotonic()),
            )
            try:
                routed = await self._router.place(call, trace)
            except (Overloaded, TooLarge, Unavailable) as error:
                if retries.excluded and not isinstance(error, NoRouter | Overloaded):
                    retries.excluded.clear()
                elif self._waits(error, retries) and time.monotonic() < until:
                    tries += 1
                    await asyncio.sleep(min(_backoff_s(tries), until - time.monotonic()))
                else:
                    raise
            else:
                self._check_tokenizer(routed)
                self._metrics.observe_routing(time.monotonic() - began)
                return routed

    @staticmethod
    def _waits(refusal: ServiceError, retries: _Retries) -> bool:
        """Return whether to repeat a refused placement request."""
        if retries.number > 0:
            return not isinstance(refusal, TooLarge)
        return isinstance(refusal, NoRouter)

    def _check_tokenizer(self, routed: RoutedPlacement) -> None:
        """Release the placement and raise `Unavailable` if the tokenizer does not fit its model."""
        model = routed.placement.model
        fault = model and self._identity.mismatch(model)
        if fault:
            self._router.release(routed, Outcome.CANCELLED)
            raise Unavailable(f"the gateway's tokenizer does not match the workers' model: {fault}")

    def _check_retry(self, failure: WorkerFailure, progress: Progress, retries: _Retries) -> None:
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
        if (final := _FINAL.get(failure.code)) is not None:
            raise final(failure.message)
        if progress.started and len(progress.delivered) > 1:
            raise Unavailable(
                f"{failure.message}; a request with n > 1 cannot continue on another worker"
            )
        lost, failures = len(retries.lost), retries.failures
        if lost >= self._settings.max_lost_workers:  # the request itself may be what crashes them
            raise Unavailable(f"{lost} workers were lost during this request: {failure.message}")
        if failures >= self._settings.max_attempts:
            error = Overloaded if failure.code in _REFUSALS else Unavailable
            raise error(f"after {failures} attempts: {failure.message}")
        self._metrics.failovers.labels(failure.reason).inc()


def _assemble(
    received: Sequence[decode_pb2.StreamDelta], text: TextAssembler, timeline: RequestTimeline
) -> list[TextDelta]:
    """Return the text of deltas from a worker, and record them."""
    if len(received) == 1:
        tokens: Sequence[sampling_pb2.Token] = received[0].tokens
        ended = [(end.choice, end.reason) for end in received[0].ended]
    else:
        tokens = [token for delta in received for token in delta.tokens]
        ended = [(end.choice, end.reason) for delta in received for end in delta.ended]
    if tokens:
        timeline.record_tokens(len(tokens))
    if received[-1].HasField("stages"):
        timeline.record_stages(received[-1].stages)
    return text.push(tokens, ended)


def _failed_worker(
    failure: WorkerFailure, routed: RoutedPlacement
) -> tuple[WorkerAddress | None, str | None]:
    """Return the worker named by a failure, and its id if the router should blame it.

    A worker that is not in the placement is None.
    """
    for worker in (routed.placement.decode, routed.placement.prefill):
        if worker is not None and worker.worker_id == failure.blame:
            return worker, None if failure.code in _BLAMELESS else worker.worker_id
    return None, None


def _backoff_s(failures: int) -> float:
    """Return the delay before the next attempt, in seconds.

    It is random, so that the requests of a lost worker do not all retry at the same time.
    """
    return float(min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** (failures - 1)) * random.uniform(0.5, 1))
