"""Cached prompt tokens in the usage, and the salts by which workers keep tenants apart."""

import hashlib
import json
from array import array
from typing import Any

import pytest

from headrace.v1 import error_pb2, inference_pb2, inference_pb2_grpc
from services.gateway.keys import ApiKeys, Tenant
from services.tokenizer.prefix_encoder import PrefixEncoder
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import PROMPT, completion
from tests.services.gateway.fakes import FakeStream, say

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
KEYS = ApiKeys(
    {
        hashlib.sha256(key.encode()).digest(): Tenant(tenant)
        for key, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b"))
    }
)


async def cached_say(stream: FakeStream) -> None:
    await stream.tokens(5, cached=2)
    await stream.tokens(6)
    await stream.end()


def cached_of(usage: dict[str, Any]) -> int:
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


async def test_answers_have_the_cached_tokens(site: Site) -> None:
    site.worker.script = cached_say
    assert cached_of((await completion(site)).json()["usage"]) == 2
    answer = await site.http.post("/v1/chat/completions", json=CHAT)
    assert cached_of(answer.json()["usage"]) == 2
    assert site.metric("headrace_cached_prompt_tokens_total") == 4
    state = (await site.http.get("/page/state")).json()
    assert [request["cached_tokens"] for request in state["requests"]["ended"]] == [2, 2]


async def test_the_last_event_of_a_stream_has_the_cached_tokens(site: Site) -> None:
    site.worker.script = cached_say
    body = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    response = await site.http.post("/v1/completions", json=body)
    events = [line[6:] for line in response.text.splitlines() if line]
    assert cached_of(json.loads(events[-2])["usage"]) == 2


async def test_cached_tokens_over_grpc(site: Site) -> None:
    site.worker.script = cached_say
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1, 2, 3]))
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    responses = [response async for response in stub.Generate(request)]
    assert responses[-1].usage.cached_tokens == 2


async def test_cached_tokens_of_several_prompts_are_added(site: Site) -> None:
    site.worker.script = cached_say
    answer = await completion(site, prompt=[[1, 2, 3], [4, 5, 6]])
    assert cached_of(answer.json()["usage"]) == 4


@pytest.mark.parametrize(("first", "second", "expected"), [(3, 1, 1), (1, 5, 1), (99, 99, 3)])
async def test_tokens_that_any_attempt_has_computed_are_not_cached(
    open_site: OpenSite, first: int, second: int, expected: int
) -> None:
    """The prompt has three tokens; the second attempt replays one token beside them."""
    site: Site = await open_site(workers=2)

    async def fail(stream: FakeStream) -> None:
        await stream.tokens(5, cached=first)
        await stream.fail(error_pb2.ERROR_CODE_INTERNAL)

    async def go_on(stream: FakeStream) -> None:
        await stream.tokens(6, cached=second)
        await stream.end()

    site.workers[0].script = fail
    site.workers[1].script = go_on
    answer = (await completion(site)).json()
    assert answer["usage"]["completion_tokens"] == 2
    assert cached_of(answer["usage"]) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (error_pb2.ERROR_CODE_OVERLOADED, 2),
        (error_pb2.ERROR_CODE_DRAINING, 0),
        (error_pb2.ERROR_CODE_PREFILL_LOST, 0),
        (error_pb2.ERROR_CODE_TRANSFER_FAILED, 0),
    ],
)
async def test_tokens_that_a_failed_attempt_may_have_computed_are_not_cached(
    open_site: OpenSite, code: "error_pb2.ErrorCode.ValueType", expected: int
) -> None:
    """The first attempt ends before its first token; a full worker has computed nothing."""
    site: Site = await open_site(workers=2)

    async def fail(stream: FakeStream) -> None:
        await stream.fail(code)

    site.workers[0].script = fail
    site.workers[1].script = cached_say
    answer = (await completion(site)).json()
    assert site.workers[0].streams
    assert cached_of(answer["usage"]) == expected


async def salt_of(site: Site, key: str | None = None, **fields: Any) -> bytes:
    """Return the salt that the worker gets with a request."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await site.http.post("/v1/completions", json={**PROMPT, **fields}, headers=headers)
    assert answer.status_code == 200
    return site.worker.streams[-1].start.request.cache_salt


async def test_salts_depend_on_the_client_alone_without_keys(site: Site) -> None:
    site.worker.script = say(5)
    assert await salt_of(site) == b""
    assert await salt_of(site, cache_salt=None) == b""
    salts = [await salt_of(site, cache_salt=salt) for salt in ("x", "y", "x")]
    assert salts[0] == salts[2] != salts[1]
    assert b"" not in salts


async def test_tenants_never_have_the_same_salt(open_site: OpenSite) -> None:
    site: Site = await open_site(keys=KEYS)
    site.worker.script = say(5)
    a, same, b = [await salt_of(site, key) for key in ("a1", "a2", "b1")]
    assert a == same != b
    assert b"" not in (a, b)
    tenant = Tenant("a").id
    other = [await salt_of(site, "b1", cache_salt=salt) for salt in ("x", tenant, f"{tenant}\n")]
    own = [await salt_of(site, "a1", cache_salt=salt) for salt in ("x", "y")]
    assert len({a, b, *other, *own}) == 7


async def test_salts_over_grpc(site: Site) -> None:
    site.worker.script = say(5)
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    for salt in ("", "x"):
        async for _ in stub.Generate(inference_pb2.GenerateRequest(text="x", cache_salt=salt)):
            pass
    without, given = (stream.start.request.cache_salt for stream in site.worker.streams)
    assert without == b""
    assert given == await salt_of(site, cache_salt="x")


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5])
async def test_malformed_salts_are_refused(site: Site, salt: object) -> None:
    answer = await completion(site, cache_salt=salt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


async def test_encodings_are_reused_only_with_the_salt_of_the_kv(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site: Site = await open_site(keys=KEYS)
    site.worker.script = say(5)
    salts: list[bytes] = []
    encode = PrefixEncoder.encode

    def spy(encoder: PrefixEncoder, text: str, **options: Any) -> "array[int]":
        salts.append(options["salt"])
        return encode(encoder, text, **options)

    monkeypatch.setattr(PrefixEncoder, "encode", spy)
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    message = {"role": "user", "content": "x"}
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message)])
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [message]}),
    ]
    for key, salt in (("a1", None), ("b1", None), ("a1", "x"), ("b1", "x")):
        headers = {"authorization": f"Bearer {key}"}
        expected = await salt_of(site, key, cache_salt=salt)
        salts.clear()
        for path, body in bodies:
            sent = {**body, "cache_salt": salt}
            answer = await site.http.post(f"/v1/{path}", json=sent, headers=headers)
            assert answer.status_code == 200
            if salt is None:
                await site.http.post("/tokenize", json=body, headers=headers)
        for request in (
            inference_pb2.GenerateRequest(text="x", cache_salt=salt or ""),
            inference_pb2.GenerateRequest(chat=chat, cache_salt=salt or ""),
        ):
            async for _ in stub.Generate(request, metadata=tuple(headers.items())):
                pass
        assert salts == [expected] * (6 if salt is None else 4)
