"""The router's HTTP API: parses request bodies, calls the dispatcher and formats responses."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from random import Random
from typing import TypeVar

import structlog
from pydantic import BaseModel, ValidationError
from quart import Quart, Request, Response, request
from quart.typing import ResponseTypes
from werkzeug.exceptions import BadHost, Forbidden, HTTPException, UnsupportedMediaType

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
from services.common.probes import health_answer, ready_answer
from services.common.router_errors import ErrorCode, RouterError, RouterErrorDetail
from services.common.tracing import Attributes, Span, resume
from services.router.admission import Admission
from services.router.dispatcher import Dispatcher
from services.router.errors import InvalidBody, RouterException, Unauthenticated
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.queue import PlacementQueue
from services.router.readiness import readiness
from services.router.settings import RouterSettings

log = structlog.get_logger()

M = TypeVar("M", bound=BaseModel)


def build_dispatcher(settings: RouterSettings, now: float) -> Dispatcher:
    """Return a dispatcher with the settings' limits and policy, of a router that starts ``now``."""
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


class _App(Quart):
    """Quart with an answer to an invalid ``Host`` header, which it finds before any route."""

    async def handle_request(self, request: Request) -> ResponseTypes:
        try:
            return await super().handle_request(request)
        except BadHost:
            return _error(400, ErrorCode.INVALID, "the Host header is not valid")


