"""gRPC server of ``headrace.v1.Inference``."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from grpc import aio

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc, sampling_pb2
from tests.loadgen.synthetic import DEFAULT_MAX_TOKENS, MODEL, Outcome, Truth
from tests.loadgen.synthetic.schedule import HASHED, Schedule, Slot, text_of

Context: TypeAlias = aio.ServicerContext[Any, Any]

_STATUSES = {
    Outcome.RESET_BEFORE: grpc.StatusCode.UNAVAILABLE,
    Outcome.CLOSE_BEFORE: grpc.StatusCode.UNAVAILABLE,
    Outcome.MALFORMED_JSON: grpc.StatusCode.UNIMPLEMENTED,
    Outcome.MALFORMED_HTTP: grpc.StatusCode.UNIMPLEMENTED,
    Outcome.STATUS_400: grpc.StatusCode.INVALID_ARGUMENT,
    Outcome.STATUS_429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.STATUS_500: grpc.StatusCode.INTERNAL,
}
_STATUSES_MIDWAY = {
    Outcome.RESET_MIDWAY: grpc.StatusCode.UNAVAILABLE,
    Outcome.ERROR_EVENT: grpc.StatusCode.INTERNAL,
}


class Servicer(inference_pb2_grpc.InferenceServicer):
    """Servicer of the schedule that is current when a call arrives."""

    def __init__(self, current: Callable[[], Schedule]) -> None:
        self._current = current

    async def ListModels(
        self, _request: pb.ListModelsRequest, _context: Context
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(id=MODEL, context_length=HASHED)])

    async def Embed(self, _request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no encoder")
        raise AssertionError("abort always raises")

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        server = self._current()
        await server.sleep(time.monotonic())
        limit = request.max_tokens or DEFAULT_MAX_TOKENS
        id = request.request_id
        prompt = self._prompt(server, request)
        truth = server.arrive(time.monotonic(), id, prompt, limit)
        try:
            await self._answer(server, truth, context)
        except asyncio.CancelledError:
            truth.left = time.monotonic()
            raise
        except aio.AbortError:
            truth.ended = time.monotonic()
            raise
        truth.ended = time.monotonic()

    def _prompt(self, server: Schedule, request: pb.GenerateRequest) -> list[int]:
        texts = [request.text, *(message.content for message in request.chat.messages)]
        return [*request.tokens.ids, *server.tokenizer.encode(" ".join(texts))]

    async def _answer(self, server: Schedule, truth: Truth, context: Context) -> None:
        outcome = truth.outcome
        if status := _STATUSES.get(outcome):
            await context.abort(status, "requested failure")
        if outcome is Outcome.SLOW:
            await context.send_initial_metadata(())
        if outcome in (Outcome.SLOW, Outcome.SLOW_HEADERS):
            await asyncio.get_running_loop().create_future()
        async with Slot(server, truth) as slot:
            if outcome is Outcome.EMPTY:
                await slot.until(0)
                await context.write(self._response(truth, range(0), last=True))
                return
            spans = server.spans(truth.max_tokens)
            for i, span in enumerate(spans):
                await slot.until(i)
                if i == len(spans) // 2:
                    if status := _STATUSES_MIDWAY.get(outcome):
                        await context.abort(status, "requested failure midway")
                    if outcome is Outcome.HALF_CLOSE:
                        return
                last = i == len(spans) - 1 and outcome is not Outcome.NO_DONE
                response = self._response(truth, span, last=last)
                truth.written.append(time.monotonic())
                await context.write(response)

    def _response(self, truth: Truth, span: range, *, last: bool) -> pb.GenerateResponse:
        response = pb.GenerateResponse(request_id=truth.id, text=text_of(span))
        response.tokens.extend(sampling_pb2.Token(index=token, token=token) for token in span)
        if last:
            response.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
            response.usage.prompt_tokens = truth.prompt_tokens
            response.usage.completion_tokens = span.stop
            response.usage.cached_tokens = truth.cached_tokens or 0
        return response
