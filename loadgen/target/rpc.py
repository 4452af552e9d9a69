"""Headrace's own gRPC interface, which says how many tokens a piece has."""

import asyncio

import grpc
from grpc import aio

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import sampling_pb2
from headrace.v1.inference_pb2_grpc import InferenceStub
from loadgen.clock import Clock
from loadgen.plan import Planned
from loadgen.record import Failure, Record
from loadgen.target.base import Failed, Options, add_piece, settle

_CLIENTS_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
_CHANNELS = 8
"""One connection takes only so many streams at a time."""
_SHOWN = 300


class RpcTarget:
    """``address`` is a host and a port. Make it in a running event loop."""

    def __init__(self, address: str, options: Options, *, api_key: str | None = None) -> None:
        self.name = f"grpc://{address}"
        self._options = options
        self._metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        own = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
        self._channels = [aio.insecure_channel(address, options=own) for _ in range(_CHANNELS)]
        self._stubs = [InferenceStub(channel) for channel in self._channels]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def send(self, planned: Planned, record: Record, clock: Clock) -> None:
        request = self._request(planned)
        stub = self._stubs[record.number % _CHANNELS]
        error: Exception | None = None
        record.sent = clock()
        call = stub.Generate(request, timeout=self._options.timeout_s, metadata=self._metadata)
        try:
            await self._read(call, planned, record, clock)
        except grpc.RpcError as caught:
            error = _failed(caught, begun=bool(record.times))
        except Exception as caught:  # noqa: BLE001 - `settle` raises what is none of the target's
            error = caught
        finally:
            call.cancel()
        settle(record, clock, error)

    async def _read(
        self,
        call: "aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]",
        planned: Planned,
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
            if self._options.keep_answers:
                record.text += response.text
                record.token_ids += [token.token for token in response.tokens]
            if response.tokens:
                add_piece(record, planned, at, len(response.tokens))
        if not finished:
            raise Failed(Failure.INTERRUPTED, "the answer ended without a reason")

    def _request(self, planned: Planned) -> pb.GenerateRequest:
        prompt, options = planned.ask.prompt, self._options
        request = pb.GenerateRequest(
            model=options.model,
            max_tokens=planned.ask.output_tokens,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
        return request


def _failed(error: grpc.RpcError, *, begun: bool) -> Failed:
    """How a request failed whose call ended with an error; ``begun``: tokens had come."""
    code, said = error.code(), f"{error.code().name}: {error.details()}"[:_SHOWN]
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Failed(Failure.TIMEOUT, said)
    if begun and code is grpc.StatusCode.UNAVAILABLE:
        return Failed(Failure.INTERRUPTED, said)
    if code is grpc.StatusCode.UNAVAILABLE:
        if "failed to connect" in said.lower():
            return Failed(Failure.REFUSED, said)
        closed = any(words in said for words in ("Socket closed", "reset by peer", "Connection"))
        return Failed(Failure.RESET if closed else Failure.REJECTED, said)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Failed(Failure.REJECTED, said)
    if code in _CLIENTS_FAULT:
        return Failed(Failure.CLIENT_ERROR, said)
    return Failed(Failure.SERVER_ERROR, said)
