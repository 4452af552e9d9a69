"""Calls of encoder workers, and of gateways that place inputs on them."""

from collections.abc import Callable

import structlog

from services.common.encoder_placement import (
    EncodePlacement,
    EncodePlaceRequest,
    EncoderHeartbeat,
    EncoderList,
    EncoderRegistration,
)
from services.common.placement import Deregistration, HeartbeatReply, Release
from services.common.tracing import Attributes, Span, resume
from services.router.calls import Call, JsonCalls, placed
from services.router.encoders.dispatcher import EncoderDispatcher
from services.router.metrics import RouterMetrics

log = structlog.get_logger()

PLACE = "/v1/encoders/place"


def add_encoder_calls(
    calls: JsonCalls,
    encoders: EncoderDispatcher,
    metrics: RouterMetrics,
    clock: Callable[[], float],
) -> None:
    """Add the calls below ``/v1/encoders``."""

    @calls.post("/v1/encoders/register", EncoderRegistration)
    async def register(worker: EncoderRegistration, _call: Call) -> None:
        encoders.register(worker, clock())
        log.info(
            "encoder worker registered",
            worker=worker.worker_id,
            epoch=worker.epoch,
            address=worker.address,
            model=worker.model.name,
        )

    @calls.post("/v1/encoders/heartbeat", EncoderHeartbeat)
    async def heartbeat(beat: EncoderHeartbeat, _call: Call) -> HeartbeatReply:
        return HeartbeatReply(register_again=not encoders.heartbeat(beat, clock()))

    @calls.post("/v1/encoders/deregister", Deregistration)
    async def deregister(worker: Deregistration, _call: Call) -> None:
        encoders.fleet.deregister(worker.worker_id, worker.epoch)
        log.info("encoder worker deregistered", worker=worker.worker_id, epoch=worker.epoch)

    @calls.post(PLACE, EncodePlaceRequest)
    async def place(body: EncodePlaceRequest, call: Call) -> EncodePlacement:
        pending = encoders.submit(body, clock())
        span = _place_span(body, call)

        def record(outcome: str) -> None:
            metrics.encode_placements.labels(outcome).inc()
            metrics.encode_place_seconds.observe(clock() - pending.arrived)
            span.set({"headrace.outcome": outcome})
            span.end()

        return await placed(
            call, pending, cancel=lambda: encoders.cancel(pending, clock()), record=record
        )

    @calls.post("/v1/encoders/release", Release)
    async def release(body: Release, _call: Call) -> None:
        encoders.release(body, clock())


def listing(encoders: EncoderDispatcher, now: float) -> EncoderList:
    """Return the encoder workers and the encoders that they serve."""
    fleet = encoders.fleet
    return EncoderList(
        workers=fleet.views(now), models=fleet.readiness(now), waiting=len(encoders.queue)
    )


def _place_span(body: EncodePlaceRequest, call: Call) -> Span:
    attributes: Attributes = {
        "http.request.method": "POST",
        "http.route": PLACE,
        "headrace.request.id": body.request_id,
        "headrace.attempt": body.attempt,
        "headrace.prompt_tokens": body.tokens,
    }
    return resume(f"POST {PLACE}", call.headers, attributes)
