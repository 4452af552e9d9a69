"""The HTTP interface: OpenAI's API, and what operators ask for."""

import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from services.common.errors import InvalidRequest, ServiceError
from services.gateway.gateway import Gateway
from services.gateway.http.answers import AnswerShape
from services.gateway.http.middleware import Edge, read_body, refuse, refuse_route
from services.gateway.http.responses import GeneratedResponse
from services.gateway.http.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from services.gateway.requests import Arrival

_BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_SCHEMAS = "#/components/schemas/{model}"


def build_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application of one gateway."""
    app = FastAPI(
        title="Headrace",
        version=version("headrace"),
        description="OpenAI-compatible API",
        redirect_slashes=False,  # a redirect would name whatever host the client did
    )
    app.add_exception_handler(ServiceError, refuse)
    app.add_exception_handler(Exception, refuse)
    app.add_exception_handler(HTTPException, refuse_route)
    _Routes(gateway).attach(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]

    def count(route: str, status: int) -> None:
        gateway.metrics.requests.labels(route, str(status)).inc()

    return Edge(app, count)


class _Routes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def attach(self, app: FastAPI) -> None:
        def post(
            path: str, endpoint: Callable[..., Awaitable[Response]], body: type[BaseModel]
        ) -> None:
            schema = {"$ref": _SCHEMAS.format(model=body.__name__)}
            content = {"application/json": {"schema": schema}}
            extra = {"requestBody": {"required": True, "content": content}}
            app.post(path, openapi_extra=extra, tags=["inference"])(endpoint)

        post("/v1/completions", self.completions, CompletionBody)
        post("/v1/chat/completions", self.chat_completions, ChatBody)
        post("/tokenize", self.tokenize, TokenizeBody)
        post("/detokenize", self.detokenize, DetokenizeBody)
        app.get("/v1/models", tags=["inference"])(self.models)
        app.get("/v1/models/{name:path}", tags=["inference"])(self.model)
        for probe in (self.health, self.ready, self.version, self.metrics):
            path = f"/{probe.__name__}"
            app.get(path, tags=["operation"])(probe)
            app.head(path, include_in_schema=False)(probe)

    def _arrive(self, request: Request) -> Arrival:
        return self._gateway.arrive(request.state.request_id, request.headers.get("authorization"))

    async def _read(self, request: Request, body: type[Any]) -> Any:
        settings = self._gateway.settings
        raw = await read_body(
            request, limit=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )
        parsed = parse_body(raw, body, max_depth=settings.max_json_depth)
        self._gateway.require_model(parsed.model)
        return parsed

    async def completions(self, request: Request) -> Response:
        """Continues one prompt or several."""
        arrival = self._arrive(request)
        body: CompletionBody = await self._read(request, CompletionBody)
        wanted = body.wanted()
        requests = [
            self._gateway.checker.build(arrival, prompt, wanted, fill_context=False)
            for prompt in await self._prompts(body.prompt)
        ]
        shape = self._shape(f"cmpl-{arrival.request_id}", body, wanted.logprobs, chat=False)
        return GeneratedResponse(self._gateway, requests, shape, stream=bool(body.stream))

    async def chat_completions(self, request: Request) -> Response:
        """Continues a conversation."""
        arrival = self._arrive(request)
        body: ChatBody = await self._read(request, ChatBody)
        wanted = body.wanted()
        prompt = await self._gateway.encode_chat(
            [message.as_template_input() for message in body.messages]
        )
        requests = [self._gateway.checker.build(arrival, prompt, wanted, fill_context=True)]
        shape = self._shape(f"chatcmpl-{arrival.request_id}", body, wanted.logprobs, chat=True)
        return GeneratedResponse(self._gateway, requests, shape, stream=bool(body.stream))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        self._arrive(request)
        body: TokenizeBody = await self._read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("either prompt or messages", param="prompt")
        if body.messages is not None:
            tokens = await self._gateway.encode_chat(
                [message.as_template_input() for message in body.messages]
            )
        else:
            tokens = await self._gateway.encode(
                body.prompt or "",
                add_special=body.add_special_tokens,
                parse_special=body.parse_special,
            )
        limit = self._gateway.model.context_length
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones shown."""
        self._arrive(request)
        body: DetokenizeBody = await self._read(request, DetokenizeBody)
        tokenizer = self._gateway.model.tokenizer
        for token in body.tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise InvalidRequest(f"token id {token} is outside the vocabulary", param="tokens")
        return _json({"prompt": tokenizer.decode(body.tokens, skip_special=False)})

    async def models(self, request: Request) -> Response:
        """The models served: one."""
        self._arrive(request)
        return _json({"object": "list", "data": [self._describe()]})

    async def model(self, request: Request, name: str) -> Response:
        """One model by its name."""
        self._arrive(request)
        if not name:
            raise HTTPException(404)
        self._gateway.require_model(name)
        return _json(self._describe())

    async def health(self) -> Response:
        """The process lives."""
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        """A request would find workers."""
        if await self._gateway.ready():
            return _json({"status": "ready"})
        reason = "draining" if self._gateway.draining else "no workers"
        return _json({"status": "not ready", "reason": reason}, status=503)

    async def version(self) -> Response:
        """The version of this gateway."""
        return _json({"version": version("headrace")})

    async def metrics(self) -> Response:
        """Prometheus' text format."""
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
            "max_model_len": model.context_length,
        }

    def _shape(
        self, id: str, body: CompletionBody | ChatBody, logprobs: int | None, *, chat: bool
    ) -> AnswerShape:
        model = self._gateway.model
        return AnswerShape(
            id=id,
            created=int(time.time()),
            model=model.name,
            tokenizer=model.tokenizer,
            chat=chat,
            with_logprobs=logprobs is not None,
            include_usage=body.include_usage,
        )

    async def _prompts(
        self, prompt: str | list[str] | list[int] | list[list[int]]
    ) -> list[Sequence[int]]:
        """Token ids of each prompt, whichever form they came in."""
        if isinstance(prompt, str):
            return [await self._gateway.encode_prompt(prompt)]
        if prompt and isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        limit = self._gateway.settings.max_prompts
        if not 1 <= len(prompt) <= limit:
            raise InvalidRequest(f"1 to {limit} prompts in one request", param="prompt")
        prompts: list[Sequence[int]] = []
        for one in prompt:
            if isinstance(one, str):
                prompts.append(await self._gateway.encode_prompt(one))
            elif isinstance(one, list):
                prompts.append(one)
        return prompts


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the bodies that the endpoints read by themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, bodies = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template=_SCHEMAS
        )
        known = schema.setdefault("components", {}).setdefault("schemas", {})
        known.update(bodies["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema
