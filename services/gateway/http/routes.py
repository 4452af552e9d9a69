"""Routes of the HTTP interface: OpenAI's API and Anthropic's Messages API."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Generic, TypeVar, cast

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.grammar.spec import GrammarSpec
from services.common.errors import InvalidRequest, ServiceError
from services.common.token_ids import count_tokens, unpack_tokens
from services.gateway.chat_constraints import MessageChecker
from services.gateway.chats import ChatPlan
from services.gateway.constraints import Constraint
from services.gateway.gateway import Gateway, enforce_deadline
from services.gateway.http import response_schemas as schemas
from services.gateway.http.access import AccessMiddleware, allow_origins
from services.gateway.http.chat_request import ChatRequest
from services.gateway.http.conversation import Message
from services.gateway.http.encoder_routes import EncoderRoutes
from services.gateway.http.formatting import CompletionFormat, ResponseInfo
from services.gateway.http.messages import Messages
from services.gateway.http.messages_api.answer import MessagesFormat
from services.gateway.http.messages_api.body import CountTokensBody, MessagesBody, check_version
from services.gateway.http.messages_api.errors import PATH as MESSAGES_PATH
from services.gateway.http.messages_api.response_schemas import (
    CountTokensResponse,
    MessagesResponse,
)
from services.gateway.http.middleware import (
    RequestMiddleware,
    handle_error,
    handle_http_exception,
)
from services.gateway.http.openapi import (
    BODY_ERRORS,
    CHUNKS,
    GENERATION_ERRORS,
    MESSAGE_EVENTS,
    READ_ERRORS,
    RESPONSE_EVENTS,
    build_document,
    document_body,
    document_responses,
)
from services.gateway.http.operation import Operation
from services.gateway.http.page import Page
from services.gateway.http.prompt_parts import PromptFields
from services.gateway.http.reading import RequestReader
from services.gateway.http.responses import GenerationResponse, json_response
from services.gateway.http.responses_api.answer import ResponsesFormat
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.responses_api.response_schemas import ResponsesResponse
from services.gateway.http.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
)
from services.gateway.output.message_grammar import MessageGrammar
from services.gateway.prompt_logprobs import check_prompt_logprobs
from services.gateway.prompts import EncodedChat
from services.gateway.requests import (
    GenerationOptions,
    GenerationRequest,
    RequestContext,
    cache_salt,
)

_DESCRIPTION = """OpenAI's API, and Anthropic's Messages API below `/v1/messages`.

