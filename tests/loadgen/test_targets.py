"""Targets over HTTP and gRPC against the synthetic server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from grpc import aio

from loadgen.clock import Clock
from loadgen.errors import UsageError
from loadgen.record import Failure, Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Endpoint, Options, Target
from loadgen.target.choice import open_target
from loadgen.target.http import HttpTarget, _Answer, _cached_tokens, _reason
from loadgen.target.rpc import RpcTarget, _failed
from loadgen.workload.base import Dialogue, Message, RequestSpec, Role, Turn
from tests.loadgen.synthetic import (
    MODEL,
    Behaviour,
    Outcome,
    SyntheticServer,
    closed_port,
    serving,
)

TOKENS = 6
OPTIONS = Options(MODEL, timeout_s=60.0, keep_answers=True)
HASTY = replace(OPTIONS, timeout_s=0.5)
FAILURES: dict[Outcome, Failure | None] = {
    Outcome.OK: None,
    Outcome.RESET_BEFORE: Failure.RESET,
    Outcome.CLOSE_BEFORE: Failure.RESET,
    Outcome.RESET_MIDWAY: Failure.INTERRUPTED,
    Outcome.HALF_CLOSE: Failure.INTERRUPTED,
    Outcome.NO_DONE: Failure.INTERRUPTED,
    Outcome.MALFORMED_JSON: Failure.MALFORMED,
    Outcome.MALFORMED_HTTP: Failure.MALFORMED,
    Outcome.STATUS_400: Failure.CLIENT_ERROR,
    Outcome.STATUS_429: Failure.REJECTED,
    Outcome.STATUS_500: Failure.SERVER_ERROR,
    Outcome.ERROR_EVENT: Failure.SERVER_ERROR,
    Outcome.EMPTY: Failure.MALFORMED,
    Outcome.SLOW: Failure.TIMEOUT,
    Outcome.SLOW_HEADERS: Failure.TIMEOUT,
}
RPC_FAILURES = FAILURES | {
    Outcome.EMPTY: None,  # has a finish reason over gRPC
    Outcome.RESET_BEFORE: Failure.REJECTED,
    Outcome.CLOSE_BEFORE: Failure.REJECTED,
    Outcome.MALFORMED_JSON: Failure.CLIENT_ERROR,
    Outcome.MALFORMED_HTTP: Failure.CLIENT_ERROR,
}
Make = Callable[[SyntheticServer], Target]
TARGETS: dict[str, Make] = {
    "completions": lambda server: HttpTarget(server.url + "/v1", OPTIONS),
    "chat": lambda server: HttpTarget(server.url + "/v1", OPTIONS, endpoint=Endpoint.CHAT),
    "grpc": lambda server: RpcTarget(server.grpc_target, OPTIONS),
}


@asynccontextmanager
async def opened(make: Make, server: SyntheticServer) -> AsyncIterator[Target]:
    target = make(server)
    try:
        yield target
    finally:
        await target.close()


async def send(target: Target, scheduled: ScheduledRequest, number: int = 0) -> Record:
    record = Record(number, 0.0, scheduled.spec.input_tokens, scheduled.spec.output_tokens)
    await target.send(scheduled, record, Clock())
    return record


def request_of(tokens: int = TOKENS, cancel_after: int | None = None) -> ScheduledRequest:
    return ScheduledRequest(RequestSpec("w1 w2 w3", 3, tokens), 0.0, cancel_after)


@pytest.mark.parametrize("name", TARGETS)
async def test_each_outcome_is_recorded_as_its_failure(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are sequential on the same connections; every second one succeeds."""
    expected = RPC_FAILURES if name == "grpc" else FAILURES
    outcomes = tuple(outcome for each in expected for outcome in (each, Outcome.OK))
    with serving(Behaviour(itl_s=0.002, outcomes=outcomes)) as server:
        async with opened(TARGETS[name], server) as target:
            found = []
            for number, outcome in enumerate(outcomes):
                with monkeypatch.context() as patch:
                    if expected[outcome] is Failure.TIMEOUT:
                        patch.setattr(target, "_options", HASTY)
                    found.append(await send(target, request_of(), number))
    assert {
        outcome: record.failure for outcome, record in zip(outcomes, found, strict=True)
    } == expected
    for record in found:
        assert record.ended is not None
        assert bool(record.detail) == (record.failure is not None)
    for record in found[1::2]:
        assert record.succeeded
        assert record.counts == [1] * TOKENS
        assert (record.input_tokens, record.output_tokens) == (3, TOKENS)
        assert record.text == " w0 w1 w2 w3 w4 w5"
    interrupted = found[2 * list(expected).index(Outcome.RESET_MIDWAY)]
    assert 0 < sum(interrupted.counts) < TOKENS


