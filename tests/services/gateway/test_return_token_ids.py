"""Token ids of prompts and outputs in responses, with the names and places that vLLM gives them."""

import json
from typing import Any

import pytest

from services.common.token_ids import unpack_tokens
from services.gateway.http import response_schemas
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import PROMPT
from tests.services.gateway.fakes import LENGTH, FakeStream, Script, say

openai = pytest.importorskip("openai")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
IDS = {"return_token_ids": True}
NAMES = ("token_ids", "prompt_token_ids")


async def events_of(site: Site, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the parsed events of a stream, without its end marker."""
    response = await site.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def response_of(site: Site, path: str, body: dict[str, Any]) -> Any:
    response = await site.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(events: list[Any], choice: int = 0) -> list[int]:
    """Return the token ids in all events of one choice."""
    choices = (event["choices"][0] for event in events if event["choices"])
    return [id for one in choices if one["index"] == choice for id in one.get("token_ids", ())]


def sent_prompt(site: Site) -> list[int]:
    return list(unpack_tokens(site.worker.streams[-1].start.request.tokens))


def text_of(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def bytewise(site: Site, text: str) -> list[int]:
    """Return one token for each byte of a text."""
    ids = {piece: id for id, piece in enumerate(site.model.tokenizer.pieces)}
    return [ids[bytes([byte])] for byte in text.encode()]


async def test_completion_has_token_ids_in_its_choice(site: Site) -> None:
    ids = site.encode(" one two three")
    site.worker.script = say(*ids)
    answer = await response_of(site, COMPLETIONS, {"prompt": [5, 6, 7], **IDS})
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids, [5, 6, 7])
    assert "prompt_token_ids" not in answer
    response_schemas.CompletionResponse.model_validate(answer, strict=True)


async def test_chat_has_token_ids_in_its_choice_and_those_of_the_prompt_at_the_top(
    site: Site,
) -> None:
    ids = site.encode("one two three")
    site.worker.script = say(*ids)
    answer = await response_of(site, CHATS, {**CHAT, **IDS})
    (choice,) = answer["choices"]
    assert choice["token_ids"] == ids
    assert "prompt_token_ids" not in choice
    assert answer["prompt_token_ids"] == sent_prompt(site)
    response_schemas.ChatResponse.model_validate(answer, strict=True)


async def test_stream_of_a_completion_has_the_ids_of_the_prompt_in_its_first_event(
    site: Site,
) -> None:
    ids = site.encode(" one two three")
    site.worker.script = say(*ids)
    events = await events_of(site, COMPLETIONS, {"prompt": [5, 6, 7], **IDS})
    assert streamed(events) == ids
    prompts = [event["choices"][0]["prompt_token_ids"] for event in events]
    assert prompts == [[5, 6, 7], *[None] * (len(events) - 1)]
    assert all(isinstance(event["choices"][0]["token_ids"], list) for event in events)
    assert "".join(text_of(event["choices"][0]) for event in events) == " one two three"


async def test_stream_of_a_chat_has_the_ids_of_the_prompt_in_its_first_event(site: Site) -> None:
    ids = site.encode("one two three")
    site.worker.script = say(*ids)
    first, *events = await events_of(site, CHATS, {**CHAT, **IDS})
    assert first["prompt_token_ids"] == sent_prompt(site)
    assert "token_ids" not in first["choices"][0]
    assert not any("prompt_token_ids" in event for event in events)
    assert streamed(events) == ids


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHATS, CHAT)])
@pytest.mark.parametrize("value", [None, False])
async def test_no_token_ids_unless_requested(
    site: Site, path: str, body: dict[str, Any], value: bool | None
) -> None:
    site.worker.script = say(*site.encode("one two"))
    body = {**body, "return_token_ids": value}
    answer = await response_of(site, path, body)
    events = await events_of(site, path, body)
    for part in (answer, *events):
        for place in (part, part["choices"][0]):
            assert not place.keys() & set(NAMES)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHATS, CHAT)])
async def test_tokens_of_incomplete_characters_are_in_events_without_text(
    site: Site, path: str, body: dict[str, Any]
) -> None:
    ids = bytewise(site, "é日😀")
    site.worker.script = say(*ids, end=LENGTH)
    events = await events_of(site, path, {**body, **IDS})
    with_ids = [event["choices"][0] for event in events if streamed([event])]
    assert [one["token_ids"] for one in with_ids] == [[id] for id in ids]
    assert [text_of(one) for one in with_ids] == ["", "é", "", "", "日", "", "", "", "😀"]


def stopping(site: Site) -> tuple[Script, list[int]]:
    """Return a script whose output has the stop string "o thr", and the tokens up to its end."""
    ids = site.encode("one two three four five")

    async def script(stream: FakeStream) -> None:
        for id in ids:
            await stream.tokens(id)
        await stream.cancelled.wait()

    return script, ids[: len(site.encode("one two three"))]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHATS, CHAT)])
async def test_tokens_of_a_stop_string_are_included(
    site: Site, path: str, body: dict[str, Any]
) -> None:
    site.worker.script, expected = stopping(site)
    body = {**body, **IDS, "stop": "o thr"}
    answer = await response_of(site, path, body)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected
    assert choice.get("text", choice.get("message", {}).get("content")) == "one tw"
    assert answer["usage"]["completion_tokens"] == len(expected)
    events = await events_of(site, path, body)
    assert streamed(events) == expected
    assert "".join(text_of(event["choices"][0]) for event in events) == "one tw"


async def test_end_of_sequence_token_is_included(site: Site) -> None:
    ids = [*site.encode("hi"), site.model.tokenizer.eos_ids[0]]
    site.worker.script = say(*ids)
    answer = await response_of(site, CHATS, {**CHAT, **IDS})
    assert answer["choices"][0]["message"]["content"] == "hi"
    assert answer["choices"][0]["token_ids"] == ids
    events = await events_of(site, CHATS, {**CHAT, **IDS})
    assert streamed(events) == ids


async def test_each_choice_of_several_prompts_has_its_own_ids(site: Site) -> None:
    async def script(stream: FakeStream) -> None:
        (first, *_) = unpack_tokens(stream.start.request.tokens)
        for choice in range(stream.start.request.choices):
            await stream.tokens(first + choice, first + 10, choice=choice)
            await stream.end(choice=choice)

    site.worker.script = script
    prompts = [[300, 1], [400, 2, 3]]
    expected = [([p[0] + choice, p[0] + 10], p) for p in prompts for choice in range(2)]
    body = {"prompt": prompts, "n": 2, **IDS}
    answer = await response_of(site, COMPLETIONS, body)
    found = [(one["token_ids"], one["prompt_token_ids"]) for one in answer["choices"]]
    assert found == expected
    events = await events_of(site, COMPLETIONS, body)
    for index, (ids, prompt) in enumerate(expected):
        assert streamed(events, index) == ids
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [one["prompt_token_ids"] for one in own][:1] == [prompt]


async def test_each_choice_of_a_chat_begins_with_the_ids_of_the_prompt(site: Site) -> None:
    async def script(stream: FakeStream) -> None:
        for choice in range(2):
            await stream.tokens(300 + choice, choice=choice)
            await stream.end(choice=choice)

    site.worker.script = script
    body = {**CHAT, **IDS, "n": 2}
    answer = await response_of(site, CHATS, body)
    assert [one["token_ids"] for one in answer["choices"]] == [[300], [301]]
    events = await events_of(site, CHATS, body)
    starts = [event for event in events if "prompt_token_ids" in event]
    assert [event["choices"][0]["index"] for event in starts] == [0, 1]
    assert all(event["prompt_token_ids"] == sent_prompt(site) for event in starts)
    assert [streamed(events, choice) for choice in range(2)] == [[300], [301]]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHATS, CHAT)])
async def test_token_ids_beside_logprobs_and_usage(
    site: Site, path: str, body: dict[str, Any]
) -> None:
    ids = site.encode("one two three")
    site.worker.script = say(*ids)
    logprobs: dict[str, Any] = {"logprobs": 0} if path == COMPLETIONS else {"logprobs": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**body, **IDS, **logprobs, "stream_options": options}
    *events, last = await events_of(site, path, body)
    assert streamed(events) == ids
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ids)
    assert not last.keys() & set(NAMES)
    for event in events:
        (choice,) = event["choices"]
        if choice["logprobs"]:
            tokens = choice["logprobs"].get("tokens") or choice["logprobs"]["content"]
            assert len(tokens) == len(choice["token_ids"])


async def test_openai_client_reads_token_ids(site: Site) -> None:
    ids = site.encode("one two")
    site.worker.script = say(*ids)
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none") as client:
        stream = await client.completions.create(
            model=site.model.name, prompt=[5, 6], stream=True, extra_body=IDS
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].prompt_token_ids == [5, 6]
    assert chunks[-1].choices[0].prompt_token_ids is None
    assert [id for chunk in chunks for id in chunk.choices[0].token_ids] == ids


async def test_malformed_value_is_refused(open_site: OpenSite) -> None:
    site: Site = await open_site()
    response = await site.http.post(COMPLETIONS, json={**PROMPT, "return_token_ids": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "return_token_ids"
