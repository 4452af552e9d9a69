"""The gRPC interface: ``headrace.v1.Inference``, over the same path as HTTP."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, TypeVar

import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc import aio
from grpc_status import rpc_status

from headrace.v1 import inference_pb2, inference_pb2_grpc
from services.common.errors import InternalFault, InvalidRequest, ServiceError, TooLarge
from services.gateway.gateway import Gateway, request_id_from, within
from services.gateway.requests import Arrival, GenerationRequest, Wanted

log = structlog.get_logger()

SERVICE = "headrace.v1.Inference"

_DOMAIN = "headrace"
_T = TypeVar("_T")
_OPTIONAL = (
    *("max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logprobs"),
)

Context: TypeAlias = aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves one gateway's clients over gRPC."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(  # type: ignore[override]  # noqa: N802 - named by the schema
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """One response for each piece of each choice; usage comes with the last."""
        request_id = request_id_from(request.request_id)
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._guard(
                "Generate", context, lambda: self._generate(request, request_id, context)
            )

    async def ListModels(  # noqa: N802 - named by the schema
        self, _request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The models served: one."""

        async def answer() -> inference_pb2.ListModelsResponse:
            self._arrive(request_id_from(None), context)
            model = self._gateway.model
            listed = inference_pb2.Model(id=model.name, context_length=model.context_length)
            return inference_pb2.ListModelsResponse(models=[listed])

        return await self._guard("ListModels", context, answer)

    async def _guard(
        self, method: str, context: Context, answer: Callable[[], Awaitable[_T]]
    ) -> _T:
        """Counts and logs a call, and turns its error into a status with details."""
        endpoint, status = f"{SERVICE}/{method}", "499"  # where the client leaves
        try:
            result = await answer()
            status = "200"
            return result
        except ServiceError as error:
            status = str(error.status)
            await _abort(context, error)
        except Exception:
            status = "500"
            log.exception("call broke")
            await _abort(context, InternalFault("internal error"))
        finally:
            self._gateway.metrics.requests.labels(endpoint, status).inc()
            log.info("answered", endpoint=endpoint, status=status)

    def _arrive(self, request_id: str, context: Context) -> Arrival:
        metadata = dict(context.invocation_metadata() or ())
        given = metadata.get("authorization")
        authorization = given.decode("latin-1") if isinstance(given, bytes) else given
        return self._gateway.arrive(request_id, authorization)

    async def _generate(
        self, message: inference_pb2.GenerateRequest, request_id: str, context: Context
    ) -> None:
        arrival = self._arrive(request_id, context)
        limit = self._gateway.settings.max_body_bytes
        if message.ByteSize() > limit:
            raise TooLarge(f"the request is larger than {limit} bytes")
        self._gateway.require_model(message.model)
        request = await self._request(message, arrival)
        usage = inference_pb2.Usage(prompt_tokens=len(request.prompt))
        unfinished = request.choices
        async with (
            within(_deadline(request, context)),
            aclosing(self._gateway.answer([request])) as answer,
        ):
            async for pieces in answer:
                for piece in pieces:
                    usage.completion_tokens += len(piece.tokens)
                    unfinished -= bool(piece.finish)
                    response = inference_pb2.GenerateResponse(
                        request_id=request_id,
                        choice=piece.choice,
                        text=piece.text,
                        tokens=piece.tokens,
                        finish_reason=piece.finish,
                        usage=None if unfinished else usage,
                    )
                    await context.write(response)

    async def _request(
        self, message: inference_pb2.GenerateRequest, arrival: Arrival
    ) -> GenerationRequest:
        kind = message.WhichOneof("prompt")
        if kind == "chat":
            prompt = await self._gateway.encode_chat(
                [{"role": m.role, "content": m.content} for m in message.chat.messages]
            )
        elif kind == "text":
            prompt = await self._gateway.encode_prompt(message.text)
        elif kind == "tokens":
            prompt = list(message.tokens.ids)
        else:
            raise InvalidRequest("one of text, tokens and chat is needed", param="prompt")
        present = {field.name for field, _ in message.ListFields()}
        given = {name: getattr(message, name) for name in _OPTIONAL if name in present}
        wanted = Wanted(
            stop=tuple(message.stop),
            logit_bias=dict(message.logit_bias),
            ignore_eos=message.ignore_eos,
            **given,
        )
        return self._gateway.checker.build(arrival, prompt, wanted, fill_context=kind == "chat")


def _deadline(request: GenerationRequest, context: Context) -> float:
    """The earlier of the gateway's deadline and the client's."""
    remaining = context.time_remaining()
    return (
        request.deadline
        if remaining is None
        else min(request.deadline, request.arrived + remaining)
    )


async def _abort(context: Context, error: ServiceError) -> NoReturn:
    """Ends a call with a status and ``google.rpc`` details: ErrorInfo always, BadRequest where a
    field is wrong, RetryInfo where another try may help."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=_DOMAIN)]
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.param, description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in details]
    for target, detail in zip(packed, details, strict=True):
        target.Pack(detail)
    number = error.grpc_status.value[0]
    status = status_pb2.Status(code=number, message=error.message, details=packed)
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort raises")
