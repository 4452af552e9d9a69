"""The OpenAPI document: every status, content type and header that a route may answer with."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.gateway import Gateway
from services.gateway.http.encoder_api.bodies import EmbeddingsBody, RerankBody, ScoreBody
from services.gateway.http.messages_api.body import CountTokensBody, MessagesBody
from services.gateway.http.messages_api.errors import is_messages_path
from services.gateway.http.messages_api.response_schemas import MessagesErrorResponse
from services.gateway.http.reading import body_limit
from services.gateway.http.response_schemas import ErrorResponse
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.schemas import BODIES

_SCHEMAS = "#/components/schemas/{model}"
# Schema of one server-sent event, in the form that OpenAPI tools expect.
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_EVENTS = {"text/event-stream": {"schema": _EVENT}}
_ERROR = {"$ref": _SCHEMAS.format(model=ErrorResponse.__name__)}
_MESSAGES_ERROR = {"$ref": _SCHEMAS.format(model=MessagesErrorResponse.__name__)}
_BEARER, _HEADER = "ApiKey", "ApiKeyHeader"
"""Names of the ways to send an API key."""

_DESCRIPTIONS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The `Host` header has a name that this server does not accept.",
    404: "The model is not served.",
    408: "The request did not arrive in time, or waited too long in the queue.",
    413: "The body is too large.",
    415: "The content type of the body is not `application/json`.",
    429: "There are too many connections or requests; retry after `Retry-After` seconds.",
    431: "The request headers are too large.",
    500: "The service failed.",
    503: "No worker is available, or the service is shutting down; see `Retry-After`.",
    504: "The deadline of the request passed.",
}
CONNECTION_ERRORS = (400, 403, 408, 429, 431, 500)
"""Statuses with which the connection may answer any request before a route is called."""
READ_ERRORS = (*CONNECTION_ERRORS, 401, 503)
"""Statuses of routes that need a key and refuse requests during a drain."""
BODY_ERRORS = (*READ_ERRORS, 404, 413, 415)
GENERATION_ERRORS = (*BODY_ERRORS, 504)

_STRING, _INTEGER = {"type": "string"}, {"type": "integer", "minimum": 1}
_REQUEST_ID = {
    "description": "id of the request, for logs; the client's `x-request-id` if it sent one",
    "required": True,
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}
_RETRY_AFTER = {"description": "time until a retry makes sense, seconds", "schema": _INTEGER}


CHUNKS = (
    "chunks in OpenAI's format, then `[DONE]`. An error after the first chunk is the last event "
    "and has the body of an error."
)
"""Description of the events of completions."""
RESPONSE_EVENTS = (
    "the events of OpenAI's Responses API, in order of their `sequence_number`. The last one is "
    "`response.completed`, `response.incomplete` or `response.failed`."
)
"""Description of the events of the Responses API."""
MESSAGE_EVENTS = (
    "the events of Anthropic's Messages API, from `message_start` to `message_stop`. After an "
    "error, the last one is `error`."
)
"""Description of the events of the Messages API."""


def document_responses(
    success: type[BaseModel], errors: Iterable[int], *, events: str | None = None, path: str = ""
) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` argument of a FastAPI route.

    Args:
        success: model of the body of status 200.
        errors: statuses with an `ErrorResponse` body.
        path: path of the route, if errors may have another format than OpenAI's.
        events: description of the server-sent events that the response with status 200 may also
            be; None if it is always JSON.
    """
    responses: dict[int | str, dict[str, Any]] = {200: {"model": success}}
    if events is not None:
        responses[200]["content"] = _EVENTS
        responses[200]["description"] = f"JSON, or with `stream` server-sent events: {events}"
    for status in sorted(errors):
        schema: dict[str, Any] = _ERROR
        if is_messages_path(path):
            # Errors that the connection finds have no path, and OpenAI's format.
            can_be_early = status in CONNECTION_ERRORS
            schema = {"anyOf": [_MESSAGES_ERROR, _ERROR]} if can_be_early else _MESSAGES_ERROR
        content = {"application/json": {"schema": schema}}
        responses[status] = {"content": content, "description": _DESCRIPTIONS[status]}
    return responses


def document_body(body: type[BaseModel], gateway: Gateway) -> dict[str, Any]:
    """Return the ``openapi_extra`` argument of a route that parses its own body."""
    settings = gateway.settings
    schema = {"$ref": _SCHEMAS.format(model=body.__name__)}
    description = (
        f"At most {body_limit(body, settings)} bytes (else 413) and {settings.max_json_depth} "
        f"levels of nesting (else 400), received within {settings.body_timeout_s:g} s (else 408)."
    )
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


def build_document(app: FastAPI, gateway: Gateway) -> dict[str, Any]:
    """Return FastAPI's document with request bodies, headers and authentication added."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    models: tuple[type[BaseModel], ...] = (
        *BODIES,
        ResponsesBody,
        MessagesBody,
        CountTokensBody,
        EmbeddingsBody,
        RerankBody,
        ScoreBody,
        ErrorResponse,
        MessagesErrorResponse,
    )
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template=_SCHEMAS
    )
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete_responses(operation["responses"], path)
            if gateway.keys.required and "401" in operation["responses"]:
                operation["security"] = [{_BEARER: []}, {_HEADER: []}]
    if gateway.keys.required:
        components["securitySchemes"] = {
            _BEARER: {"type": "http", "scheme": "bearer"},
            _HEADER: {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return document


def _complete_responses(responses: dict[str, Any], path: str) -> None:
    # FastAPI adds 422 to every route with parameters, but the parameters here accept any text.
    responses.pop("422", None)
    for status, response in responses.items():
        headers: dict[str, Any] = {"x-request-id": _REQUEST_ID}
        if is_messages_path(path):
            headers["request-id"] = {"description": "the same id", "schema": _STRING}
        if status in ("429", "503"):
            headers["retry-after"] = _RETRY_AFTER
        if status == "401":
            headers["www-authenticate"] = {"required": True, "schema": _STRING}
        if status in map(str, CONNECTION_ERRORS):
            headers["connection"] = {
                "description": "`close` if the connection is closed",
                "schema": _STRING,
            }
        response["headers"] = headers