@pytest.mark.parametrize("rpc", [False, True])
async def test_closed_port_is_recorded_as_refused(rpc: bool) -> None:
    with closed_port() as url:
        target: Target
        if rpc:
            target = RpcTarget(url.removeprefix("http://"), OPTIONS)
        else:
            target = HttpTarget(url + "/v1", OPTIONS)
        record = await send(target, request_of())
        await target.close()
    assert record.failure is Failure.REFUSED
    assert not record.times


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("outcome", [Outcome.SLOW_HEADERS, Outcome.SLOW])
async def test_request_is_cancelled_by_time_before_its_first_token(
    name: str, outcome: Outcome
) -> None:
    with serving(Behaviour(outcomes=(outcome,))) as server:
        async with opened(TARGETS[name], server) as target:
            record = await send(target, replace(request_of(), cancel_at_s=1.0))
            async with asyncio.timeout(30):
                while not (log := server.log()) or log[0].left is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
    assert record.cancelled
    assert record.failure is None
    assert not record.times


async def test_request_that_ends_before_its_cancellation_succeeds() -> None:
    with serving(Behaviour()) as server:
        async with opened(TARGETS["grpc"], server) as target:
            record = await send(target, replace(request_of(), cancel_at_s=30.0))
    assert record.succeeded


@pytest.mark.parametrize("name", TARGETS)
async def test_cancelled_request_is_closed_and_seen_by_the_server(name: str) -> None:
    with serving(Behaviour(itl_s=0.05)) as server:
        async with opened(TARGETS[name], server) as target:
            record = await send(target, request_of(40, cancel_after=2))
            complete = await send(target, request_of(2))
            async with asyncio.timeout(30):
                while server.log()[0].left is None:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
        first, second = server.log()
    assert record.cancelled
    assert record.failure is None
    assert not record.succeeded
    assert len(record.times) == 2
    assert first.left is not None
    assert len(first.written) < 40
    assert complete.succeeded
    assert second.left is None


@pytest.mark.parametrize("name", TARGETS)
async def test_recorded_times_follow_the_servers_log(name: str) -> None:
    """Recorded times and the server's log use the same monotonic clock."""
    with serving(Behaviour(ttft_s=0.1, itl_s=0.03)) as server:
        async with opened(TARGETS[name], server) as target:
            clock = Clock()
            record = Record(0, 0.0, 3, TOKENS)
            await target.send(request_of(), record, clock)
        (truth,) = server.log()
    assert len(record.times) == len(truth.written) == TOKENS
    delays = [
        seen + clock.started - written
        for seen, written in zip(record.times, truth.written, strict=True)
    ]
    assert min(delays) >= 0.0
    assert min(delays) < 0.1
    assert record.sent is not None
    assert record.sent + clock.started <= truth.read


async def test_tokens_per_chunk_are_counted_over_grpc() -> None:
    with serving(Behaviour(tokens_per_event=4)) as server:
        async with opened(TARGETS["grpc"], server) as target:
            over_rpc = await send(target, request_of(10))
        async with opened(TARGETS["completions"], server) as target:
            over_http = await send(target, request_of(10))
    assert over_rpc.counts == [4, 4, 2]
    assert over_http.counts == [1, 1, 1]
    assert over_rpc.output_tokens == over_http.output_tokens == 10


