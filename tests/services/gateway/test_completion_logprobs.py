"""Log probabilities of completions: the sampled token, and positions in the text."""

import json
import threading
from typing import Any

import pytest

from headrace.v1 import sampling_pb2
from services.gateway.http import responses
from services.gateway.http.formatting import ResponseBuilder
from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import LENGTH, say

Choices = list[dict[str, Any]]


async def both(site: Site, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return text and log probabilities of the first choice, of a JSON response and of a stream."""
    whole = (await site.http.post("/v1/completions", json=body)).json()["choices"][0]
    text = ""
    streamed = dict[str, Any]()
    response = await site.http.post("/v1/completions", json={**body, "stream": True})
    for event in response.text.split("\n\n"):
        if event.startswith("data: {"):
            choice = json.loads(event[6:])["choices"][0]
            text += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                streamed.setdefault(name, []).extend(values)
    return {"text": whole["text"], **whole["logprobs"]}, {"text": text, **streamed}


async def test_body_of_many_tokens_is_formatted_in_a_thread(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the event loop would wait for seconds."""
    threads = list[str]()
    format_body = ResponseBuilder.body

    def body(builder: ResponseBuilder) -> bytes:
        threads.append(threading.current_thread().name)
        return format_body(builder)

    monkeypatch.setattr(ResponseBuilder, "body", body)
    monkeypatch.setattr(responses, "_MANY_TOKENS", 2)
    site.worker.script = say(*site.encode("one two three four"))
    whole, streamed = await both(site, {"prompt": "x", "logprobs": 0})
    assert whole == streamed
    assert len(threads) == 1
    assert threads[0] != threading.main_thread().name


@pytest.mark.parametrize("requested", [0, 1, 2])
async def test_top_logprobs_contain_the_sampled_token(site: Site, requested: int) -> None:
    paris, london, rome = (site.encode(text)[0] for text in (" Paris", " London", " Rome"))
    top = [sampling_pb2.TopLogprob(token=t, logprob=p) for t, p in ((paris, -0.5), (london, -2.0))]

    async def script(stream: Any) -> None:
        await stream.tokens(rome, logprobs=[-7.0], top=[top[:requested]])
        await stream.tokens(paris, logprobs=[-0.5], top=[top[:requested]])
        await stream.end()

    site.worker.script = script
    whole, streamed = await both(site, {"prompt": "x", "logprobs": requested})
    assert whole == streamed
    first, second = whole["top_logprobs"]
    likely = dict([(" Paris", -0.5), (" London", -2.0)][:requested])
    assert first == {**likely, " Rome": -7.0}
    assert second == {**likely, " Paris": -0.5}


@pytest.mark.parametrize("stop", [None, ["never"], ["b c"], ["é"], ["ab"], ["\ufffd"]])
async def test_text_offset_is_the_position_in_the_text(site: Site, stop: list[str] | None) -> None:
    """Tokens are single bytes of characters, words, a hidden token and an incomplete character."""
    by_piece = {piece: id for id, piece in enumerate(site.model.tokenizer.pieces)}
    eos = site.model.tokenizer.eos_ids[-1]
    pieces = [*(bytes([byte]) for byte in "😀é".encode()), b"a", b"b", b" c", b"\xf0"]
    ids = [by_piece[piece] for piece in pieces]
    ids.insert(8, eos)  # after "b"; the request ignores it
    site.worker.script = say(*ids, end=LENGTH)
    body = {"prompt": "x", "logprobs": 0, "stop": stop, "ignore_eos": True}
    whole, streamed = await both(site, body)
    assert whole == streamed
    offsets = whole["text_offset"]
    count = len(whole["tokens"])
    positions = [0, 0, 0, 0, 1, 1, 2, 3, 4, 4, 6]
    assert offsets == [min(at, len(whole["text"])) for at in positions[:count]]
    assert whole["text"] == "😀éab c\ufffd"[: len(whole["text"])]
    assert len(whole["token_logprobs"]) == len(whole["top_logprobs"]) == count
    if stop in (None, ["never"]):
        assert count == len(ids)
        assert whole["text"] == "😀éab c\ufffd"


async def test_offsets_of_each_choice_are_its_own(site: Site) -> None:
    async def script(stream: Any) -> None:
        for text in ("one", " two", " three"):
            for choice in range(2):
                await stream.tokens(site.encode(text)[choice - 1], choice=choice)
        for choice in range(2):
            await stream.end(choice=choice)

    site.worker.script = script
    body = {"prompt": "x", "logprobs": 0, "n": 2}
    for choice in (await site.http.post("/v1/completions", json=body)).json()["choices"]:
        logprobs = choice["logprobs"]
        at = 0
        expected = []
        for token in logprobs["tokens"]:
            expected.append(at)
            at += len(token)
        assert logprobs["text_offset"] == expected
        assert at == len(choice["text"])
