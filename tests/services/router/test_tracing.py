"""Spans of the router, below those of gateways."""

import math

from services.common.otlp import exporting
from services.common.placement import Role
from services.router.app import build_dispatcher, create_app
from services.router.settings import RouterSettings
from tests.services.otlp_collector import PARENT, TRACE, TRACEPARENT, collecting
from tests.services.router.app import JSON, Clock, Router
from tests.services.router.samples import place_request

CONTEXT = {**JSON, "traceparent": TRACEPARENT}


async def test_place_call_has_a_span_below_that_of_its_gateway() -> None:
    call = place_request(request_id="mine")
    with collecting() as collector:
        settings = RouterSettings.model_validate({"otlp_endpoint": collector.url})
        clock = Clock()
        dispatcher = build_dispatcher(settings, now=-math.inf)
        app = create_app(settings, dispatcher, clock=clock)
        async with app.test_app():
            router = Router(app, dispatcher, clock)
            with exporting("router", settings):
                assert (await router.post("/v1/place", call, CONTEXT))[0] == 503
                await router.join("p", Role.PREFILL)
                await router.join("d", Role.DECODE)
                assert (await router.post("/v1/place", call, CONTEXT))[0] == 200
                assert (await router.post("/v1/place", place_request()))[0] == 200  # is not traced
    refused, placed = collector.spans
    for span, outcome in ((refused, "no_workers"), (placed, "placed")):
        assert (span.service, span.name, span.kind) == (
            "headrace-router",
            "POST /v1/place",
            "server",
        )
        assert (span.trace, span.parent) == (TRACE, PARENT)
        assert span.attributes["headrace.outcome"] == outcome
        assert span.attributes["headrace.request.id"] == "mine"
