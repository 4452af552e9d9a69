"""The gRPC interface ``headrace.v1.Inference``. It uses the same `Gateway` as HTTP."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc import aio
from grpc_status import rpc_status

from headrace.v1 import inference_pb2, inference_pb2_grpc
from services.common.clients import FORWARDED_FOR, Client, ClientAddresses, split_grpc_peer
from services.common.errors import (
    ClientGone,
    InternalFault,
    InvalidRequest,
    ServiceError,
    TooLarge,
    detached,
)
from services.common.grpc_limits import ServerLimits
from services.common.grpc_server import GrpcServer
from services.common.token_ids import unpack_tokens
from services.common.tracing import NO_SPAN, Span
from services.gateway.gateway import Gateway, enforce_deadline, valid_request_id
from services.gateway.prompt_logprobs import check_prompt_logprobs
from services.gateway.request_errors import check_message_count
from services.gateway.requests import (
    GenerationRequest,
    RequestContext,
    cache_salt,
)
from services.gateway.rpc_embed import embed
from services.gateway.rpc_request import (
    adds_special_tokens,
    chat_options,
    check_known,
    generation_options,
    template_input,
)
from services.gateway.spans import end_request, rpc_span

log = structlog.get_logger()

SERVICE = "headrace.v1.Inference"

_DOMAIN = "headrace"
_MESSAGE_BYTES = 64
"""Memory that a message of a chat needs besides its text, bytes."""

Context: TypeAlias = aio.ServicerContext[Any, Any]


def build_rpc_server(gateway: Gateway, address: str) -> GrpcServer:
    """Return the public gRPC server of a gateway.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """
    settings = gateway.settings
    limits = ServerLimits(
        # gRPC rejects larger messages; the service rejects smaller ones with details.
        max_message_bytes=2 * settings.largest_body_bytes,
        max_connections=settings.max_connections,
        max_calls=settings.max_connections,
        max_client_calls=settings.max_client_connections,
        client_of=lambda context: _client(gateway.clients, context).name,
        owner_of=lambda context: _owner(gateway, context),
        idle_s=settings.keep_alive_s,
        request_timeout_s=settings.body_timeout_s,
    )
    servicer = InferenceServicer(gateway)
    server = GrpcServer(
        address,
        [SERVICE],
        limits=limits,
        reuse_port=settings.reuse_port,
        interceptors=[_KeyInterceptor(gateway, servicer)],
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.server)
    return server


_METHODS = frozenset(inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods_by_name)


class _KeyInterceptor(aio.ServerInterceptor):
    """Rejects calls without an API key before a request is received and any limit applies."""

    def __init__(self, gateway: Gateway, servicer: "InferenceServicer") -> None:
        self._gateway = gateway
        self._servicer = servicer

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        service, _, method = handler_call_details.method[1:].partition("/")
        if service == SERVICE:
            try:
                self._gateway.keys.tenant(_authorization(handler_call_details.invocation_metadata))
            except ServiceError as error:
                return self._rejection(method if method in _METHODS else "unknown", error)
        return await continuation(handler_call_details)

    def _rejection(self, method: str, error: ServiceError) -> Any:
        async def reject(_requests: Any, context: Context) -> None:
            async with self._servicer.guard(method, context):
                raise error

        return grpc.stream_stream_rpc_method_handler(reject)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves ``headrace.v1.Inference`` for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(  # type: ignore[override]  # noqa: N802 - named by the schema
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream one response per text delta. The last response has the token usage."""
        request_id = valid_request_id(request.request_id)
        span = rpc_span(f"{SERVICE}/Generate", context.invocation_metadata(), request_id)
        with structlog.contextvars.bound_contextvars(request_id=request_id, **span.ids):
            async with self.guard("Generate", context, span):
                await self._generate(request, request_id, context, span)

    async def ListModels(  # noqa: N802 - named by the schema
        self, _request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Return the served models."""
        async with self.guard("ListModels", context):
            self._accept(valid_request_id(None), context)
            encoder = self._gateway.encoder and self._gateway.encoder.name
            models = [
                inference_pb2.Model(id=name, context_length=length or 0, is_encoder=name == encoder)
                for name, _, length in self._gateway.models
            ]
            return inference_pb2.ListModelsResponse(models=models)

    async def Embed(  # noqa: N802 - named by the schema
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """Return the embeddings of texts or token ids."""
        request_id = valid_request_id(request.request_id)
        span = rpc_span(f"{SERVICE}/Embed", context.invocation_metadata(), request_id)
        with structlog.contextvars.bound_contextvars(request_id=request_id, **span.ids):
            async with self.guard("Embed", context, span):
                accepted = self._accept(request_id, context, span)
                async with enforce_deadline(_deadline(accepted, context)):
                    return await embed(self._gateway, request, accepted)

    @asynccontextmanager
    async def guard(
        self, method: str, context: Context, span: Span = NO_SPAN
    ) -> AsyncGenerator[None]:
        """Count and log a call, and convert its exception to a status with details."""
        endpoint = f"{SERVICE}/{method}"
        failure: ServiceError | None = None
        try:
            try:
                with self._gateway.open_call():
                    yield
            except ServiceError as error:
                failure = detached(error)
            except Exception:
                failure = InternalFault("internal error")
                log.exception("unexpected error in a call")
            if failure is not None:
                await _abort(context, failure)
        except asyncio.CancelledError:
            failure = ClientGone("the client cancelled the call")
            raise
        finally:
            status = 200 if failure is None else failure.status
            self._gateway.metrics.requests.labels(endpoint, str(status)).inc()
            log.info("answered", endpoint=endpoint, status=str(status))
            end_request(span, status, failure)

    def _accept(self, request_id: str, context: Context, span: Span = NO_SPAN) -> RequestContext:
        metadata = context.invocation_metadata()
        client = _client(self._gateway.clients, context)
        return self._gateway.accept(request_id, _authorization(metadata), client, span)

    async def _generate(
        self,
        message: inference_pb2.GenerateRequest,
        request_id: str,
        context: Context,
        span: Span,
    ) -> None:
        accepted = self._accept(request_id, context, span)
        async with enforce_deadline(_deadline(accepted, context)):
            request = await self._encode(message, accepted)
            await self._write_output(request, context)

    async def _encode(
        self, message: inference_pb2.GenerateRequest, accepted: RequestContext
    ) -> GenerationRequest:
        check_message_count(len(message.chat.messages), self._gateway.limits.context_length)
        limit = self._gateway.settings.max_body_bytes
        size = message.ByteSize()
        if size > limit:
            raise TooLarge(f"the request is larger than {limit} bytes")
        self._gateway.require_model(message.model)
        with (
            self._gateway.buffers.open(accepted.owner.name) as grow,
            accepted.span.child("tokenize"),
        ):
            grow(size + _MESSAGE_BYTES * len(message.chat.messages))
            async with self._gateway.prompts.slot(accepted.owner, size):
                return await self._parse(message, size, accepted)

    async def _write_output(self, request: GenerationRequest, context: Context) -> None:
        usage = inference_pb2.Usage(prompt_tokens=request.prompt_tokens)
        unfinished = request.options.n
        if request.options.echo:
            prompt = "".join(self._gateway.model.tokenizer.texts(unpack_tokens(request.packed)))
            for choice in range(request.options.n):
                await context.write(
                    inference_pb2.GenerateResponse(
                        request_id=request.context.request_id, choice=choice, text=prompt
                    )
                )
        async with aclosing(self._gateway.generate([request])) as output:
            async for deltas in output:
                for delta in deltas:
                    usage.completion_tokens += len(delta.tokens)
                    usage.cached_tokens += delta.cached_tokens
                    unfinished -= bool(delta.finish)
                    response = inference_pb2.GenerateResponse(
                        request_id=request.context.request_id,
                        choice=delta.choice,
                        text=delta.text,
                        tokens=delta.tokens,
                        finish_reason=delta.finish,
                        usage=None if unfinished else usage,
                        prompt_logprobs=delta.scored,
                    )
                    await context.write(response)

    async def _parse(
        self, message: inference_pb2.GenerateRequest, size: int, context: RequestContext
    ) -> GenerationRequest:
        await self._gateway.prompts.compute(size, partial(check_known, message))
        options = generation_options(message)
        add_special = adds_special_tokens(message)
        await self._gateway.grammars.check(options.constraint, context.owner)
        salt = cache_salt(context.tenant, options.cache_salt)
        truncates = options.truncate_prompt_tokens is not None
        kind = message.WhichOneof("prompt")
        if kind == "chat":
            prompt = await self._encode_chat(message.chat, size, salt, truncates=truncates)
        elif kind == "text":
            prompt = await self._gateway.prompts.encode_prompt(
                message.text, size, salt, add_special=add_special, truncates=truncates
            )
        elif kind == "tokens":
            prompt = self._gateway.builder.pack(message.tokens.ids)
        else:
            raise InvalidRequest("set one of text, tokens and chat", param="prompt")
        request = self._gateway.builder.build(context, prompt, options, chat=kind == "chat")
        check_prompt_logprobs([request], self._gateway.settings.max_prompt_logprobs)
        return request

    async def _encode_chat(
        self, chat: inference_pb2.Chat, size: int, salt: bytes, *, truncates: bool
    ) -> bytes:
        plan = self._gateway.chats.plan(chat_options(chat))
        encoded = await self._gateway.prompts.encode_chat(
            chat.messages, template_input, plan, size, salt, truncates=truncates
        )
        return encoded.packed


def _authorization(metadata: Any) -> str | None:
    given = dict(metadata or ()).get("authorization")
    return given.decode("latin-1") if isinstance(given, bytes) else given


def _client(clients: ClientAddresses, context: Context) -> Client:
    forwarded = [
        value if isinstance(value, str) else value.decode("latin-1")
        for name, value in context.invocation_metadata() or ()
        if name == FORWARDED_FOR
    ]
    return clients.identify(split_grpc_peer(context.peer()), forwarded)


def _owner(gateway: Gateway, context: Context) -> str:
    """Return the owner whose share of resources a call with a valid key uses."""
    tenant = gateway.keys.tenant(_authorization(context.invocation_metadata()))
    return tenant.name if tenant else _client(gateway.clients, context).name


def _deadline(accepted: RequestContext, context: Context) -> float:
    """Return the gateway's or the client's deadline, whichever is earlier, in monotonic time."""
    remaining = context.time_remaining()
    if remaining is None:
        return accepted.deadline
    return min(accepted.deadline, time.monotonic() + remaining)


async def _abort(context: Context, error: ServiceError) -> NoReturn:
    """End a call with a status and ``google.rpc`` details.

    The details are ErrorInfo, BadRequest if a field is invalid, and RetryInfo if the client should
    retry.
    """
    status = status_pb2.Status(code=error.grpc_status.value[0], message=error.message)
    reason = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=_DOMAIN)
    status.details.add().Pack(reason)
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.param, description=error.message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status always raises")
