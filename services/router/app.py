"""The router's HTTP API: the calls of workers and gateways, listings, probes and metrics."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from random import Random

import structlog
from quart import Quart, Request, Response, request
from quart.typing import ResponseTypes
from starlette.types import Receive, Scope, Send
from werkzeug.exceptions import BadHost

from services.common.listings import ModelList, ReadinessList, WorkerList
from services.common.placement import (
    Deregistration,
    Heartbeat,
    HeartbeatReply,
    Placement,
    PlaceRequest,
    Registration,
    Release,
)
from services.common.prefix_hashes import HEADER, decode_hashes
from services.common.probes import health_answer, ready_answer
from services.common.router_errors import ErrorCode
from services.common.tracing import Attributes, Span, resume
from services.router.access import Access
from services.router.admission import Admission
from services.router.answers import CONTENT_TYPE, Answer, answer, error_answer
from services.router.calls import Call, JsonCalls, placed
from services.router.dispatcher import Dispatcher
from services.router.encoders.calls import add_encoder_calls, listing
from services.router.encoders.dispatcher import EncoderDispatcher
from services.router.encoders.fleet import EncoderFleet
from services.router.errors import Refusal
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.queue import PlacementQueue
from services.router.readiness import readiness
from services.router.settings import RouterSettings

log = structlog.get_logger()


def build_dispatcher(settings: RouterSettings, now: float) -> Dispatcher:
    """Return a dispatcher with the limits and policy in ``settings``; the router starts ``now``."""
    return Dispatcher(
        Fleet(settings.fleet),
        PlacementQueue(settings.max_waiting),
        settings.policy,
        Random(settings.seed),
        output_reserve=settings.output_reserve,
        max_wait_s=settings.max_wait_s,
        admission=Admission(settings.admission),
        settled_at=now + settings.gone_after_s,
    )


def build_encoder_dispatcher(settings: RouterSettings, now: float) -> EncoderDispatcher:
    """Return a dispatcher of encoder workers; the router starts ``now``."""
    return EncoderDispatcher(
        EncoderFleet(settings.fleet),
        settings.policy,
        Random(settings.seed),
        Admission(settings.admission),
        max_waiting=settings.max_waiting,
        max_wait_s=settings.max_wait_s,
        backlog_s=settings.prompt_backlog_s,
        settled_at=now + settings.gone_after_s,
    )


class _App(Quart):
    """Quart with calls that it does not serve itself.

    It also answers requests with an invalid ``Host`` header, which Quart finds before any route.
    """

    def __init__(self, calls: JsonCalls, retry_after_s: int) -> None:
        super().__init__(__name__)
        self._calls = calls
        self._retry_after_s = retry_after_s
        self.register_error_handler(Exception, self._refuse)

    async def asgi_app(self, scope: Scope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        if self._calls.serves(scope):
            await self._calls(scope, receive, send)
        else:
            await super().asgi_app(scope, receive, send)  # type: ignore[arg-type]

    async def handle_request(self, request: Request) -> ResponseTypes:
        try:
            return await super().handle_request(request)
        except BadHost:
            error = BadHost("the Host header is not valid")
            return _response(error_answer(error, request.path, self._retry_after_s))

    async def _refuse(self, error: Exception) -> Response:
        return _response(error_answer(error, request.path, self._retry_after_s))


def create_app(
    settings: RouterSettings,
    dispatcher: Dispatcher | None = None,
    encoders: EncoderDispatcher | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Quart:
    """Return the app. While it serves, it advances the dispatcher every ``tick_s`` seconds.

    Args:
        dispatcher, encoders: dispatchers to use. By default, new ones are created from the
            settings.
        clock: monotonic clock, in seconds.
    """
    router = dispatcher or build_dispatcher(settings, clock())
    encoders = encoders or build_encoder_dispatcher(settings, clock())
    metrics = RouterMetrics()
    access = Access(settings)
    metrics.secrets.observe(settings.secret_files, settings.token_check)
    calls = JsonCalls(
        access,
        metrics.count,
        max_body_bytes=settings.max_body_bytes,
        retry_after_s=settings.retry_after_s,
    )
    _add_calls_of_workers(calls, router, clock)
    _add_calls_of_gateways(calls, router, metrics, clock)
    add_encoder_calls(calls, encoders, metrics, clock)
    app = _App(calls, settings.retry_after_s)
    app.url_map.merge_slashes = False  # no redirects
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    _add_listings(app, router, encoders, clock)
    _add_probes(app, router, settings.retry_after_s)
    _add_metrics(app, router, encoders, metrics, clock)

    @app.before_request
    async def check() -> None:
        access.check(request.path, request.headers.getlist)

    @app.after_request
    async def count(response: Response) -> Response:
        metrics.count(
            request.url_rule.rule if request.url_rule else "unknown", response.status_code
        )
        return response

    @app.while_serving
    async def tick() -> AsyncGenerator[None, None]:
        ticking = asyncio.create_task(
            _advance_periodically(router, encoders, settings.tick_s, clock)
        )
        yield
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking

    return app


async def _advance_periodically(
    router: Dispatcher,
    encoders: EncoderDispatcher,
    tick_s: float,
    clock: Callable[[], float],
) -> None:
    while True:
        try:
            for gone in (*router.advance(clock()), *encoders.advance(clock())):
                log.warning("worker removed", worker=gone.worker_id, epoch=gone.epoch)
            router.failure = None
        except Exception as error:
            reason = f"placing queued requests failed: {error!r}"
            if reason != router.failure:  # not in every tick
                log.exception("advancing the dispatcher failed")
            router.failure = reason
        await asyncio.sleep(tick_s)


def _add_calls_of_workers(calls: JsonCalls, router: Dispatcher, clock: Callable[[], float]) -> None:
    @calls.post("/v1/register", Registration)
    async def register(worker: Registration, _call: Call) -> None:
        router.register(worker, clock())
        log.info(
            "worker registered",
            worker=worker.worker_id,
            epoch=worker.epoch,
            role=worker.role.value,
            address=worker.address,
            model=worker.model.name,
        )
        if reason := router.fleet.unmatched.get(worker.worker_id):
            log.warning("worker gets no requests", worker=worker.worker_id, reason=reason)

    @calls.post("/v1/heartbeat", Heartbeat)
    async def heartbeat(beat: Heartbeat, _call: Call) -> HeartbeatReply:
        known = router.heartbeat(beat, clock())
        reason = router.fleet.unmatched.get(beat.worker_id)
        return HeartbeatReply(register_again=not known, unmatched=reason)

    @calls.post("/v1/deregister", Deregistration)
    async def deregister(worker: Deregistration, _call: Call) -> None:
        router.fleet.deregister(worker.worker_id, worker.epoch)
        log.info("worker deregistered", worker=worker.worker_id, epoch=worker.epoch)


def _add_calls_of_gateways(
    calls: JsonCalls, router: Dispatcher, metrics: RouterMetrics, clock: Callable[[], float]
) -> None:
    @calls.post("/v1/place", PlaceRequest)
    async def place(body: PlaceRequest, call: Call) -> Placement:
        pending = router.submit(body, clock(), _prefix(call))
        span = _place_span(body, call)

        def record(outcome: str) -> None:
            metrics.placements.labels(outcome).inc()
            metrics.place_seconds.observe(clock() - pending.arrived)
            span.set({"headrace.outcome": outcome})
            span.end()
            log.debug(
                "place",
                request_id=body.request_id,
                attempt=body.attempt,
                tenant=body.tenant,
                outcome=outcome,
                **span.ids,
            )

        placement = await placed(
            call, pending, cancel=lambda: router.cancel(pending, clock()), record=record
        )
        metrics.count_expected(pending.expected)
        return placement

    @calls.post("/v1/release", Release)
    async def release(body: Release, _call: Call) -> None:
        router.release(body, clock())


def _add_listings(
    app: Quart, router: Dispatcher, encoders: EncoderDispatcher, clock: Callable[[], float]
) -> None:
    @app.get("/v1/encoders")
    async def encoder_workers() -> Response:
        return _response(answer(listing(encoders, clock())))

    @app.get("/v1/workers")
    async def workers() -> Response:
        views = router.fleet.views(clock())
        return _response(answer(WorkerList(workers=views, waiting=len(router.queue))))

    @app.get("/v1/readiness")
    async def ready_models() -> Response:
        now = clock()
        models = readiness(router.fleet.snapshots(now), settled=router.is_settled(now))
        return _response(answer(ReadinessList(models=models)))

    @app.get("/v1/models")
    async def models() -> Response:
        return _response(answer(ModelList(models=router.fleet.models())))


def _prefix(call: Call) -> tuple[bytes, ...]:
    """Return the hashes of the beginning of the prompt that the gateway sent.

    Raises:
        Refusal: if the header is not valid.
    """
    try:
        return decode_hashes(next(iter(call.headers(HEADER)), ""))
    except ValueError as error:
        raise Refusal(ErrorCode.INVALID, f"header {HEADER}: {error}") from None


def _place_span(body: PlaceRequest, call: Call) -> Span:
    """Start the span of a placement request, as a child of the gateway's span in its headers."""
    attributes: Attributes = {
        "http.request.method": "POST",
        "http.route": "/v1/place",
        "headrace.request.id": body.request_id,
        "headrace.attempt": body.attempt,
        "headrace.prompt_tokens": body.prompt_tokens,
    }
    return resume("POST /v1/place", call.headers, attributes)


