"""Routes for operators: probes, metrics and version."""

from importlib.metadata import version

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from services.common.probes import RETRY_AFTER_S, health_answer, ready_answer
from services.gateway.gateway import Gateway
from services.gateway.http import response_schemas as schemas
from services.gateway.http.openapi import CONNECTION_ERRORS, document_responses
from services.gateway.http.responses import json_response

_METRICS_CONTENT = {"text/plain": {"schema": {"type": "string"}}}


class Operation:
    """The routes of a gateway that need no API key."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def attach(self, app: FastAPI) -> None:
        """Add the routes."""
        responses = {
            self.health: document_responses(schemas.HealthResponse, CONNECTION_ERRORS),
            self.ready: {
                **document_responses(schemas.ReadyResponse, CONNECTION_ERRORS),
                503: {"model": schemas.NotReadyResponse, "description": "Not ready."},
            },
            self.version: document_responses(schemas.VersionResponse, CONNECTION_ERRORS),
            self.metrics: {
                **document_responses(schemas.HealthResponse, CONNECTION_ERRORS),
                200: {"description": "Metrics.", "content": _METRICS_CONTENT},
            },
        }
        if self._gateway.settings.metrics_port is not None:
            del responses[self.metrics]
        for probe, documented in responses.items():
            path = f"/{probe.__name__}"
            response_class = PlainTextResponse if probe == self.metrics else JSONResponse
            app.get(path, responses=documented, response_class=response_class, tags=["operation"])(
                probe
            )
            app.head(path, include_in_schema=False)(probe)

    async def health(self) -> Response:
        """Return 200 while the process runs."""
        status, body = health_answer(None)
        return json_response(body, status)

    async def ready(self) -> Response:
        """Return 200 if requests can be served now, else 503 with the reason."""
        status, body = ready_answer(await self._gateway.not_ready())
        response = json_response(body, status)
        if status != 200:
            response.headers["retry-after"] = str(RETRY_AFTER_S)
        return response

    async def version(self) -> Response:
        """Return the version of the gateway."""
        return json_response({"version": version("headrace")})

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(
            generate_latest(self._gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST
        )