async def test_token_ids_are_requested_and_counted_over_http() -> None:
    options = replace(OPTIONS, token_ids=True)
    with serving(Behaviour(tokens_per_event=4)) as server:
        async with opened(lambda one: HttpTarget(one.url + "/v1", options), server) as target:
            record = await send(target, request_of(10))
        async with opened(TARGETS["completions"], server) as target:
            without = await send(target, request_of(10))
    assert record.token_ids == list(range(10))
    assert record.counts == [4, 4, 2]
    assert (record.text, record.output_tokens) == (without.text, 10)
    assert without.token_ids == []


def test_event_with_tokens_and_no_text_is_a_chunk() -> None:
    """The text of a character comes with its last token, and a server may send no new tokens."""
    record = Record(0, 0.0, 3, 3)
    answer = _Answer(request_of(), record, replace(OPTIONS, token_ids=True))
    for at, (text, ids) in enumerate([("", [7]), ("é", [8, 9]), ("", [])]):
        choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None}
        answer.take(orjson.dumps({"choices": [choice]}), at)
    assert (record.times, record.counts) == ([0, 1], [1, 2])
    assert (record.token_ids, record.text) == ([7, 8, 9], "é")


async def test_server_without_token_ids_is_a_usage_error() -> None:
    options = replace(OPTIONS, token_ids=True)
    with serving(Behaviour(token_ids=False)) as server:
        async with opened(lambda one: HttpTarget(one.url + "/v1", options), server) as target:
            with pytest.raises(UsageError, match="omit --token-ids, or use a server"):
                await send(target, request_of())
        async with opened(TARGETS["completions"], server) as target:
            assert (await send(target, request_of())).succeeded


@pytest.mark.parametrize("named", [True, False])
async def test_refusal_that_names_the_field_is_a_usage_error(named: bool) -> None:
    """Other refusals are failures of the request."""
    reason = "unknown field return_token_ids" if named else "the prompt is too long"

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": reason}}, status=400)

    app = web.Application()
    app.router.add_post("/v1/completions", refuse)
    async with TestServer(app) as server:
        target = HttpTarget(str(server.make_url("/v1")), replace(OPTIONS, token_ids=True))
        if named:
            with pytest.raises(UsageError, match="returns no token ids"):
                await send(target, request_of())
        else:
            record = await send(target, request_of())
            assert (record.failure, reason in record.detail) == (Failure.CLIENT_ERROR, True)
        await target.close()


async def test_prompts_of_token_ids() -> None:
    scheduled = ScheduledRequest(RequestSpec((7, 8, 9, 10), 4, 2), 0.0)
    with serving(Behaviour()) as server:
        for name in ("completions", "grpc"):
            async with opened(TARGETS[name], server) as target:
                record = await send(target, scheduled)
            assert (record.input_tokens, record.output_tokens) == (4, 2)
        async with opened(TARGETS["chat"], server) as target:
            with pytest.raises(UsageError, match="chat"):
                await send(target, scheduled)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"error": {"message": "too many requests", "code": 429}}', "too many requests"),
        ('{"error": "the model is loading"}', "the model is loading"),
        ('{"object": "error", "message": "not found"}', "not found"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"error": {"code": 7}}', "{'code': 7}"),
        ("[1]", "[1]"),
        ("404 page not found", "404 page not found"),
        ("", ""),
    ],
)
def test_body_of_an_error_is_reduced_to_its_message(body: str, reason: str) -> None:
    assert _reason(body) == reason


async def test_replicas_receive_requests_in_turn() -> None:
    with serving(Behaviour()) as one, serving(Behaviour()) as other:
        target = open_target(f"{one.url}/v1,{other.url}/v1", OPTIONS)
        for number in range(5):
            record = await send(target, request_of(), number)
            assert record.succeeded
        await target.close()
        assert [len(one.log()), len(other.log())] == [3, 2]


