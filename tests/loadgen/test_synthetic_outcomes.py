"""Outcomes of the synthetic server over HTTP and gRPC."""

import json

import grpc

from headrace.v1 import inference_pb2 as pb
from tests.loadgen.synthetic import Behaviour, Outcome, serving
from tests.loadgen.synthetic_client import EARLY_S, NO_ANSWER_S, WORDS, exchange, generate

STREAMED: dict[Outcome, tuple[bytes, bytes, int, str]] = {
    # first bytes, last bytes, number of events with tokens (at most 5), end of the connection
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
            wait = NO_ANSWER_S if how == "open" else 10.0
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


def test_every_outcome_without_streaming() -> None:
    ends = {outcome: row[3] for outcome, row in STREAMED.items()}
    with serving(Behaviour(itl_s=0.005, outcomes=tuple(STREAMED))) as server:
        answers = {}
        for outcome, how in ends.items():
            wait = NO_ANSWER_S if how == "open" else 10.0
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
            assert at - truth.read > 0.02 - EARLY_S


RPC: dict[Outcome, tuple[grpc.StatusCode, int, bool]] = {
    # status, number of responses (at most 5), whether the last one has a finish reason
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


async def test_every_outcome_over_grpc() -> None:
    with serving(Behaviour(itl_s=0.005, outcomes=tuple(RPC))) as server:
        for outcome, (status, count, finished) in RPC.items():
            wait = NO_ANSWER_S if status is grpc.StatusCode.DEADLINE_EXCEEDED else 10.0
            *responses, last = [r async for r in generate(server, wait, text="a b", max_tokens=5)]
            assert (last, len(responses)) == (status, count), outcome
            ends = [r for r in responses if isinstance(r, pb.GenerateResponse) and r.finish_reason]
            assert ends == (responses[-1:] if finished else []), outcome
