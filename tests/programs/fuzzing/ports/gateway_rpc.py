"""The gRPC port of a gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from headrace.v1 import inference_pb2 as pb
from tests.programs.fuzzing.messages import mutated
from tests.programs.fuzzing.ports.base import Port, Wrong
from tests.programs.fuzzing.ports.gateways import check_gateway, gateway
from tests.services.gateway.conftest import Site

TYPED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "seed": 1,
    "logprobs": 1,
    "max_tokens": 4,
}
RECORDED: tuple[tuple[str, Message], ...] = (
    (
        "/headrace.v1.Inference/Generate",
        pb.GenerateRequest(text="Hello", stop=["x"], logit_bias={5: 1.0}, **_SAMPLING),  # type: ignore[arg-type]
    ),
    ("/headrace.v1.Inference/Generate", pb.GenerateRequest(tokens=pb.TokenIds(ids=[1, 2]), n=2)),
    (
        "/headrace.v1.Inference/Generate",
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")] * 2)),
    ),
    ("/headrace.v1.Inference/ListModels", pb.ListModelsRequest()),
    ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(service="")),
    (
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="headrace.v1.Inference"),
    ),
)


class GatewayRpcPort(Port):
    """A gateway with a fake router and a fake worker."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator["GatewayRpcPort"]:
        async with gateway() as site:
            yield cls(site)

    async def send(self, rng: Random, count: int) -> None:
        for _ in range(count):
            method, message = rng.choice(RECORDED)
            data = mutated(message, rng) if rng.random() < 0.9 else message.SerializeToString()
            unary_stream: Any = self._site.rpc.unary_stream(method)
            call = unary_stream(data)
            status: grpc.StatusCode = await self._status(call)
            self.outcomes[status.name] += 1
            if status not in TYPED:
                raise Wrong(f"{method} {data[:500]!r} ended with {status}: {await call.details()}")

    async def _status(self, call: Any) -> grpc.StatusCode:
        try:
            async for answer in call:
                assert isinstance(answer, bytes)
        except grpc.aio.AioRpcError as error:
            status: grpc.StatusCode = error.code()
            return status
        return grpc.StatusCode.OK

    async def check(self) -> None:
        await check_gateway(self._site)