async def not_ready(router: Dispatcher) -> str | None:
    """Return why the router accepts no calls, or None if it does, even without workers.

    Kubernetes sends no traffic to a router that is not ready. Workers could then not register.
    """
    return "draining" if router.closed else None


async def failure(router: Dispatcher) -> str | None:
    """Return why the process must be restarted, or None while it works."""
    return router.failure


def _add_probes(app: Quart, router: Dispatcher, retry_after_s: int) -> None:
    @app.get("/health")
    async def health() -> Response:
        status, body = health_answer(await failure(router))
        return _response(Answer(json.dumps(body), status))

    @app.get("/ready")
    async def ready() -> Response:
        status, body = ready_answer(await not_ready(router))
        wait_s = retry_after_s if status != 200 else None
        return _response(Answer(json.dumps(body), status, wait_s))


def _add_metrics(
    app: Quart,
    router: Dispatcher,
    encoders: EncoderDispatcher,
    metrics: RouterMetrics,
    clock: Callable[[], float],
) -> None:
    @app.get("/metrics")
    async def expose() -> Response:
        now = clock()
        views, encoding = router.fleet.views(now), listing(encoders, now)
        text = metrics.render(views, len(router.queue), encoding)
        return Response(text, content_type="text/plain; version=0.0.4; charset=utf-8")


def _response(answered: Answer) -> Response:
    response = Response(answered.body, answered.status, content_type=CONTENT_TYPE)
    if answered.retry_after_s is not None:
        response.headers["Retry-After"] = str(answered.retry_after_s)
    return response