Every error has the same body, `ErrorResponse`; below `/v1/messages`, it is `MessagesErrorResponse`,
unless the connection finds the error before the request is complete. An unknown path is a 404, and
a method that a path does not support is a 405 with `Allow`. Probes also support HEAD."""

_Body = TypeVar("_Body", ChatBody, ResponsesBody, MessagesBody)


def build_app(gateway: Gateway) -> ASGIApp:
    """Return the ASGI application of a gateway."""
    app = FastAPI(
        title="Headrace",
        version=version("headrace"),
        description=_DESCRIPTION,
        redirect_slashes=False,  # a redirect would contain the client's Host header
        docs_url=None,  # FastAPI's pages load scripts from another host
        redoc_url=None,
    )
    app.add_exception_handler(ServiceError, handle_error)
    app.add_exception_handler(Exception, handle_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    _Routes(gateway).attach(app)
    Operation(gateway).attach(app)
    if gateway.settings.page:
        Page(gateway).attach(app)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build_document(app, gateway)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

    guarded: ASGIApp = AccessMiddleware(app, gateway)
    if origins := gateway.settings.allowed_origins:
        guarded = allow_origins(guarded, origins)
    return RequestMiddleware(guarded, gateway.metrics.requests, gateway.open_call)


@dataclass(frozen=True)
class _ChatGeneration(Generic[_Body]):
    """The generation of the next message of a chat.

    Attributes:
        asked: body that the client sent.
        body: the chat completion that it amounts to.
        messages: conversion of the output to a message; None if all of it is content.
    """

    asked: _Body
    body: ChatBody
    generation: GenerationRequest
    messages: Messages | None


class _Routes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        reader = RequestReader(gateway)
        self._accept, self._read = reader.accept, reader.read
        self._encoder = EncoderRoutes(gateway, reader)

    def attach(self, app: FastAPI) -> None:
        def post(
            path: str,
            endpoint: Callable[..., Awaitable[Response]],
            body: type[BaseModel],
            success: type[BaseModel],
            *,
            events: str | None = None,
        ) -> None:
            errors = BODY_ERRORS if events is None else GENERATION_ERRORS
            app.post(
                path,
                openapi_extra=document_body(body, self._gateway),
                responses=document_responses(success, errors, events=events, path=path),
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
        post("/v1/completions", self.completions, CompletionBody, completion, events=CHUNKS)
        post("/v1/chat/completions", self.chat_completions, ChatBody, chat, events=CHUNKS)
        response, events = ResponsesResponse, RESPONSE_EVENTS
        post("/v1/responses", self.responses, ResponsesBody, response, events=events)
        message, events = MessagesResponse, MESSAGE_EVENTS
        post(MESSAGES_PATH, self.messages, MessagesBody, message, events=events)
        path, counted = f"{MESSAGES_PATH}/count_tokens", CountTokensResponse
        post(path, self.count_tokens, CountTokensBody, counted)
        tokenized, detokenized = schemas.TokenizeResponse, schemas.DetokenizeResponse
        post("/tokenize", self.tokenize, TokenizeBody, tokenized)
        post("/detokenize", self.detokenize, DetokenizeBody, detokenized)
        self._encoder.attach(app)
        get("/v1/models", self.models, schemas.ModelListResponse)
        get("/v1/models/{name:path}", self.model, schemas.ModelResponse, 404)

    async def completions(self, request: Request) -> Response:
        """Complete one or several prompts."""
        context = self._accept(request)
        async with self._read(request, context, CompletionBody) as (body, size):
            options = body.options()
            salt = cache_salt(context.tenant, options.cache_salt)
            truncates = options.truncate_prompt_tokens is not None
            prompts = await self._prompts(body, size, salt, truncates=truncates)
        async with enforce_deadline(context.deadline):
            await self._gateway.grammars.check(options.constraint, context.owner)
        requests = [
            self._gateway.builder.build(context, prompt, options, chat=False) for prompt in prompts
        ]
        return self._respond(body, requests)

    async def chat_completions(self, request: Request) -> Response:
        """Generate the next message of a conversation."""
        context = self._accept(request)
        chat = await self._chat_generation(request, context, ChatBody, ChatRequest)
        return self._respond(chat.body, [chat.generation], chat.messages)

    async def responses(self, request: Request) -> Response:
        """Generate a response, as in OpenAI's Responses API. Nothing is stored."""
        context = self._accept(request)
        convert = ResponsesBody.as_chat
        chat = await self._chat_generation(request, context, ResponsesBody, convert)
        output = ResponsesFormat(
            chat.asked,
            id=f"resp_{context.request_id}",
            created=int(time.time()),
            model=self._gateway.model.name,
            prompt_tokens=chat.generation.prompt_tokens,
            messages=chat.messages,
        )
        return GenerationResponse(
            self._gateway, [chat.generation], output, stream=chat.asked.stream
        )

    async def messages(self, request: Request) -> Response:
        """Generate the next message of a conversation, as in Anthropic's Messages API."""
        context = self._accept(request)
        check_version(request.headers)
        convert = MessagesBody.as_chat
        chat = await self._chat_generation(request, context, MessagesBody, convert)
        output = MessagesFormat(
            request_id=context.request_id,
            model=self._gateway.model.name,
            prompt_tokens=chat.generation.prompt_tokens,
            messages=chat.messages,
        )
        return GenerationResponse(
            self._gateway, [chat.generation], output, stream=chat.asked.stream
        )

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of the prompt of a message."""
        context = self._accept(request)
        check_version(request.headers)
        salt = cache_salt(context.tenant, None)
        async with self._read(request, context, CountTokensBody) as (given, size):
            chat = await self._gateway.prompts.compute(size, given.as_chat)
            with chat.names.in_errors():
                plan = self._gateway.chats.plan(chat.conversation())
                encoded = await self._chat(chat.body.messages, plan, size, salt)
        return json_response({"input_tokens": count_tokens(encoded.packed)})

    async def _chat_generation(
        self,
        request: Request,
        context: RequestContext,
        asked: type[_Body],
        convert: Callable[[_Body], ChatRequest],
    ) -> "_ChatGeneration[_Body]":
        """Return the generation of the next message, for the body of any interface.

        Args:
            asked: type of the body.
            convert: returns the chat completion for a body.
        """
        async with self._read(request, context, asked) as (given, size):
            chat = await self._gateway.prompts.compute(size, partial(convert, given))
            body = chat.body
            with chat.names.in_errors():
                options = body.options()
                salt = cache_salt(context.tenant, options.cache_salt)
                plan = self._gateway.chats.plan(chat.conversation())
                truncates = options.truncate_prompt_tokens is not None
                encoded = await self._chat(body.messages, plan, size, salt, truncates=truncates)
        with chat.names.in_errors():
            generation, messages = await self._build_chat(
                context, body, options, plan, encoded, size
            )
        return _ChatGeneration(given, body, generation, messages)

    async def _build_chat(
        self,
        context: RequestContext,
        body: ChatBody,
        options: GenerationOptions,
        plan: ChatPlan,
        chat: EncodedChat,
        size: int,
    ) -> tuple[GenerationRequest, Messages | None]:
        """Return the request of a chat, and the conversion of its output; None for content only.

        Args:
            size: size of the client's body, in bytes.
        """
        generation = self._gateway.builder.build(
            context,
            chat.packed,
            options,
            chat=True,
            names=body.client_names,
            shown=plan.shown,
        )
        is_end_kept = chat.packed.endswith(generation.packed)  # unless it is cut on the right
        is_reasoning = chat.is_reasoning and is_end_kept
        grammar = plan.grammar(options.constraint, is_reasoning=is_reasoning)
        if grammar is not None:
            spec = await self._checked_spec(context, grammar, options.constraint, plan, size)
            generation = self._gateway.builder.constrain(generation, spec, grammar.field)
        new_parser = plan.parser_factory(
            is_reasoning=is_reasoning, gap=grammar.gap if grammar else ""
        )
        return generation, new_parser and Messages(new_parser, plan.new_call_id)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or of a conversation."""
        context = self._accept(request)
        salt = cache_salt(context.tenant, None)
        tokens: Sequence[int]
        async with self._read(request, context, TokenizeBody) as (body, size):
            if (body.prompt is None) == (body.messages is None):
                raise InvalidRequest("set either prompt or messages, and not both", param="prompt")
            if body.messages is not None:
                plan = self._gateway.chats.plan(body.chat_options())
                chat = await self._chat(body.messages, plan, size, salt)
                tokens = unpack_tokens(chat.packed)
            else:
                tokens = await self._gateway.prompts.encode(
                    body.prompt or "",
                    size,
                    salt,
                    add_special=body.add_special_tokens,
                    parse_special=body.parse_special,
                )
        _, _, limit = self._gateway.models[0]
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, including special tokens."""
        tokenizer = self._gateway.model.tokenizer
        async with self._read(request, self._accept(request), DetokenizeBody) as (body, size):
            for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
                self._gateway.builder.check_token(token, "tokens")
            decode = partial(tokenizer.decode, body.tokens, skip_special=False)
            text = await self._gateway.prompts.compute(size, decode)
        return json_response({"prompt": text})

    async def models(self, request: Request) -> Response:
        """Return the served models."""
        self._accept(request)
        return json_response({"object": "list", "data": self._describe()})

    async def model(self, request: Request, name: str) -> Response:
        """Return a served model by name."""
        self._accept(request)
        if not name:
            raise HTTPException(404)
        for described in self._describe():
            if described["id"] == name:
                return json_response(described)
        self._gateway.require_model(name)
        raise HTTPException(404)

    async def _checked_spec(
        self,
        context: RequestContext,
        grammar: MessageGrammar,
        answer: Constraint | None,
        plan: ChatPlan,
        size: int,
    ) -> GrammarSpec:
        """Return the constraint on the output of a chat, whose body has this size."""
        gateway = self._gateway
        compute = partial(gateway.prompts.compute, size)
        checker = MessageChecker(gateway.grammars, context.owner, plan.marks, compute)
        async with enforce_deadline(context.deadline):
            return await checker.check(grammar, answer)

    def _describe(self) -> list[dict[str, Any]]:
        """Return the served models: the one that generates text, and the encoder."""
        return [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "headrace",
                "max_model_len": longest,
            }
            for name, created, longest in self._gateway.models
        ]

    def _respond(
        self,
        body: CompletionBody | ChatBody,
        requests: Sequence[GenerationRequest],
        messages: Messages | None = None,
    ) -> Response:
        """Return the response that generates the output of the requests in a body."""
        check_prompt_logprobs(requests, self._gateway.settings.max_prompt_logprobs)
        model = self._gateway.model
        first = requests[0]
        stream = body.stream_options or StreamOptions()
        info = ResponseInfo(
            id=f"{'chatcmpl' if first.chat else 'cmpl'}-{first.context.request_id}",
            created=int(time.time()),
            model=model.name,
            tokenizer=model.tokenizer,
            prompt_tokens=sum(request.prompt_tokens for request in requests),
            chat=first.chat,
            with_logprobs=first.options.logprobs is not None,
            include_usage=stream.include_usage,
            continuous_usage=stream.continuous_usage_stats,
            prompts=_prompts_of_choices(requests) if body.return_token_ids else None,
            messages=messages,
            prompt_fields=_prompt_fields(requests),
        )
        output = CompletionFormat(info, choices=sum(request.options.n for request in requests))
        return GenerationResponse(self._gateway, requests, output, stream=body.stream)

    async def _chat(
        self,
        messages: Sequence[Message],
        plan: ChatPlan,
        size: int,
        salt: bytes,
        *,
        truncates: bool = False,
    ) -> EncodedChat:
        """Return the packed token ids of a conversation in a body of this size."""
        return await self._gateway.prompts.encode_chat(
            messages, Message.as_template_input, plan, size, salt, truncates=truncates
        )

    async def _prompts(
        self,
        body: CompletionBody,
        size: int,
        salt: bytes,
        *,
        truncates: bool,
    ) -> list[bytes]:
        """Return the packed token ids of each prompt in a body of this size."""
        prompt = body.prompt
        is_single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts = cast("list[str | list[int]]", [prompt] if is_single else prompt)
        limit = self._gateway.settings.max_prompts
        if not 1 <= len(prompts) <= limit:
            raise InvalidRequest(f"a request must have 1 to {limit} prompts", param="prompt")
        return [
            await self._gateway.prompts.encode_prompt(
                one, size, salt, add_special=body.add_special_tokens, truncates=truncates
            )
            if isinstance(one, str)
            else self._gateway.builder.pack(one)
            for one in prompts
        ]


def _prompts_of_choices(requests: Sequence[GenerationRequest]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the prompt of each choice, in the order of the choices."""
    prompts = (unpack_tokens(request.packed) for request in requests)
    return tuple(
        prompt
        for request, prompt in zip(requests, prompts, strict=True)
        for _ in range(request.options.n)
    )


def _prompt_fields(requests: Sequence[GenerationRequest]) -> PromptFields | None:
    """Return the fields of the response that depend on its prompts; None for none."""
    options = requests[0].options
    if not options.echo and options.prompt_logprobs is None:
        return None
    return PromptFields(
        tuple(unpack_tokens(request.packed) for request in requests),
        options.n,
        echo=options.echo,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
    )
