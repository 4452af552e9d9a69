"""The life of an admitted request for an encoder: parts, placement, and retries after failures.

A request ends exactly once, with the output of every input or with a `ServiceError`, and every
placement is released exactly once. A part whose worker fails is sent to another one.
"""

import asyncio
import time

import structlog

from headrace.v1 import encode_pb2, error_pb2, request_pb2
from services.common.encoder_placement import EncodePlacement, EncodePlaceRequest
from services.common.error_codes import Cause
from services.common.errors import ServiceError, Unavailable
from services.common.placement import Outcome
from services.common.token_ids import pack_tokens
from services.common.tracing import Kind, Span
from services.gateway.encoding.links import EncoderLinks
from services.gateway.encoding.request import FLOAT_BYTES, EncodingRequest, Part, cut
from services.gateway.metrics import GatewayMetrics
from services.gateway.placer import Placer, Siblings
from services.gateway.retries import Retries, backoff_s, final_error
from services.gateway.router_client import RoutedEncode
from services.gateway.settings import GatewaySettings
from services.gateway.worker_failure import WorkerFailure
from services.tokenizer.identity import TokenizerIdentity

log = structlog.get_logger()

_MAX_PARTS = 8
"""Maximum number of parts of one request that are placed or computed at the same time."""


class EncodingRunner:
    """Computes the outputs of requests through routers and encoder workers."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        identity: TokenizerIdentity,
        placer: Placer,
        links: EncoderLinks,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._placer = placer
        self._links = links
        self._metrics = metrics
        self._running: set[asyncio.Timeout] = set()
        self._shutdown: ServiceError | None = None

    def fail_all(self, error: ServiceError) -> None:
        """Fail all running requests with an error."""
        self._shutdown = error
        while self._running:
            self._running.pop().reschedule(0)  # now

    async def run(self, request: EncodingRequest) -> list[bytes]:
        """Return the output of each input: little-endian float32.

        The caller enforces the deadline of the request. Cancellation ends the calls of workers.

        Raises:
            ServiceError: if the request cannot be completed.
        """
        self._metrics.prompt_tokens.inc(request.tokens)
        with _span(request) as span:
            try:
                async with asyncio.timeout(None) as scope:
                    self._running.add(scope)
                    outputs = await self._parts(request, span)
            except TimeoutError:
                if self._shutdown is None or not scope.expired():
                    raise
                raise self._shutdown from None
            finally:
                self._running.discard(scope)
        self._metrics.encode_latency.observe(time.monotonic() - request.context.arrived)
        return outputs

    async def _parts(self, request: EncodingRequest, span: Span) -> list[bytes]:
        """Compute all parts of a request; the first failure cancels the others."""
        outputs = [b""] * len(request.inputs)
        siblings, slots = Siblings(), asyncio.Semaphore(_MAX_PARTS)
        models: set[str] = set()

        async def follow(part: Part) -> None:
            async with slots:
                found, model_hash = await self._part(request, part, siblings, span)
            models.add(model_hash)
            outputs[part.first : part.first + len(found)] = found

        dimension, limit = request.encoder.dimension, request.part_tokens
        failure: ServiceError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for part in cut(request.inputs, dimension, max_tokens=limit):
                    group.create_task(follow(part))
        except* ServiceError as errors:
            failure = next(e for e in errors.exceptions if isinstance(e, ServiceError))
        if failure is not None:  # Python before 3.11.4 puts what `except*` raises in a group
            raise failure
        if len(models) > 1:
            raise Unavailable(f"workers serve different versions of {request.model!r}")
        assert all(outputs), "a part has ended without outputs"
        return outputs

    async def _part(
        self, request: EncodingRequest, part: Part, siblings: Siblings, parent: Span
    ) -> tuple[list[bytes], str]:
        """Return the outputs of a part, and the hash of the model that computed them."""
        context, retries = request.context, Retries()
        message = EncodePlaceRequest(
            request_id=context.request_id,
            model=request.model,
            model_hash=request.encoder.model_hash,
            tokens=part.tokens,
            tenant=context.tenant.id if context.tenant else None,
            weight=context.tenant.weight if context.tenant else 1,
            priority=request.place_priority,
        )
        while True:
            routed = await self._placer.place_inputs(context, message, siblings, retries, parent)
            with routed:
                try:
                    outputs = await self._attempt(request, part, routed, retries, parent)
                    routed.outcome = Outcome.OK
                    return outputs, routed.placement.model.model_hash
                except WorkerFailure as failure:
                    _record(failure, routed, retries)
                    self._check_retry(failure, retries)
            await asyncio.sleep(backoff_s(retries.failures))

    async def _attempt(
        self,
        request: EncodingRequest,
        part: Part,
        routed: RoutedEncode,
        retries: Retries,
        parent: Span,
    ) -> list[bytes]:
        """Call the worker of a placement.

        Raises:
            WorkerFailure: if it has no outputs, or if its model is not the one for which the
                request was made.
        """
        placement = routed.placement
        worker_id = placement.worker.worker_id
        if fault := self._identity.mismatch(placement.model):
            raise WorkerFailure.unfit(
                f"the gateway's tokenizer does not match the workers' model: {fault}", worker_id
            )
        if placement.model.dimension != request.encoder.dimension:
            raise WorkerFailure.unfit(
                f"workers serve different versions of {request.model!r}", worker_id
            )
        attributes: dict[str, str | int] = {
            "headrace.attempt": retries.number,
            "headrace.encoder_worker": placement.worker.worker_id,
        }
        with parent.child("attempt", Kind.CLIENT, attributes) as span:
            try:
                reply = await self._links.encode(
                    placement.worker, _message(request, part, placement, retries.number, span)
                )
                _check(reply, part, placement)
            except WorkerFailure as failure:
                span.fail(failure.reason, failure.message)
                raise
        self._metrics.stages.labels("queue").observe(reply.queue_s)
        self._metrics.stages.labels("encode").observe(reply.compute_s)
        return list(reply.outputs)

    def _check_retry(self, failure: WorkerFailure, retries: Retries) -> None:
        """Check that a part may be retried, and count the failover.

        Raises:
            ServiceError: if the failure ends the request.
        """
        log.warning(
            "encoder worker failed a request",
            reason=failure.reason,
            blame=failure.blame,
            attempt=retries.number,
            error=failure.message[:300],
        )
        error = final_error(
            failure,
            retries,
            max_attempts=self._settings.max_attempts,
            max_lost_workers=self._settings.max_lost_workers,
        )
        if error is not None:
            raise error
        self._metrics.failovers.labels(failure.reason).inc()


def _record(failure: WorkerFailure, routed: RoutedEncode, retries: Retries) -> None:
    """Set the outcome of a failed attempt, and count it."""
    refused = failure.verdict.cause is Cause.REFUSAL
    routed.outcome = Outcome.REFUSED if refused else Outcome.FAILED
    worker = routed.placement.worker
    if failure.verdict.blames_worker:
        routed.blame = worker.worker_id
    retries.add(failure, worker, progressed=False)


def _message(
    request: EncodingRequest, part: Part, placement: EncodePlacement, attempt: int, span: Span
) -> encode_pb2.EncodeRequest:
    context = request.context
    return encode_pb2.EncodeRequest(
        request_id=context.request_id,
        attempt=attempt,
        placement_id=placement.placement_id,
        epoch=placement.worker.epoch,
        deadline_s=context.deadline - time.monotonic(),
        inputs=[
            encode_pb2.EncoderInput(tokens=pack_tokens(each.tokens), types=each.types)
            for each in part.inputs
        ],
        trace=request_pb2.TraceContext(**span.headers) if span.headers else None,
    )


def _check(reply: encode_pb2.EncodeReply, part: Part, placement: EncodePlacement) -> None:
    """Raise a `WorkerFailure` unless a reply has an output of the right size for each input."""
    size = placement.model.dimension * FLOAT_BYTES
    if len(reply.outputs) != len(part.inputs) or any(len(each) != size for each in reply.outputs):
        raise WorkerFailure(
            "a worker sent outputs that do not belong to the inputs",
            error_pb2.ERROR_CODE_INTERNAL,
            placement.worker.worker_id,
        )


def _span(request: EncodingRequest) -> Span:
    attributes: dict[str, str | int] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": request.model,
        "gen_ai.usage.input_tokens": request.tokens,
        "headrace.inputs": len(request.inputs),
        "headrace.request.id": request.context.request_id,
    }
    return request.context.span.child(
        f"{request.operation} {request.model}", Kind.INTERNAL, attributes
    )
