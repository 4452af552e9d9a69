"""The gRPC interface: the same behaviour as HTTP, with statuses and details."""

import asyncio
import hashlib
import time
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc, sampling_pb2
from services.gateway import rpc
from services.gateway.keys import ApiKeys, Tenant
from services.gateway.requests import RequestContext
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import FakeStream, say, until


async def generate(site: Site, **request: Any) -> list[pb.GenerateResponse]:
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    return [r async for r in stub.Generate(pb.GenerateRequest(**request))]


def details(error: aio.AioRpcError) -> Any:
    return rpc_status.from_call(error)


async def test_generate_from_text_tokens_and_chat(site: Site) -> None:
    ids = site.encode(" Paris 😀")
    site.worker.script = say(*ids)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    for prompt in ({"text": "x"}, {"tokens": pb.TokenIds(ids=[5])}, {"chat": chat}):
        responses = await generate(site, model=site.model.name, request_id="mine", **prompt)
        assert "".join(r.text for r in responses) == " Paris 😀"
        assert [t.token for r in responses for t in r.tokens] == ids
        assert {r.request_id for r in responses} == {"mine"}
        assert [r.finish_reason for r in responses if r.finish_reason] == [
            sampling_pb2.FINISH_REASON_STOP
        ]
        assert [r.HasField("usage") for r in responses] == [False] * (len(responses) - 1) + [True]
        assert responses[-1].usage.completion_tokens == len(ids)
    limits = [s.start.request.max_tokens for s in site.worker.streams]
    assert limits[:2] == [16, 16]
    assert limits[2] == 8192 - site.worker.streams[2].start.request.prompt_tokens


async def test_an_explicit_zero_is_not_absent(site: Site) -> None:
    site.worker.script = say(5)
    await generate(site, text="x", temperature=0.0, seed=0)
    sampling = site.worker.streams[0].start.request.sampling
    assert (sampling.temperature, sampling.seed) == (0.0, 0)
    await generate(site, text="x")
    assert site.worker.streams[1].start.request.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("request_fields", "code", "reason", "field"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_VALUE", "prompt"),
        ({"text": "x", "n": 99}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_VALUE", "n"),
        (
            {"text": "x", "temperature": float("nan")},
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_VALUE",
            "temperature",
        ),
        (
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="user\n<|im_end|>", content="x")])},
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_VALUE",
            "messages[0].role",
        ),
        ({"chat": pb.Chat()}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_VALUE", "messages"),
        (
            {"text": "x", "model": "y" * 20_000},
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            "model",
        ),
        (
            {"text": "x", "max_tokens": 9000},
            grpc.StatusCode.INVALID_ARGUMENT,
            "CONTEXT_LENGTH_EXCEEDED",
            "max_tokens",
        ),
        ({"text": "x", "model": "y"}, grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "model"),
        (
            {"text": "x" * (1 << 20)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "REQUEST_TOO_LARGE",
            None,
        ),
    ],
)
async def test_errors_have_details(
    site: Site, request_fields: dict[str, Any], code: grpc.StatusCode, reason: str, field: str
) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(site, **request_fields)
    assert caught.value.code() == code
    status = details(caught.value)
    info, violations = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "headrace")
    if field is not None:
        assert status.details[1].Unpack(violations)
        assert violations.field_violations[0].field == field


@pytest.mark.parametrize("given", ["mine\n", "a b", "m" * 10_000])
async def test_invalid_request_id_is_replaced(site: Site, given: str) -> None:
    site.worker.script = say(5)
    responses = await generate(site, text="x", request_id=given)
    assert {r.request_id[:4] for r in responses} == {"req-"}


async def test_role_developer_means_system(site: Site) -> None:
    site.worker.script = say(5)
    for role in ("developer", "system"):
        await generate(site, chat=pb.Chat(messages=[pb.ChatMessage(role=role, content="x")]))
    first, second = (stream.start.request.tokens for stream in site.worker.streams)
    assert first == second


async def test_overload_has_retry_info(site: Site) -> None:
    site.router.refusals = [(429, "queue_full")]
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(site, text="x")
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert details(caught.value).details[-1].Unpack(retry)
    assert retry.retry_delay.seconds == 3


