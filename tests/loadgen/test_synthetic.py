"""The synthetic server does what it says. Times are judged by its log: the machine may be busy."""

import asyncio
import itertools
import json
import os
import signal
import socket
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from grpc import aio

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc
from tests.loadgen.synthetic import (
    Behaviour,
    Outcome,
    SyntheticServer,
    Truth,
    closed_port,
    serving,
)

EARLY = 1e-6  # seconds, by which a timer may fire before its time
NEVER = 0.3  # seconds without an answer that are taken for none at all
WORDS = " w0 w1 w2 w3 w4"


def lateness(truths: list[Truth], behaviour: Behaviour) -> list[float]:
    """Of each event, in seconds; by hand, not by the server's own formula."""
    return [
        at - (truth.started or 0.0) - behaviour.ttft_s - i * behaviour.itl_s
        for truth in truths
        for i, at in enumerate(truth.written)
    ]


def raw_request(**body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


def exchange(url: str, *, wait_s: float = 10.0, **body: Any) -> tuple[bytes, str]:
    """All bytes of an answer, and how it ended: "fin", "rst" or, after `wait_s`, "open"."""
    address = urlsplit(url)
    received = b""
    with socket.create_connection((address.hostname, address.port), wait_s) as connection:
        connection.sendall(raw_request(**body))
        try:
            while data := connection.recv(65536):
                received += data
        except ConnectionResetError:
            return received, "rst"
        except TimeoutError:
            return received, "open"
        return received, "fin"


async def exchange_async(server: SyntheticServer, **body: Any) -> bytes:
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(raw_request(**body))
    answer = await reader.read()
    writer.close()
    return answer


def stream_events(text: str) -> list[Any]:
    """The events of a stream, decoded, with "[DONE]" as it is."""
    datas = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def test_events_are_written_when_they_are_due() -> None:
    behaviour = Behaviour(ttft_s=0.03, itl_s=0.01)
    with serving(behaviour) as server:
        for _ in range(5):
            exchange(server.url, max_tokens=20, stream=True)
        truths = server.log()
    assert [truth.number for truth in truths] == [0, 1, 2, 3, 4]
    late = lateness(truths, behaviour)
    assert len(late) == 100
    assert min(late) > -EARLY
    assert statistics.median(late) < 0.002
    # lateness that added up would show in the last events
    assert statistics.median(late[19::20]) < 0.002
    for truth in truths:
        assert truth.started == truth.read
        assert truth.ended
        assert truth.ended >= truth.written[-1]


def test_a_client_sees_each_event_by_itself_and_after_it_was_written() -> None:
    with serving(Behaviour(ttft_s=0.05, itl_s=0.05)) as server:
        body = {"prompt": "x", "max_tokens": 5, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as answer:
            seen = [time.monotonic() for line in answer.iter_lines() if '"text"' in line]
        (truth,) = server.log()
    waits = [at - written for at, written in zip(seen, truth.written, strict=True)]
    assert min(waits) >= 0
    assert statistics.median(waits) < 0.03


def test_a_queue_is_first_come_first_served_and_can_be_computed_by_hand() -> None:
    behaviour = Behaviour(ttft_s=0.2, itl_s=0.05, concurrency=2)

    async def ask_all(server: SyntheticServer) -> None:
        await asyncio.gather(*(exchange_async(server, max_tokens=3, stream=True) for _ in range(5)))

    with serving(behaviour) as server:
        asyncio.run(ask_all(server))
        truths = server.log()
    starts = [truth.started or 0.0 for truth in truths]
    reads = [truth.read for truth in truths]
    assert starts[:2] == reads[:2]
    assert reads[4] < starts[0] + 0.3  # or the queue was never there
    assert starts[2] == pytest.approx(starts[0] + 0.3, abs=1e-9)
    assert starts[3] == pytest.approx(starts[1] + 0.3, abs=1e-9)
    assert starts[4] == pytest.approx(starts[0] + 0.6, abs=1e-9)
    assert min(lateness(truths, behaviour)) > -EARLY


def test_a_stall_holds_back_events_and_requests() -> None:
    behaviour = Behaviour(itl_s=0.04, stall_s=(0.1, 0.5))

    async def ask_both(server: SyntheticServer) -> None:
        first = asyncio.create_task(exchange_async(server, max_tokens=16, stream=True))
        await asyncio.sleep(0.3)
        await exchange_async(server, max_tokens=1, stream=True)
        await first

    with serving(behaviour) as server:
        asyncio.run(ask_both(server))
        first, second = server.log()
    offsets = [at - first.read for at in first.written]
    assert len(offsets) == 16
    assert not [at for at in offsets if 0.1 <= at < 0.5 - EARLY]
    # those due at 0.12, ..., 0.48 came together, and those after them at their own times
    gaps = [after - before for before, after in itertools.pairwise(offsets[3:13])]
    assert statistics.median(gaps) < 0.01
    assert offsets[13] > 0.52 - EARLY
    assert offsets[15] > 0.6 - EARLY
    assert second.read - first.read >= 0.5 - EARLY


STREAMED: dict[Outcome, tuple[bytes, bytes, int, str]] = {
    # begins with, ends with, events with tokens of 5, connection
    Outcome.OK: (b"HTTP/1.1 200", b"[DONE]\n\n\r\n0\r\n\r\n", 5, "fin"),
    Outcome.RESET_BEFORE: (b"", b"", 0, "rst"),
    Outcome.CLOSE_BEFORE: (b"", b"", 0, "fin"),
    Outcome.RESET_MIDWAY: (b"HTTP/1.1 200", b"}\n\n\r\n", 2, "rst"),
    Outcome.HALF_CLOSE: (b"HTTP/1.1 200", b"}\n\n\r\n", 2, "fin"),
    Outcome.NO_DONE: (b"HTTP/1.1 200", b"}\n\n\r\n0\r\n\r\n", 5, "fin"),
    Outcome.MALFORMED_JSON: (b"HTTP/1.1 200", b"[DONE]\n\n\r\n0\r\n\r\n", 4, "fin"),
    Outcome.MALFORMED_HTTP: (b"\x16\x03", b"\r\n\r\n", 0, "fin"),
    Outcome.STATUS_400: (b"HTTP/1.1 400", b"}}", 0, "fin"),
    Outcome.STATUS_429: (b"HTTP/1.1 429", b"}}", 0, "fin"),
    Outcome.STATUS_500: (b"HTTP/1.1 500", b"}}", 0, "fin"),
    Outcome.ERROR_EVENT: (b"HTTP/1.1 200", b"}}\n\n\r\n0\r\n\r\n", 2, "fin"),
    Outcome.EMPTY: (b"HTTP/1.1 200", b"\r\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", 0, "fin"),
    Outcome.SLOW: (b"HTTP/1.1 200", b"\r\n\r\n", 0, "open"),
    Outcome.SLOW_HEADERS: (b"", b"", 0, "open"),
}


def test_every_outcome_of_a_stream() -> None:
    assert set(STREAMED) == set(Outcome)
    with serving(Behaviour(itl_s=0.005, outcomes=tuple(STREAMED))) as server:
        for outcome, (begin, end, count, how) in STREAMED.items():
            wait = NEVER if how == "open" else 10.0
            answer, ended = exchange(server.url, wait_s=wait, max_tokens=5, stream=True)
            tokens = answer.count(b'"text":" w')
            seen = (answer[: len(begin)], answer[-len(end) :] if end else answer, tokens, ended)
            assert seen == (begin, end, count, how), outcome
            if outcome is Outcome.ERROR_EVENT:
                assert b'data: {"error":' in answer
            if outcome is Outcome.MALFORMED_JSON:
                assert b'data: {"id": \n' in answer
        truths = server.log()
    assert [truth.outcome for truth in truths] == list(STREAMED)
    assert [len(truth.written) for truth in truths] == [row[2] for row in STREAMED.values()]


def test_every_outcome_of_a_whole_answer() -> None:
    ends = {outcome: row[3] for outcome, row in STREAMED.items()}
    with serving(Behaviour(itl_s=0.005, outcomes=tuple(STREAMED))) as server:
        answers = {}
        for outcome, how in ends.items():
            wait = NEVER if how == "open" else 10.0
            answers[outcome], ended = exchange(server.url, wait_s=wait, max_tokens=5)
            assert ended == how, outcome
        truths = server.log()
    whole = [Outcome.OK, Outcome.NO_DONE]
    for outcome in whole:
        content = json.loads(answers[outcome].split(b"\r\n\r\n")[1])
        assert content["choices"][0]["text"] == WORDS
        assert content["usage"]["completion_tokens"] == 5
    assert b'"text":""' in answers[Outcome.EMPTY]
    assert b"\r\n\r\n{{{" in answers[Outcome.MALFORMED_JSON]
    assert answers[Outcome.ERROR_EVENT].startswith(b"HTTP/1.1 500")
    for outcome in (Outcome.RESET_MIDWAY, Outcome.HALF_CLOSE):
        head, half = answers[outcome].split(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2])
        assert len(half) == length // 2
    assert [truth.outcome for truth in truths if truth.written] == whole
    for truth in truths:
        for at in truth.written:
            assert at - truth.read > 0.02 - EARLY


RPC: dict[Outcome, tuple[grpc.StatusCode, int, bool]] = {
    # status, responses of 5, whether the last one says why it is the last
    Outcome.OK: (grpc.StatusCode.OK, 5, True),
    Outcome.RESET_BEFORE: (grpc.StatusCode.UNAVAILABLE, 0, False),
    Outcome.STATUS_429: (grpc.StatusCode.RESOURCE_EXHAUSTED, 0, False),
    Outcome.STATUS_400: (grpc.StatusCode.INVALID_ARGUMENT, 0, False),
    Outcome.STATUS_500: (grpc.StatusCode.INTERNAL, 0, False),
    Outcome.MALFORMED_JSON: (grpc.StatusCode.UNIMPLEMENTED, 0, False),
    Outcome.ERROR_EVENT: (grpc.StatusCode.INTERNAL, 2, False),
    Outcome.RESET_MIDWAY: (grpc.StatusCode.UNAVAILABLE, 2, False),
    Outcome.HALF_CLOSE: (grpc.StatusCode.OK, 2, False),
    Outcome.NO_DONE: (grpc.StatusCode.OK, 5, False),
    Outcome.EMPTY: (grpc.StatusCode.OK, 1, True),
    Outcome.SLOW: (grpc.StatusCode.DEADLINE_EXCEEDED, 0, False),
    Outcome.SLOW_HEADERS: (grpc.StatusCode.DEADLINE_EXCEEDED, 0, False),
}


async def generate(
    server: SyntheticServer, wait_s: float = 10.0, **request: Any
) -> AsyncIterator[pb.GenerateResponse | grpc.StatusCode]:
    """The responses of a call, and then its status."""
    async with aio.insecure_channel(server.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(**request), timeout=wait_s)
        try:
            async for response in call:
                yield response
        except aio.AioRpcError as error:
            yield error.code()
        else:
            yield grpc.StatusCode.OK


async def test_every_outcome_over_grpc() -> None:
    with serving(Behaviour(itl_s=0.005, outcomes=tuple(RPC))) as server:
        for outcome, (status, count, finished) in RPC.items():
            wait = NEVER if status is grpc.StatusCode.DEADLINE_EXCEEDED else 10.0
            *responses, last = [r async for r in generate(server, wait, text="a b", max_tokens=5)]
            assert (last, len(responses)) == (status, count), outcome
            ends = [r for r in responses if isinstance(r, pb.GenerateResponse) and r.finish_reason]
            assert ends == (responses[-1:] if finished else []), outcome


async def test_grpc_keeps_the_same_times() -> None:
    behaviour = Behaviour(ttft_s=0.03, itl_s=0.01, tokens_per_event=3)
    with serving(behaviour) as server:
        for id in "abc":
            answer = generate(server, request_id=id, text="one two", max_tokens=20)
            responses = [response async for response in answer]
        truths = server.log()
    assert [truth.id for truth in truths] == ["a", "b", "c"]
    pieces = [r for r in responses if isinstance(r, pb.GenerateResponse)]
    assert [token.token for piece in pieces for token in piece.tokens] == list(range(20))
    assert [len(piece.tokens) for piece in pieces] == [3] * 6 + [2]
    assert (pieces[-1].usage.prompt_tokens, pieces[-1].usage.completion_tokens) == (2, 20)
    late = lateness(truths, behaviour)
    assert len(late) == 21
    assert min(late) > -EARLY
    assert statistics.median(late) < 0.002


def test_one_connection_serves_many_requests_and_counts_their_tokens() -> None:
    with serving(Behaviour(tokens_per_event=2)) as server, httpx.Client() as client:
        body = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for number in range(3):
            answer = client.post(
                server.url + "/v1/chat/completions",
                json=body | options,
                headers={"x-request-id": f"mine-{number}"},
            )
            greeting, *parts, usage, done = stream_events(answer.text)
            assert greeting["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            texts = [part["choices"][0]["delta"]["content"] for part in parts]
            assert texts == [" w0 w1", " w2 w3", " w4"]
            reasons = [part["choices"][0]["finish_reason"] for part in parts]
            assert reasons == [None, None, "length"]
            counts = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
            assert (usage["choices"], usage["usage"], done) == ([], counts, "[DONE]")
        whole = client.post(server.url + "/v1/chat/completions", json=body).json()
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": WORDS}
        assert [truth.id for truth in server.log()][:3] == ["mine-0", "mine-1", "mine-2"]


def test_models_and_tokens() -> None:
    with serving(Behaviour()) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "synthetic"
        text = "The w7 w07 river w123456789"
        ids = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert (len(ids), ids[1], ids[4], len(set(ids))) == (5, 7, 123456789, 5)
        assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
        assert client.post("/detokenize", json={"tokens": [1 << 31]}).status_code == 400
        assert client.get("/nowhere").status_code == 404
        assert server.log() == []


def test_many_at_once() -> None:
    behaviour = Behaviour(ttft_s=0.1, itl_s=0.03)

    async def ask_all(server: SyntheticServer) -> list[bytes]:
        asked = (exchange_async(server, max_tokens=32, stream=True) for _ in range(150))
        return await asyncio.gather(*asked)

    with serving(behaviour) as server:
        answers = asyncio.run(ask_all(server))
        truths = server.log()
    assert {answer.count(b'"text":" w') for answer in answers} == {32}
    late = lateness(truths, behaviour)
    assert len(late) == 150 * 32
    assert min(late) > -EARLY


def test_a_client_that_leaves_gives_its_slot_back() -> None:
    with serving(Behaviour(ttft_s=60.0, concurrency=1)) as server:
        for _ in range(2):
            assert exchange(server.url, wait_s=NEVER, max_tokens=1, stream=True)[1] == "open"
        until = time.monotonic() + 10
        while not (truths := server.log())[-1].left and time.monotonic() < until:
            time.sleep(0.01)
    assert truths[1].started
    assert truths[1].left


def test_it_ends_with_its_block_whatever_happens() -> None:
    with pytest.raises(ZeroDivisionError), serving(Behaviour()) as server:
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    with serving(Behaviour()) as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended with code -9"):
            server.log()


def test_nobody_listens_at_a_closed_port() -> None:
    with closed_port() as url, pytest.raises(ConnectionRefusedError):
        exchange(url)


def test_a_behaviour_survives_its_journey() -> None:
    behaviour = Behaviour(0.1, 0.01, 2, (1.0, 2.5), 4, (Outcome.OK, Outcome.SLOW))
    assert Behaviour.from_json(behaviour.to_json()) == behaviour
    for wrong in ({"itl_s": -1.0}, {"stall_s": (2.0, 1.0)}, {"outcomes": ()}, {"concurrency": 0}):
        with pytest.raises(ValueError, match=r"at least|negative"):
            Behaviour(**wrong)
