"""The life of an admitted request: placed, streamed, placed again where a worker fails it.

It ends exactly once, with its answer or with a `ServiceError`, and gives every placement back
exactly once. A failure before the first token starts over elsewhere. After it the prompt is
replayed with the tokens that were already passed on, so that none is repeated or changed.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence

import structlog

from headrace.v1 import decode_pb2, error_pb2, sampling_pb2
from services.common.errors import (
    DeadlineExceeded,
    InternalFault,
    InvalidRequest,
    Overloaded,
    TooLarge,
    Unavailable,
)
from services.common.placement import Outcome
from services.common.tokenizer import Tokenizer
from services.gateway.metrics import GatewayMetrics
from services.gateway.progress import Progress
from services.gateway.requests import GenerationRequest
from services.gateway.router_client import Placed, RouterClient
from services.gateway.sessions import Sessions, WorkerFailure
from services.gateway.settings import GatewaySettings
from services.gateway.text import Piece, TextAssembly

log = structlog.get_logger()

_BACKOFF_S = 0.05  # before the second attempt; doubles with each further one, up to
_MAX_BACKOFF_S = 1.0
_REFUSALS = (
    error_pb2.ERROR_CODE_OVERLOADED,
    error_pb2.ERROR_CODE_DRAINING,
)
_LOSSES = (error_pb2.ERROR_CODE_UNSPECIFIED, error_pb2.ERROR_CODE_PREFILL_LOST)
_FINAL = {
    error_pb2.ERROR_CODE_INVALID: InvalidRequest,
    error_pb2.ERROR_CODE_DEADLINE: DeadlineExceeded,
    error_pb2.ERROR_CODE_CANCELLED: InternalFault,
}


class Generator:
    """Answers requests through routers and workers."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        model: str,
        tokenizer: Tokenizer,
        router: RouterClient,
        sessions: Sessions,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings = settings
        self._model = model
        self._tokenizer = tokenizer
        self._router = router
        self._sessions = sessions
        self._metrics = metrics

    async def run(self, request: GenerationRequest) -> AsyncGenerator[list[Piece]]:
        """The pieces of an answer as they come. Close it to cancel, down to the worker.

        The caller holds it to the request's deadline.

        Raises:
            ServiceError: why there is no answer, or no more of it.
        """
        text = TextAssembly(self._tokenizer, request.choices, request.stop)
        progress = Progress(request, () if request.ignore_eos else self._tokenizer.eos_ids)
        watch = _Stopwatch(request.arrived, self._metrics)
        self._metrics.prompt_tokens.inc(len(request.prompt))
        excluded: set[str] = set()
        attempt, lost = 0, 0
        while not text.done:
            placed = await self._place(request, progress, attempt, excluded)
            worker = placed.placement.decode
            outcome, blame, stream = Outcome.CANCELLED, None, None
            try:
                stream = self._sessions.get(worker).start(
                    progress.start(placed, attempt, request.deadline - _now())
                )
                while not text.done:
                    deltas = await stream.next()
                    progress.accept(deltas, worker.worker_id)
                    pieces = self._assemble(deltas, text, watch)
                    if pieces:
                        yield pieces
                outcome = Outcome.OK
            except WorkerFailure as failure:
                outcome = Outcome.REFUSED if failure.code in _REFUSALS else Outcome.FAILED
                blame = _blamed(failure, placed)
                attempt, lost = attempt + 1, lost + (failure.code in _LOSSES)
                if not progress.end():
                    self._check_retry(failure, request, progress, attempt, lost)
                excluded.add(blame or worker.worker_id)
            finally:
                if stream is not None:
                    stream.close(cancel=bool(progress.unended))
                self._router.release(placed, outcome, blame)
            if outcome is not Outcome.OK:
                if reason := progress.end():
                    yield text.push((), ((0, reason),))
                else:
                    await asyncio.sleep(_backoff_s(attempt))
        watch.finish()

    def _assemble(
        self, deltas: Sequence[decode_pb2.StreamDelta], text: TextAssembly, watch: "_Stopwatch"
    ) -> list[Piece]:
        if len(deltas) == 1:
            tokens: Sequence[sampling_pb2.Token] = deltas[0].tokens
            ended = [(end.choice, end.reason) for end in deltas[0].ended]
        else:
            tokens = [token for delta in deltas for token in delta.tokens]
            ended = [(end.choice, end.reason) for delta in deltas for end in delta.ended]
        if tokens:
            watch.tokens(len(tokens))
        if deltas[-1].HasField("stages"):
            self._metrics.stages(deltas[-1].stages)
        return text.push(tokens, ended)

    async def _place(
        self, request: GenerationRequest, progress: Progress, attempt: int, excluded: set[str]
    ) -> Placed:
        """A place for an attempt. Workers that failed this request are avoided while others can
        take it."""
        began = _now()
        wait_s = max(0.0, min(self._settings.queue_wait_s, request.deadline - began))
        while True:
            asked = progress.place(self._model, attempt, excluded, wait_s)
            try:
                placed = await self._router.place(asked)
            except (TooLarge, Unavailable):
                if not excluded:
                    raise
                excluded.clear()
            else:
                self._metrics.routed(_now() - began)
                return placed

    def _check_retry(
        self,
        failure: WorkerFailure,
        request: GenerationRequest,
        progress: Progress,
        attempts: int,
        lost: int,
    ) -> None:
        """Returns where another attempt may follow.

        Raises:
            ServiceError: none may.
        """
        log.warning(
            "worker failed a request",
            reason=failure.reason,
            blame=failure.blame,
            attempt=attempts,
            started=progress.started,
            error=failure.message[:300],
        )
        if (final := _FINAL.get(failure.code)) is not None:
            raise final(failure.message)
        if progress.started and request.choices > 1:
            raise Unavailable(f"{failure.message}; n > 1 cannot be continued elsewhere")
        if lost >= self._settings.max_lost_workers:  # it may be what ends them
            raise Unavailable(f"{lost} workers ended under this request: {failure.message}")
        if attempts >= self._settings.max_attempts:
            error = Overloaded if failure.code in _REFUSALS else Unavailable
            raise error(f"after {attempts} attempts: {failure.message}", retry_after_s=1.0)
        self._metrics.failovers.labels(failure.reason).inc()


class _Stopwatch:
    """Measures one request, from its arrival."""

    def __init__(self, arrived: float, metrics: GatewayMetrics) -> None:
        self._arrived = arrived
        self._metrics = metrics
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        now = _now()
        if self._last is None:
            self._metrics.first_token.observe(now - self._arrived)
        else:
            self._metrics.inter_token.observe((now - self._last) / count)
        self._last = now
        self._metrics.generation_tokens.inc(count)

    def finish(self) -> None:
        self._metrics.end_to_end.observe(_now() - self._arrived)


def _blamed(failure: WorkerFailure, placed: Placed) -> str | None:
    """Whom the router shall be told of: a worker of this placement, or nobody."""
    placement = placed.placement
    workers = {placement.decode.worker_id}
    if placement.prefill is not None:
        workers.add(placement.prefill.worker_id)
    return failure.blame if failure.blame in workers else None


def _backoff_s(attempt: int) -> float:
    """Random, so that what one worker's end has failed does not come back all at once."""
    return float(min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1))


def _now() -> float:
    return asyncio.get_running_loop().time()