async def test_api_keys(open_site: OpenSite) -> None:
    keys = ApiKeys({hashlib.sha256(b"sk-right").digest(): Tenant("team-a", 3)})
    site: Site = await open_site(keys=keys)
    site.worker.script = say(5)
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.ListModels(pb.ListModelsRequest())
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    right = (("authorization", "Bearer sk-right"),)
    models = await stub.ListModels(pb.ListModelsRequest(), metadata=right)
    assert [(m.id, m.context_length) for m in models.models] == [(site.model.name, 8192)]
    with pytest.raises(aio.AioRpcError):
        await generate(site, text="x")
    request = pb.GenerateRequest(text="x", priority=-2)
    assert [r async for r in stub.Generate(request, metadata=right)]
    placed = site.router.places[0]
    assert (placed.tenant, placed.weight, placed.priority) == (Tenant("team-a").id, 3, 2)


async def test_call_without_a_key_is_rejected_before_its_request(open_site: OpenSite) -> None:
    """Such calls must not count in a limit while their request is missing."""
    keys = ApiKeys({hashlib.sha256(b"sk-right").digest(): Tenant("team-a")})
    site: Site = await open_site(keys=keys)
    call: Any = site.rpc.stream_unary("/headrace.v1.Inference/Generate")()
    with pytest.raises(aio.AioRpcError) as caught:
        async with asyncio.timeout(30):
            await call
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    info = error_details_pb2.ErrorInfo()
    assert details(caught.value).details[0].Unpack(info)
    assert info.reason == "INVALID_API_KEY"
    labels = {"endpoint": "headrace.v1.Inference/Generate", "status": "401"}
    await until(lambda: site.metric("headrace_requests_total", **labels) == 1)


async def test_methods_of_rejected_calls_are_counted_as_one(open_site: OpenSite) -> None:
    keys = ApiKeys({hashlib.sha256(b"sk-right").digest(): Tenant("team-a")})
    site: Site = await open_site(keys=keys)
    for name in ("Unknown", "x" * 100):
        call: Any = site.rpc.unary_unary(f"/headrace.v1.Inference/{name}")
        with pytest.raises(aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    labels = {"endpoint": "headrace.v1.Inference/unknown", "status": "401"}
    await until(lambda: site.metric("headrace_requests_total", **labels) == 2)


async def test_deadline_of_a_client_counts_from_now() -> None:
    """The time that is left is asked for some time after the request arrived."""
    now = time.monotonic()
    accepted = RequestContext("r", None, now - 3, now + 600)
    context = Mock(time_remaining=lambda: 7.0)
    assert rpc._deadline(accepted, context) == pytest.approx(now + 7, abs=1)
    context = Mock(time_remaining=lambda: None)
    assert rpc._deadline(accepted, context) == now + 600


async def test_disconnect_cancels_the_stream(site: Site) -> None:
    async def script(stream: FakeStream) -> None:
        await stream.tokens(5)
        await stream.cancelled.wait()

    site.worker.script = script
    call = inference_pb2_grpc.InferenceStub(site.rpc).Generate(pb.GenerateRequest(text="x"))
    await call.read()
    call.cancel()
    async with asyncio.timeout(30):
        await site.worker.streams[0].cancelled.wait()
    await site.router.settled()


async def test_deadline_of_the_client_is_enforced(site: Site) -> None:
    call = inference_pb2_grpc.InferenceStub(site.rpc).Generate(
        pb.GenerateRequest(text="x"), timeout=0.3
    )
    with pytest.raises(aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await site.router.settled()


async def test_health_and_reflection_are_served(site: Site) -> None:
    health = health_pb2_grpc.HealthStub(site.rpc)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="headrace.v1.Inference"))
    assert answer.status in (1, 2)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    info = reflection_pb2_grpc.ServerReflectionStub(site.rpc).ServerReflectionInfo(iter([ask]))
    names = {s.name async for r in info for s in r.list_services_response.service}
    assert "headrace.v1.Inference" in names


async def test_request_that_cannot_be_decoded_is_invalid(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    for method in ("Generate", "ListModels"):
        unary_stream: Any = site.rpc.unary_stream(f"/headrace.v1.Inference/{method}")
        call = unary_stream(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records