def create_app(
    settings: RouterSettings,
    dispatcher: Dispatcher | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Quart:
    """Return the app. While it serves, it advances the dispatcher every ``tick_s`` seconds.

    Args:
        dispatcher: dispatcher to use. By default, a new one is created from the settings.
        clock: monotonic clock, in seconds.
    """
    app = _App(__name__)
    app.url_map.merge_slashes = False  # no redirects
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    router = dispatcher or build_dispatcher(settings, clock())
    metrics = RouterMetrics()
    metrics.secrets.observe(settings.secret_files, settings.token_check)
    _add_workers_api(app, router, clock)
    _add_gateways_api(app, router, metrics, clock)
    _add_probes(app, router, metrics, clock, settings.retry_after_s)
    _add_auth(app, settings)
    _add_errors(app, settings.retry_after_s)

    @app.after_request
    async def count(response: Response) -> Response:
        endpoint = request.url_rule.rule if request.url_rule else "unknown"
        metrics.requests.labels(endpoint, str(response.status_code)).inc()
        return response

    @app.while_serving
    async def tick() -> AsyncGenerator[None, None]:
        ticking = asyncio.create_task(_advance_periodically(router, settings.tick_s, clock))
        yield
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking

    return app


async def _advance_periodically(
    router: Dispatcher, tick_s: float, clock: Callable[[], float]
) -> None:
    while True:
        try:
            for gone in router.advance(clock()):
                log.warning("worker removed", worker=gone.worker_id, epoch=gone.epoch)
            router.failure = None
        except Exception as error:
            reason = f"placing queued requests failed: {error!r}"
            if reason != router.failure:  # not in every tick
                log.exception("advancing the dispatcher failed")
            router.failure = reason
        await asyncio.sleep(tick_s)


def _add_workers_api(app: Quart, router: Dispatcher, clock: Callable[[], float]) -> None:
    @app.post("/v1/register")
    async def register() -> Response:
        worker = await _body(Registration)
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
        return _empty()

    @app.post("/v1/heartbeat")
    async def heartbeat() -> Response:
        beat = await _body(Heartbeat)
        known = router.heartbeat(beat, clock())
        reason = router.fleet.unmatched.get(beat.worker_id)
        return _json(HeartbeatReply(register_again=not known, unmatched=reason))

    @app.post("/v1/deregister")
    async def deregister() -> Response:
        worker = await _body(Deregistration)
        router.fleet.deregister(worker.worker_id, worker.epoch)
        log.info("worker deregistered", worker=worker.worker_id, epoch=worker.epoch)
        return _empty()


def _add_gateways_api(
    app: Quart, router: Dispatcher, metrics: RouterMetrics, clock: Callable[[], float]
) -> None:
    @app.post("/v1/place")
    async def place() -> Response:
        body = await _body(PlaceRequest)
        call = router.submit(body, clock())
        span = _place_span(body)
        outcome = "abandoned"
        try:
            await call.answered.wait()
            answer = call.answer
            if not isinstance(answer, Placement):
                raise answer or RuntimeError("a placement request ended without an answer")
            outcome = "placed"
            return _json(answer)
        except asyncio.CancelledError:
            router.cancel(call, clock())
            raise
        except RouterException as refusal:
            outcome = refusal.code.value
            raise
        finally:
            metrics.placements.labels(outcome).inc()
            metrics.place_seconds.observe(clock() - call.arrived)
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

    @app.post("/v1/release")
    async def release() -> Response:
        router.release(await _body(Release), clock())
        return _empty()

    @app.get("/v1/workers")
    async def workers() -> Response:
        views = router.fleet.views(clock())
        return _json(WorkerList(workers=views, waiting=len(router.queue)))

    @app.get("/v1/readiness")
    async def ready_models() -> Response:
        return _json(_readiness(router, clock()))

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(ModelList(models=router.fleet.models()))


def _readiness(router: Dispatcher, now: float) -> ReadinessList:
    infos = {v.worker_id: v.model_info for v in router.fleet.views(now) if v.model_info}
    workers, settled = router.fleet.snapshots(now), router.is_settled(now)
    return ReadinessList(models=readiness(workers, infos, settled=settled))


def _place_span(body: PlaceRequest) -> Span:
    """Start the span of a placement request, as a child of the gateway's span in its headers."""
    attributes: Attributes = {
        "http.request.method": "POST",
        "http.route": "/v1/place",
        "headrace.request.id": body.request_id,
        "headrace.attempt": body.attempt,
        "headrace.prompt_tokens": body.prompt_tokens,
    }
    return resume("POST /v1/place", request.headers.getlist, attributes)


async def not_ready(router: Dispatcher) -> str | None:
    """Return why the router accepts no calls, or None if it does, even without workers.

    Kubernetes sends no traffic to a router that is not ready. Workers could then not register.
    """
    return "draining" if router.closed else None


async def failure(router: Dispatcher) -> str | None:
    """Return why the process must be restarted, or None while it works."""
    return router.failure


def _add_probes(
    app: Quart,
    router: Dispatcher,
    metrics: RouterMetrics,
    clock: Callable[[], float],
    retry_after_s: int,
) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _probe(*health_answer(await failure(router)))

    @app.get("/ready")
    async def ready() -> Response:
        response = _probe(*ready_answer(await not_ready(router)))
        if response.status_code != 200:
            response.headers["Retry-After"] = str(retry_after_s)
        return response

    @app.get("/metrics")
    async def expose() -> Response:
        text = metrics.render(router.fleet.views(clock()), len(router.queue))
        return Response(text, content_type="text/plain; version=0.0.4; charset=utf-8")


def _add_auth(app: Quart, settings: RouterSettings) -> None:
    check = settings.token_check
    hosts = settings.host_check(authenticated=settings.authenticates_services)

    @app.before_request
    async def authenticate() -> None:
        if hosts and (refusal := hosts.refusal(request.headers.getlist("Host"))):
            raise Forbidden(refusal)
        given = request.headers.get("Authorization", "")
        if check is None:
            return
        if request.path == "/metrics":
            authorized = check.accepts_scraper(given)
        else:
            needs_none = not request.path.startswith("/v1/")
            authorized = needs_none or check.accepts(given)
        if not authorized:
            raise Unauthenticated("the cluster token is missing or wrong")


def _add_errors(app: Quart, retry_after_s: int) -> None:
    @app.errorhandler(RouterException)
    async def refuse(refusal: RouterException) -> Response:
        response = _error(refusal.status, refusal.code, str(refusal))
        if refusal.retry:
            response.headers["Retry-After"] = str(refusal.retry_after_s or retry_after_s)
        return response

    @app.errorhandler(HTTPException)
    async def http(error: HTTPException) -> Response:
        code = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.NOT_FOUND, 413: ErrorCode.TOO_LARGE}
        status = error.code or 500
        default = ErrorCode.INVALID if status < 500 else ErrorCode.INTERNAL
        return _error(status, code.get(status, default), error.description or error.name)

    @app.errorhandler(Exception)
    async def fault(error: Exception) -> Response:
        log.error("request failed", path=request.path, exc_info=error)
        return _error(500, ErrorCode.INTERNAL, "internal error")


async def _body(model: type[M]) -> M:
    """Parse the request body.

    Raises:
        UnsupportedMediaType: if it is not declared as JSON. Browsers send other types for web pages
            of any origin without asking the server first.
        InvalidBody: if it does not match the model; the message names the first invalid field.
        RequestEntityTooLarge: if it is longer than ``max_body_bytes``.
    """
    if request.mimetype != "application/json":
        raise UnsupportedMediaType("the content type must be application/json")
    try:
        return model.model_validate_json(await request.get_data(cache=False))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"])) or "body"
        raise InvalidBody(f"{where}: {fault['msg']}") from None


def _json(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status, content_type="application/json")


def _probe(status: int, body: dict[str, str]) -> Response:
    return Response(json.dumps(body), status, content_type="application/json")


def _empty() -> Response:
    return Response("{}", content_type="application/json")


def _error(status: int, code: ErrorCode, message: str) -> Response:
    return _json(RouterError(error=RouterErrorDetail(code=code, message=message)), status)