async def test_turns_of_a_chat_are_sent_to_one_replica() -> None:
    with serving(Behaviour()) as one, serving(Behaviour()) as other:
        target = open_target(f"{one.url}/v1,{other.url}/v1", OPTIONS)
        for number, chat in enumerate((0, 1, 0, 0, 1, 2)):
            record = Record(number, 0.0, 3, TOKENS, chat=chat)
            await target.send(request_of(), record, Clock())
            assert record.succeeded
        await target.close()
        assert [len(one.log()), len(other.log())] == [4, 2]


DIALOGUE = Dialogue(
    (Message(Role.SYSTEM, "w1 w2"), Message(Role.USER, "w3")),
    salt="w0",
).continued(" w4", Turn("w5", 1, 4, salt="w9"))


async def test_messages_of_a_chat_are_sent_as_such_or_as_one_prompt() -> None:
    scheduled = ScheduledRequest(RequestSpec(DIALOGUE, 6, 4), 0.0)
    expected = [("system", "w9 w1 w2"), ("user", "w3"), ("assistant", " w4"), ("user", "w5")]
    for endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        http = HttpTarget("http://127.0.0.1:9/v1", OPTIONS, endpoint=endpoint)
        rpc = RpcTarget("127.0.0.1:9", OPTIONS, endpoint=endpoint)
        body, request = http._body(scheduled), rpc._request(scheduled)
        if endpoint is Endpoint.CHAT:
            assert [(one["role"], one["content"]) for one in body["messages"]] == expected
            assert [(one.role, one.content) for one in request.chat.messages] == expected
        else:
            assert body["prompt"] == request.text == "w9 w1 w2 w3 w4 w5"
        await http.close()
        await rpc.close()


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({}, None),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {"audio_tokens": 0}}, None),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 512}}, 512),
    ],
)
def test_cached_tokens_are_read_if_they_are_reported(
    usage: dict[str, Any], cached: int | None
) -> None:
    assert _cached_tokens(usage) == cached


async def test_options_are_sent_with_the_request() -> None:
    options = Options("m", temperature=0.5, ignore_eos=True, extra={"top_k": 5})
    target = HttpTarget("http://127.0.0.1:9/v1", options)
    body = target._body(request_of())
    await target.close()
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.5, TOKENS)
    assert (body["ignore_eos"], body["top_k"], body["stream"]) == (True, 5, True)
    other = RpcTarget("127.0.0.1:9", options)
    request = other._request(request_of())
    await other.close()
    assert (request.model, request.temperature, request.max_tokens) == ("m", 0.5, TOKENS)
    assert request.ignore_eos
    plain = HttpTarget("http://127.0.0.1:9/v1", OPTIONS)
    assert "ignore_eos" not in plain._body(request_of())
    await plain.close()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "grpc://x"])
async def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        HttpTarget(url, OPTIONS)


async def test_name_contains_no_credentials() -> None:
    target = HttpTarget("http://user:secret@127.0.0.1:9/v1", OPTIONS)
    assert target.name == "http://127.0.0.1:9/v1"
    await target.close()


@pytest.mark.parametrize(
    ("code", "begun", "details", "failure"),
    [
        (grpc.StatusCode.UNAVAILABLE, False, True, Failure.REJECTED),
        (grpc.StatusCode.UNAVAILABLE, False, False, Failure.REFUSED),
        (grpc.StatusCode.UNAVAILABLE, True, True, Failure.SERVER_ERROR),
        (grpc.StatusCode.UNAVAILABLE, True, False, Failure.INTERRUPTED),
        (grpc.StatusCode.DEADLINE_EXCEEDED, True, True, Failure.SERVER_ERROR),
        (grpc.StatusCode.DEADLINE_EXCEEDED, True, False, Failure.TIMEOUT),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False, True, Failure.REJECTED),
    ],
)
def test_status_with_details_is_the_answer_of_the_server(
    code: grpc.StatusCode, begun: bool, details: bool, failure: Failure
) -> None:
    metadata = aio.Metadata(*([("grpc-status-details-bin", b"")] if details else []))
    error = aio.AioRpcError(code, aio.Metadata(), metadata, "failed to connect to a worker")
    assert _failed(error, begun=begun).failure is failure
