"""Target for Headrace's gRPC interface, which reports the tokens of each chunk."""

import asyncio

import grpc
from grpc import aio

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import sampling_pb2
from headrace.v1.inference_pb2_grpc import InferenceStub
from loadgen.clock import Clock
from loadgen.record import Failure, Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import (
    Endpoint,
    Options,
    RequestFailed,
    add_chunk,
    finish,
    joined,
    messages,
    until_cancelled,
)

_CLIENT_ERRORS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
_CHANNELS = 8
"""Number of connections that share the requests; each limits its concurrent streams."""
_MAX_DETAIL = 300
_DETAILS = "grpc-status-details-bin"


class RpcTarget:
    """Target over gRPC. Create it in a running event loop.

    Args:
        address: ``host:port``.
        endpoint: whether prompts are sent as they are, or as messages of a chat.
    """

    def __init__(
        self,
        address: str,
        options: Options,
        *,
        endpoint: Endpoint = Endpoint.COMPLETIONS,
        api_key: str | None = None,
    ) -> None:
        self._endpoint = endpoint
        self.name = f"grpc://{address}"
        self._options = options
        self._metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        own = (
            *(("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)),
            ("grpc.enable_http_proxy", 0),
        )
        self._channels = [aio.insecure_channel(address, options=own) for _ in range(_CHANNELS)]
        self._stubs = [InferenceStub(channel) for channel in self._channels]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
        request = self._request(scheduled)
        stub = self._stubs[record.number % _CHANNELS]
        error: Exception | None = None
        record.sent = clock()
        call = stub.Generate(request, timeout=self._options.timeout_s, metadata=self._metadata)
        try:
            async with until_cancelled(scheduled):
                await self._read(call, scheduled, record, clock)
        except aio.AioRpcError as caught:
            error = _failed(caught, begun=bool(record.times))
        except Exception as caught:  # noqa: BLE001 - `finish` raises bugs
            error = caught
        finally:
            call.cancel()
        finish(record, clock, error)

    async def _read(
        self,
        call: "aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]",
        scheduled: ScheduledRequest,
        record: Record,
        clock: Clock,
    ) -> None:
        finished = False
        async for response in call:
            at = clock()
            if response.finish_reason != sampling_pb2.FINISH_REASON_UNSPECIFIED:
                finished = True
            if response.HasField("usage"):
                record.reported_tokens = response.usage.completion_tokens
                record.input_tokens = response.usage.prompt_tokens
                record.cached_tokens = response.usage.cached_tokens
            if self._options.keep_answers:
                record.text += response.text
                record.token_ids += [token.token for token in response.tokens]
            if response.tokens:
                add_chunk(record, scheduled, at, len(response.tokens))
        if not finished:
            raise RequestFailed(Failure.INTERRUPTED, "the answer ended without a finish reason")

    def _request(self, scheduled: ScheduledRequest) -> pb.GenerateRequest:
        prompt, options = scheduled.spec.prompt, self._options
        request = pb.GenerateRequest(
            model=options.model,
            max_tokens=scheduled.spec.output_tokens,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
        )
        if self._endpoint is Endpoint.CHAT:
            request.chat.messages.extend(
                pb.ChatMessage(role=role, content=text) for role, text in messages(prompt)
            )
        elif isinstance(whole := joined(prompt), str):
            request.text = whole
        else:
            request.tokens.ids.extend(whole)
        return request


def _failed(error: aio.AioRpcError, *, begun: bool) -> RequestFailed:
    """Translate the error of a call.

    Args:
        begun: whether tokens had arrived before the error.
    """
    code, detail = error.code(), f"{error.code().name}: {error.details()}"[:_MAX_DETAIL]
    if _has_details(error) and (begun or code is grpc.StatusCode.DEADLINE_EXCEEDED):
        return RequestFailed(Failure.SERVER_ERROR, detail)
    if _has_details(error) and code is grpc.StatusCode.UNAVAILABLE:
        return RequestFailed(Failure.REJECTED, detail)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestFailed(Failure.TIMEOUT, detail)
    if begun and code is grpc.StatusCode.UNAVAILABLE:
        return RequestFailed(Failure.INTERRUPTED, detail)
    if code is grpc.StatusCode.UNAVAILABLE:
        if "failed to connect" in detail.lower():
            return RequestFailed(Failure.REFUSED, detail)
        closed = any(words in detail for words in ("Socket closed", "reset by peer", "Connection"))
        return RequestFailed(Failure.RESET if closed else Failure.REJECTED, detail)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RequestFailed(Failure.REJECTED, detail)
    if code in _CLIENT_ERRORS:
        return RequestFailed(Failure.CLIENT_ERROR, detail)
    return RequestFailed(Failure.SERVER_ERROR, detail)


def _has_details(error: aio.AioRpcError) -> bool:
    """Return whether the status is the server's answer: google.rpc details came with it.

    The status of a broken connection or of the client's time limit has none.
    """
    return any(key == _DETAILS for key, _ in error.trailing_metadata())
