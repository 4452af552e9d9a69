"""Responses over HTTP: formats, streams, and OpenAI's client library."""

import asyncio
import json
from typing import Any

import pytest

from headrace.v1 import sampling_pb2
from services.common.token_ids import unpack_tokens
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import LENGTH, say

openai = pytest.importorskip("openai")


def client(site: Site, key: str = "none") -> Any:
    return openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0)


async def events(site: Site, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the parsed events of a stream, and its end marker as text."""
    async with site.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    data = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


async def test_chat_response(site: Site) -> None:
    site.worker.script = say(*site.encode("Paris is it."))
    answer = await client(site).chat.completions.create(
        model=site.model.name, messages=[{"role": "user", "content": "The capital of France is"}]
    )
    assert answer.choices[0].message.content == "Paris is it."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    start = site.worker.streams[0].start.request
    tokens = unpack_tokens(start.tokens)
    prompt = site.model.tokenizer.decode(tokens, skip_special=False)
    assert prompt.endswith("user\nThe capital of France is<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage.prompt_tokens == len(tokens) == start.prompt_tokens
    assert answer.usage.completion_tokens == len(site.encode("Paris is it."))
    assert start.max_tokens == 8192 - len(tokens)
    assert list(start.stop_token_ids) == list(site.model.tokenizer.eos_ids)


async def test_chat_stream_with_usage(site: Site) -> None:
    ids = site.encode("Grüße 😀, 日本!")
    site.worker.script = say(*ids, end=LENGTH)
    stream = await client(site).chat.completions.create(
        model=site.model.name,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=50,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "Grüße 😀, 日本!"
    assert not any("\ufffd" in text for text in texts)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids)


async def test_completion_of_text_and_of_token_ids(site: Site) -> None:
    site.worker.script = say(*site.encode(" Paris"))
    ids = site.encode("The capital of France is")
    for prompt in ("The capital of France is", ids, [ids], ["The capital of France is"]):
        answer = await site.http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == [
            {"index": 0, "text": " Paris", "logprobs": None, "finish_reason": "stop"}
        ]
    for stream in site.worker.streams:
        assert list(unpack_tokens(stream.start.request.tokens)) == ids
        assert stream.start.request.max_tokens == 16
        assert stream.start.epoch == site.worker.epoch
        assert stream.start.prefill.worker_id == "prefill-0"


async def test_choices_of_several_prompts_are_numbered_consecutively(site: Site) -> None:
    async def script(stream: Any) -> None:
        for choice in range(stream.start.request.choices):
            await stream.tokens(unpack_tokens(stream.start.request.tokens)[0], choice=choice)
            await stream.end(choice=choice)

    site.worker.script = script
    prompts = [site.encode(word) for word in (" red", " green", " blue")]
    body = {"prompt": prompts, "n": 2, "logprobs": 0}
    answer = (await site.http.post("/v1/completions", json=body)).json()
    assert [c["text"] for c in answer["choices"]] == [
        *[" red"] * 2,
        *[" green"] * 2,
        *[" blue"] * 2,
    ]
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    seeds = {stream.start.request.sampling.seed for stream in site.worker.streams}
    assert len(seeds) == 3


async def test_every_sampling_field_reaches_the_worker(site: Site) -> None:
    site.worker.script = say(5)
    body = {
        "prompt": "x",
        "max_tokens": 17,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": -1,
        "n": 1,
        "presence_penalty": -1.5,
        "frequency_penalty": 1,
        "repetition_penalty": 1.1,
        "logit_bias": {"50": -100},
        "logprobs": 3,
        "user": "someone",
        "stop": "never",
    }
    assert (await site.http.post("/v1/completions", json=body)).status_code == 200
    start = site.worker.streams[0].start.request
    expected = sampling_pb2.Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=(1 << 64) - 1,
        presence_penalty=-1.5,
        frequency_penalty=1,
        repetition_penalty=1.1,
        logit_bias={50: -100},
        logprobs=3,
        min_tokens=2,
    )
    assert start.sampling == expected
    assert start.max_tokens == 17


async def test_ignore_eos_generates_up_to_max_tokens(site: Site) -> None:
    eos = site.model.tokenizer.eos_ids[-1]
    site.worker.script = say(5, eos, 6, end=LENGTH)
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    answer = (await site.http.post("/v1/completions", json=body)).json()
    assert list(site.worker.streams[0].start.request.stop_token_ids) == []
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_tiny_top_p_keeps_one_token(site: Site) -> None:
    site.worker.script = say(5)
    for top_p in (0, 5e-324, 1e-300, 1e-6, 0.5):
        await site.http.post("/v1/completions", json={"prompt": "x", "top_p": top_p})
    sent = [stream.start.request.sampling.top_p for stream in site.worker.streams]
    assert sent == [1e-6, 1e-6, 1e-6, 1e-6, 0.5]


async def test_stop_string_across_tokens_cancels_the_stream_on_the_worker(site: Site) -> None:
    ids = site.encode("one two three four five")

    async def script(stream: Any) -> None:
        for id in ids:
            await stream.tokens(id)
        await stream.cancelled.wait()

    site.worker.script = script
    body = {"prompt": "count", "stop": ["absent", "o thr"], "max_tokens": 100}
    chunks = await events(site, "/v1/completions", body)
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "one tw"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1] == "[DONE]"
    async with asyncio.timeout(30):
        await site.worker.streams[0].cancelled.wait()
    await site.router.settled()
    assert site.router.releases[0].outcome == "ok"


async def test_text_buffered_for_a_stop_string_is_returned_at_the_end(site: Site) -> None:
    site.worker.script = say(*site.encode("one two"), end=LENGTH)
    body = {"prompt": "count", "stop": ["two three"]}
    answer = (await site.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "one two"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_characters_are_not_split_between_events(site: Site) -> None:
    """The output has one token per byte, and characters of two, three and four bytes."""
    text = "é日😀"
    by_byte = {piece: id for id, piece in enumerate(site.model.tokenizer.pieces)}
    site.worker.script = say(*(by_byte[bytes([byte])] for byte in text.encode()))
    chunks = await events(site, "/v1/completions", {"prompt": "x", "max_tokens": 20})
    texts = [c["choices"][0]["text"] for c in chunks[:-1]]
    assert [t for t in texts if t] == ["é", "日", "😀"]


async def test_incomplete_character_becomes_a_replacement_character(site: Site) -> None:
    by_byte = {piece: id for id, piece in enumerate(site.model.tokenizer.pieces)}
    site.worker.script = say(by_byte[b"\xf0"], end=LENGTH)
    answer = (await site.http.post("/v1/completions", json={"prompt": "x"})).json()
    assert answer["choices"][0]["text"] == "\ufffd"


async def test_logprobs_of_a_chat(site: Site) -> None:
    (paris,) = site.encode(" Paris")
    (london,) = site.encode(" London")
    top = [sampling_pb2.TopLogprob(token=t, logprob=p) for t, p in ((paris, -0.5), (london, -2.0))]

    async def script(stream: Any) -> None:
        await stream.tokens(paris, logprobs=[-0.5], top=[top])
        await stream.end()

    site.worker.script = script
    messages = [{"role": "user", "content": [{"type": "text", "text": "capital?"}]}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2}
    answer = (await site.http.post("/v1/chat/completions", json=body)).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert entry["token"] == " Paris"
    assert entry["logprob"] == -0.5
    assert bytes(entry["bytes"]) == b" Paris"
    assert [t["token"] for t in entry["top_logprobs"]] == [" Paris", " London"]
    streamed = await events(site, "/v1/chat/completions", body)
    contents = [c["choices"][0]["logprobs"] for c in streamed[:-1]]
    assert [c for c in contents if c] == [{"content": [entry]}]


async def test_logprobs_of_a_completion_have_offsets(site: Site) -> None:
    ids = site.encode(" Paris is")
    site.worker.script = say(*ids)
    body = {"prompt": "x", "logprobs": 1}
    logprobs = (await site.http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" Paris", " is"]
    assert logprobs["text_offset"] == [0, 6]
    streamed = await events(site, "/v1/completions", body)
    offsets = [
        c["choices"][0]["logprobs"]["text_offset"]
        for c in streamed[:-1]
        if c["choices"][0]["logprobs"]
    ]
    assert [at for some in offsets for at in some] == [0, 6]


async def test_models_tokenization_and_probes(site: Site) -> None:
    models = await client(site).models.list()
    assert [m.id for m in models.data] == [site.model.name]
    assert (await client(site).models.retrieve(site.model.name)).id == site.model.name
    text = "a 12 é"
    tokens = (await site.http.post("/tokenize", json={"prompt": text})).json()
    assert tokens == {
        "tokens": site.encode(text),
        "count": len(site.encode(text)),
        "max_model_len": 8192,
    }
    back = await site.http.post("/detokenize", json={"tokens": tokens["tokens"]})
    assert back.json() == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    ids = (await site.http.post("/tokenize", json=chat)).json()["tokens"]
    assert site.model.tokenizer.decode(ids, skip_special=False).endswith("assistant\n")
    plain = {"prompt": "<|im_end|>", "parse_special": False}
    assert (await site.http.post("/tokenize", json=plain)).json()["count"] > 1
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert (await site.http.get(path)).status_code == 200, path
    schemas = (await site.http.get("/openapi.json")).json()["components"]["schemas"]
    assert {"CompletionBody", "ChatBody", "Message"} <= schemas.keys()


async def test_metrics_of_a_request(site: Site) -> None:
    async def script(stream: Any) -> None:
        await stream.tokens(5, 6)
        await stream.tokens(7)
        await stream.end(prefill=0.25, transfer=0.125)

    site.worker.script = script
    body = {"prompt": [1, 2, 3, 4]}
    assert (await site.http.post("/v1/completions", json=body)).status_code == 200
    assert site.metric("headrace_prompt_tokens_total") == 4
    assert site.metric("headrace_generation_tokens_total") == 3
    assert site.metric("headrace_gateway_requests_running") == 0
    assert site.metric("headrace_time_to_first_token_seconds_count") == 1
    assert site.metric("headrace_e2e_request_latency_seconds_count") == 1
    assert site.metric("headrace_request_stage_seconds_sum", stage="transfer") == 0.125
    assert site.metric("headrace_request_stage_seconds_count", stage="route") == 1
    labels = {"endpoint": "/v1/completions", "status": "200"}
    assert site.metric("headrace_requests_total", **labels) == 1


async def test_many_streams_share_one_session(open_site: OpenSite) -> None:
    site: Site = await open_site()
    site.worker.script = say(*site.encode("hello"))
    answers = await asyncio.gather(
        *(site.http.post("/v1/completions", json={"prompt": "x"}) for _ in range(17))
    )
    assert {a.status_code for a in answers} == {200}
    assert len(site.worker.metadata) == 1
    assert site.worker.metadata[0]["authorization"] == "Bearer between-us"
    assert site.router.authorizations == {"Bearer between-us"}
    await site.router.settled()


@pytest.mark.parametrize("given", ["trace-1", "x" * 128])
async def test_request_id_is_echoed(site: Site, given: str) -> None:
    response = await site.http.get("/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "two words"])
async def test_invalid_request_id_is_replaced(site: Site, given: str) -> None:
    response = await site.http.get("/nowhere", headers={"x-request-id": given})
    assert response.headers["x-request-id"].startswith("req-")
