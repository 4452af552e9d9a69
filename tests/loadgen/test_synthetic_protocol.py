"""Protocol of the synthetic server, and start and end of its process."""

import json
import os
import signal
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.loadgen.synthetic import Behaviour, Outcome, closed_port, serving
from tests.loadgen.synthetic_client import WORDS, exchange, raw_request


def stream_events(text: str) -> list[Any]:
    """Return the events of a stream, decoded from JSON; "[DONE]" is returned as text."""
    datas = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


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


def test_models_and_tokenizer_endpoints() -> None:
    with serving(Behaviour()) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "synthetic"
        text = "The w7 w07 river w123456789"
        ids = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert (len(ids), ids[1], ids[4], len(set(ids))) == (5, 7, 123456789, 5)
        assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
        assert client.post("/detokenize", json={"tokens": [1 << 31]}).status_code == 400
        assert client.get("/nowhere").status_code == 404
        assert server.log() == []


def test_blocks_share_a_process_that_forgets_the_block_before() -> None:
    with serving(Behaviour(outcomes=(Outcome.SLOW_HEADERS,))) as server:
        address = urlsplit(server.url)
        waiting = socket.create_connection((address.hostname, address.port), 30)
        waiting.sendall(raw_request(prompt="w1", max_tokens=1))
        while not server.log():
            continue
    with waiting:
        assert waiting.recv(1) == b"", "the connection was dropped"
    with serving(Behaviour()) as other:
        assert other.pid == server.pid
        assert other.log() == []
        assert exchange(other.url, prompt="w1", max_tokens=2)[0].startswith(b"HTTP/1.1 200")
        assert [truth.outcome for truth in other.log()] == [Outcome.OK]
        with serving(Behaviour()) as another:
            assert another.pid != other.pid


def test_server_of_a_failed_block_is_not_used_again() -> None:
    with pytest.raises(ZeroDivisionError), serving(Behaviour()) as server:
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    with serving(Behaviour()) as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended with code -9"):
            server.log()


def test_closed_port_refuses_connections() -> None:
    with closed_port() as url, pytest.raises(ConnectionRefusedError):
        exchange(url)


def test_behaviour_round_trips_through_json() -> None:
    behaviour = Behaviour(0.1, 0.01, 2, (1.0, 2.5), 4, (Outcome.OK, Outcome.SLOW))
    assert Behaviour.from_json(behaviour.to_json()) == behaviour
    for wrong in ({"itl_s": -1.0}, {"stall_s": (2.0, 1.0)}, {"outcomes": ()}, {"concurrency": 0}):
        with pytest.raises(ValueError, match=r"at least|negative"):
            Behaviour(**wrong)
