"""Answers over HTTP: shapes, streams, and OpenAI's own client."""

import json
from typing import Any

import openai

from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import LENGTH, say


def client(site: Site, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0)


async def events(site: Site, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a stream, parsed, the terminator as text."""
    async with site.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    data = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


async def test_a_whole_chat_answer(site: Site) -> None:
    site.worker.script = say(*site.encode("Paris is it."))
    answer = await client(site).chat.completions.create(
        model=site.model.name, messages=[{"role": "user", "content": "The capital of France is"}]
    )
    assert answer.choices[0].message.content == "Paris is it."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    start = site.worker.streams[0].start
    prompt = site.model.tokenizer.decode(start.tokens, skip_special=False)
    assert prompt.endswith("user\nThe capital of France is<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage.prompt_tokens == len(start.tokens) == start.prompt_tokens
    assert answer.usage.completion_tokens == len(site.encode("Paris is it."))
    assert start.max_tokens == site.model.context_length - len(start.tokens)
    assert list(start.stop_token_ids) == list(site.model.tokenizer.eos_ids)


async def test_a_streamed_chat_answer_with_usage(site: Site) -> None:
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
