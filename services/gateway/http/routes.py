"""Routes of the HTTP interface: OpenAI's API, probes, metrics and version."""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from services.common.errors import InvalidRequest, ServiceError
from services.common.probes import RETRY_AFTER_S, health_answer, ready_answer
from services.gateway.gateway import Gateway
from services.gateway.http import response_schemas as schemas
from services.gateway.http.formatting import ResponseInfo
from services.gateway.http.middleware import (
    RequestMiddleware,
    handle_error,
    handle_http_exception,
    read_body,
)
from services.gateway.http.openapi import (
    BODY_ERRORS,
    CONNECTION_ERRORS,
    GENERATION_ERRORS,
    READ_ERRORS,
    build_document,
    document_body,
    document_responses,
)
from services.gateway.http.page import Page
from services.gateway.http.responses import GenerationResponse
from services.gateway.http.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    StreamOptions,
    TokenizeBody,
    parse_body,
)
from services.gateway.requests import GenerationOptions, RequestContext

_DESCRIPTION = """OpenAI-compatible API.

Every error has the same body, `ErrorResponse`. An unknown path is a 404, and a method that a path
does not support is a 405 with `Allow`. Probes also support HEAD."""

_Body = TypeVar("_Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_METRICS_CONTENT = {"text/plain": {"schema": {"type": "string"}}}


def build_app(gateway: Gateway) -> ASGIApp:
    """Return the ASGI application of a gateway."""
    app = FastAPI(
        title="Headrace",
        version=version("headrace"),
        description=_DESCRIPTION,
        redirect_slashes=False,  # a redirect would contain the client's Host header
    )
    app.add_exception_handler(ServiceError, handle_error)
    app.add_exception_handler(Exception, handle_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    _Routes(gateway).attach(app)
    if gateway.settings.page:
        Page(gateway).attach(app)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build_document(app, gateway)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

    def count(route: str, status: int) -> None:
        gateway.metrics.requests.labels(route, str(status)).inc()

    return RequestMiddleware(app, count)


class _Routes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def attach(self, app: FastAPI) -> None:
        self._attach_inference(app)
        self._attach_probes(app)

    def _attach_inference(self, app: FastAPI) -> None:
        def post(
            path: str,
            endpoint: Callable[..., Awaitable[Response]],
            body: type[BaseModel],
            success: type[BaseModel],
            *,
            generates: bool,
        ) -> None:
            app.post(
                path,
                openapi_extra=document_body(body, self._gateway),
                responses=document_responses(
                    success, GENERATION_ERRORS if generates else BODY_ERRORS, streams=generates
                ),
                tags=["inference"],
            )(endpoint)

        def get(
            path: str,
            endpoint: Callable[..., Awaitable[Response]],
            success: type[BaseModel],
            *errors: int,
        ) -> None:
            responses = document_responses(success, (*READ_ERRORS, *errors))
            app.get(path, responses=responses, tags=["inference"])(endpoint)

        completion, chat = schemas.CompletionResponse, schemas.ChatResponse
        post("/v1/completions", self.completions, CompletionBody, completion, generates=True)
        post("/v1/chat/completions", self.chat_completions, ChatBody, chat, generates=True)
        tokenized, detokenized = schemas.TokenizeResponse, schemas.DetokenizeResponse
        post("/tokenize", self.tokenize, TokenizeBody, tokenized, generates=False)
        post("/detokenize", self.detokenize, DetokenizeBody, detokenized, generates=False)
        get("/v1/models", self.models, schemas.ModelListResponse)
        get("/v1/models/{name:path}", self.model, schemas.ModelResponse, 404)

    def _attach_probes(self, app: FastAPI) -> None:
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

    def _accept(self, request: Request) -> RequestContext:
        state = request.state
        return self._gateway.accept(
            state.request_id, request.headers.get("authorization"), state.span
        )

    async def _read(self, request: Request, body: type[_Body]) -> tuple[_Body, int]:
        """Return the parsed body and its size in bytes."""
        settings = self._gateway.settings
        with request.state.span.child("receive"):
            raw = await read_body(
                request, limit=settings.max_body_bytes, timeout_s=settings.body_timeout_s
            )
            parse = partial(
                parse_body,
                raw,
                body,
                max_depth=settings.max_json_depth,
                context_length=self._gateway.limits.context_length,
            )
            parsed = await self._gateway.prompts.compute(len(raw), parse)
        self._gateway.require_model(parsed.model)
        return parsed, len(raw)

    async def completions(self, request: Request) -> Response:
        """Complete one or several prompts."""
        context = self._accept(request)
        body, _ = await self._read(request, CompletionBody)
        options = body.options()
        with context.span.child("tokenize"):
            prompts = await self._prompts(body.prompt)
        requests = [
            self._gateway.builder.build(context, prompt, options, chat=False) for prompt in prompts
        ]
        info = self._info(f"cmpl-{context.request_id}", body, options, chat=False)
        return GenerationResponse(self._gateway, requests, info, stream=body.stream)

    async def chat_completions(self, request: Request) -> Response:
        """Generate the next message of a conversation."""
        context = self._accept(request)
        body, size = await self._read(request, ChatBody)
        options = body.options()
        with context.span.child("tokenize"):
            prompt = await self._gateway.prompts.encode_chat(
                body.messages, Message.as_template_input, size
            )
        generation = self._gateway.builder.build(
            context, prompt, options, chat=True, names=body.names
        )
        info = self._info(f"chatcmpl-{context.request_id}", body, options, chat=True)
        return GenerationResponse(self._gateway, [generation], info, stream=body.stream)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or of a conversation."""
        self._accept(request)
        body, size = await self._read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("set either prompt or messages, and not both", param="prompt")
        if body.messages is not None:
            tokens = await self._gateway.prompts.encode_chat(
                body.messages, Message.as_template_input, size
            )
        else:
            tokens = await self._gateway.prompts.encode(
                body.prompt or "",
                add_special=body.add_special_tokens,
                parse_special=body.parse_special,
            )
        limit = self._gateway.limits.context_length
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, including special tokens."""
        self._accept(request)
        body, size = await self._read(request, DetokenizeBody)
        tokenizer = self._gateway.model.tokenizer
        largest = max(body.tokens, default=0)
        if largest >= tokenizer.vocab_size:
            raise InvalidRequest(f"token id {largest} is outside the vocabulary", param="tokens")
        decode = partial(tokenizer.decode, body.tokens, skip_special=False)
        return _json({"prompt": await self._gateway.prompts.compute(size, decode)})

    async def models(self, request: Request) -> Response:
        """Return a list with the served model."""
        self._accept(request)
        return _json({"object": "list", "data": [self._describe()]})

    async def model(self, request: Request, name: str) -> Response:
        """Return the served model by name."""
        self._accept(request)
        if not name:
            raise HTTPException(404)
        self._gateway.require_model(name)
        return _json(self._describe())

    async def health(self) -> Response:
        """Return 200 while the process runs."""
        status, body = health_answer(None)
        return _json(body, status)

    async def ready(self) -> Response:
        """Return 200 if requests can be served now, else 503 with the reason."""
        status, body = ready_answer(await self._gateway.not_ready())
        response = _json(body, status)
        if status != 200:
            response.headers["retry-after"] = str(RETRY_AFTER_S)
        return response

    async def version(self) -> Response:
        """Return the version of the gateway."""
        return _json({"version": version("headrace")})

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(
            generate_latest(self._gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST
        )

    def _describe(self) -> dict[str, Any]:
        model = self._gateway.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "headrace",
            "max_model_len": self._gateway.limits.context_length,
        }

    def _info(
        self, id: str, body: CompletionBody | ChatBody, options: GenerationOptions, *, chat: bool
    ) -> ResponseInfo:
        model = self._gateway.model
        stream = body.stream_options or StreamOptions()
        return ResponseInfo(
            id=id,
            created=int(time.time()),
            model=model.name,
            tokenizer=model.tokenizer,
            chat=chat,
            with_logprobs=options.logprobs is not None,
            include_usage=stream.include_usage,
            continuous_usage=stream.continuous_usage_stats,
        )

    async def _prompts(
        self, prompt: str | list[str] | list[int] | list[list[int]]
    ) -> list[Sequence[int]]:
        """Return the token ids of each prompt."""
        if isinstance(prompt, str):
            return [await self._gateway.prompts.encode_prompt(prompt)]
        if prompt and isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        limit = self._gateway.settings.max_prompts
        if not 1 <= len(prompt) <= limit:
            raise InvalidRequest(f"a request must have 1 to {limit} prompts", param="prompt")
        prompts: list[Sequence[int]] = []
        for one in prompt:
            if isinstance(one, str):
                prompts.append(await self._gateway.prompts.encode_prompt(one))
            elif isinstance(one, list):
                prompts.append(one)
        return prompts


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
