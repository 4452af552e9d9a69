"""Authentication of requests, and reading of their bodies."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel

from services.gateway.gateway import Gateway, enforce_deadline
from services.gateway.http.body import read_body, require_json
from services.gateway.http.body_model import Body
from services.gateway.http.encoder_api.bodies import EmbeddingsBody, RerankBody, ScoreBody
from services.gateway.http.messages_api.body import CountTokensBody, MessagesBody
from services.gateway.http.middleware import cancel_on_disconnect
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from services.gateway.requests import RequestContext
from services.gateway.settings import GatewaySettings

_Body = TypeVar(
    "_Body",
    CompletionBody,
    ChatBody,
    ResponsesBody,
    MessagesBody,
    CountTokensBody,
    TokenizeBody,
    DetokenizeBody,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
)


_OF_TOKENIZER = (TokenizeBody, DetokenizeBody)
"""Requests that an encoder's tokenizer answers if no model generates text."""


def body_limit(body: type[BaseModel], settings: GatewaySettings) -> int:
    """Return the maximum size of a body, bytes."""
    for_encoder = issubclass(body, Body) and body.for_encoder
    return settings.encoder_body_bytes if for_encoder else settings.max_body_bytes


class RequestReader:
    """Reads the requests of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def accept(self, request: Request) -> RequestContext:
        """Authenticate a request and set its deadline.

        The API key is a bearer token, or as in Anthropic's API in the header ``x-api-key``.

        Raises:
            Unauthenticated: if the key is missing or unknown.
            Unavailable: if the gateway is draining.
        """
        state = request.state
        authorization = request.headers.get("authorization")
        if authorization is None and (key := request.headers.get("x-api-key")):
            authorization = f"Bearer {key}"
        return self._gateway.accept(state.request_id, authorization, state.client, state.span)

    @asynccontextmanager
    async def read(
        self, request: Request, context: RequestContext, body: type[_Body]
    ) -> AsyncGenerator[tuple[_Body, int]]:
        """Read and parse a body; return it and its size in bytes.

        The request holds memory, and a slot for large requests, until the end of the block. It
        leaves the queue for slots if its client disconnects or its deadline passes.
        """
        gateway, settings = self._gateway, self._gateway.settings
        require_json(request)
        with gateway.buffers.open(context.owner.name) as grow:
            with context.span.child("receive"):
                raw = await read_body(
                    request,
                    grow,
                    limit=body_limit(body, settings),
                    timeout_s=settings.body_timeout_s,
                )
            size = len(raw)
            waits = not gateway.prompts.is_available(context.owner, size)
            parse = partial(
                parse_body,
                raw,
                body,
                max_depth=settings.max_json_depth,
                context_length=gateway.limits.context_length,
            )
            with context.span.child("tokenize"):
                async with (
                    enforce_deadline(context.deadline),
                    cancel_on_disconnect(request.receive) if waits else nullcontext(),
                    gateway.prompts.slot(context.owner, size),
                ):
                    parsed = await gateway.prompts.compute(size, parse)
                    if body.for_encoder:
                        gateway.require_encoder(parsed.model)
                    elif body not in _OF_TOKENIZER or gateway.model.generates:
                        gateway.require_model(parsed.model)
                    yield parsed, size
