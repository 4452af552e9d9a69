"""Requests that exceed the context length: clients recognize the error by message and code."""

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc import aio
from grpc_status import rpc_status

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc
from tests.services.gateway.conftest import OpenSite, Site

BEGINNING = "This model's maximum context length is"
LONG = "word " * 9000
USER = {"role": "user", "content": "hi"}

REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "tokens": ("/v1/completions", {"prompt": [1] * 8192}, "8193 tokens (8192 in the prompt, 1 in"),
    "text": ("/v1/completions", {"prompt": LONG}, "in the prompt, 1 in the completion)"),
    "max_tokens": (
        "/v1/completions",
        {"prompt": [1] * 100, "max_tokens": 8100},
        "8200 tokens (100 in the prompt, 8100 in the completion)",
    ),
    "one of several prompts": ("/v1/completions", {"prompt": ["x", LONG]}, "in the prompt"),
    "characters": ("/v1/completions", {"prompt": "a" * 900_000}, "900000 characters in the prompt"),
    "chat": ("/v1/chat/completions", {"messages": [{**USER, "content": LONG}]}, "in the messages"),
    "max_completion_tokens": (
        "/v1/chat/completions",
        {"messages": [USER], "max_completion_tokens": 8192},
        "8192 in the completion",
    ),
    "messages": ("/v1/chat/completions", {"messages": [USER] * 8193}, "8193 messages"),
    "characters of a chat": (
        "/v1/chat/completions",
        {"messages": [{**USER, "content": "a" * 900_000}]},
        "900000 characters in the messages",
    ),
    "tokenization of a chat": ("/tokenize", {"messages": [USER] * 8193}, "8193 messages"),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_error_has_the_wording_and_the_code_of_openai(site: Site, name: str) -> None:
    path, body, expected = REQUESTS[name]
    response = await site.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{BEGINNING} 8192 tokens. However, you requested ")
    assert expected in error["message"]
    assert site.worker.streams == []


async def test_request_larger_than_every_worker_is_the_same_error(site: Site) -> None:
    site.router.refusals = [(413, "too_large")]
    response = await site.http.post("/v1/chat/completions", json={"messages": [USER]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith(BEGINNING)
    assert "refused: too_large" in error["message"]


async def test_grpc_has_the_same_message(open_site: OpenSite) -> None:
    site: Site = await open_site()
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    for request in (
        pb.GenerateRequest(tokens=pb.TokenIds(ids=[1] * 8192)),
        pb.GenerateRequest(text="x", max_tokens=8192),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 8193)),
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in stub.Generate(request):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(BEGINNING)
        info = error_details_pb2.ErrorInfo()
        assert rpc_status.from_call(caught.value).details[0].Unpack(info)
        assert info.reason == "CONTEXT_LENGTH_EXCEEDED"
