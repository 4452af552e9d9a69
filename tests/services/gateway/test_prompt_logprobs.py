"""``echo`` and ``prompt_logprobs``: formats, retries, bounds."""

from collections.abc import Iterable
from typing import Any

import pytest

from headrace.v1 import decode_pb2, error_pb2, inference_pb2_grpc, sampling_pb2
from headrace.v1 import inference_pb2 as pb
from services.common.prompt_scores import PromptScores
from services.common.token_ids import unpack_tokens
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import LENGTH, FakeStream, Script
from tests.services.gateway.test_completions import client, events

TEXT = "one two three 😀 four"
CHAT = [{"role": "user", "content": "hi"}]
VOCAB = 49152


def value_of(token: int) -> float:
    """Return the log probability that fake workers report for a prompt token; exact in fp32."""
    return -token / 1024


def piece_of(tokens: Iterable[int], first: int, top: int) -> sampling_pb2.PromptLogprobs:
    """Return values for prompt tokens; the k-th alternative of each is token k."""
    tokens = list(tokens)
    return sampling_pb2.PromptLogprobs(
        first=first,
        logprobs=[value_of(token) for token in tokens],
        ranks=[token + 1 for token in tokens],
        top_tokens=list(range(top)) * len(tokens),
        top_logprobs=[-0.5 * (1 + k) for k in range(top)] * len(tokens),
    )


async def send_scores(stream: FakeStream, *parts: slice) -> None:
    """Send the log probabilities of parts of the prompt."""
    request = stream.start.request
    prompt = unpack_tokens(request.tokens)[: request.prompt_tokens]
    for part in parts:
        piece = piece_of(prompt[part], part.start, request.sampling.prompt_logprobs)
        number = stream.start.stream
        await stream.send(decode_pb2.StreamDelta(stream=number, prompt_logprobs=[piece]))


def scoring(*ids: int, parts: tuple[slice, ...] = (slice(1, 3), slice(3, None))) -> Script:
    """Return a script that sends the log probabilities of the prompt, if asked, and output."""

    async def script(stream: FakeStream) -> None:
        request = stream.start.request
        if request.sampling.HasField("prompt_logprobs"):
            await send_scores(stream, *parts)
        for choice in range(request.choices):
            await stream.tokens(*ids[stream.replayed :], choice=choice, logprobs=[-0.25] * len(ids))
            await stream.end(LENGTH, choice)

    return script


async def complete(site: Site, **body: Any) -> Any:
    response = await site.http.post("/v1/completions", json={"prompt": TEXT, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_echo_with_logprobs_is_that_of_openai(site: Site) -> None:
    """The request is that of lm-eval, which drops the last token, the output."""
    ids, output = site.encode(TEXT), site.encode(" five")
    site.worker.script = scoring(*output)
    body = {"prompt": ids, "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
    answer = await complete(site, **body)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == TEXT + " five"
    assert logprobs["token_logprobs"] == [None, *map(value_of, ids[1:]), -0.25]
    assert logprobs["top_logprobs"][0] is None
    piece = site.model.tokenizer.pieces
    assert logprobs["top_logprobs"][1] == {
        piece[0].decode(): -0.5,
        piece[ids[1]].decode(): value_of(ids[1]),
    }
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(ids) + 1
    assert "".join(logprobs["tokens"][:3]) == "one two three"
    offsets = logprobs["text_offset"]
    assert offsets[:3] == [0, 3, 7]
    assert offsets[-1] == len(TEXT)
    assert offsets == sorted(offsets)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == 1
    assert site.worker.streams[0].start.request.sampling.prompt_logprobs == 1


async def test_echo_without_output(site: Site) -> None:
    ids = site.encode(TEXT)
    site.worker.script = scoring(*site.encode(" five"))
    answer = await complete(site, echo=True, max_tokens=0, logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *map(value_of, ids[1:])]
    assert answer["usage"]["completion_tokens"] == 0
    assert site.worker.streams[0].start.request.max_tokens == 1


async def test_echo_without_logprobs_needs_none_of_the_worker(site: Site) -> None:
    site.worker.script = scoring(*site.encode(" five"))
    choices = (await complete(site, echo=True, n=2))["choices"]
    assert [choice["text"] for choice in choices] == [TEXT + " five"] * 2
    assert choices[0]["logprobs"] is None
    sampling = site.worker.streams[0].start.request.sampling
    assert not sampling.HasField("prompt_logprobs")


async def test_prompt_of_one_token(site: Site) -> None:
    async def script(stream: FakeStream) -> None:
        await stream.tokens(5, logprobs=[-1.0])
        await stream.end(LENGTH)

    site.worker.script = script
    prompt = site.encode("one")
    answer = await complete(site, prompt=prompt, echo=True, logprobs=0, prompt_logprobs=0)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0]
    assert answer["choices"][0]["prompt_logprobs"] == [None]


async def test_batch_of_prompts_and_choices(site: Site) -> None:
    """The values of each prompt are in all its choices."""
    prompts = [site.encode(text) for text in (TEXT, "six seven eight nine", "ten eleven")]
    site.worker.script = scoring(7, parts=(slice(1, 2), slice(2, None)))
    answer = await complete(site, prompt=prompts, echo=True, logprobs=0, max_tokens=1, n=2)
    assert len(answer["choices"]) == 6
    for choice in answer["choices"]:
        ids = prompts[choice["index"] // 2]
        assert choice["logprobs"]["token_logprobs"] == [None, *map(value_of, ids[1:]), -0.25]


async def test_prompt_logprobs_are_those_of_vllm(site: Site) -> None:
    site.worker.script = scoring(7)
    ids = site.encode(TEXT)
    (choice,) = (await complete(site, prompt_logprobs=2, echo=True, logprobs=1))["choices"]
    first, second, *_ = choice["prompt_logprobs"]
    assert first is None
    assert len(choice["prompt_logprobs"]) == len(ids)
    assert second == {
        "0": {"logprob": -0.5, "rank": 1, "decoded_token": site.model.tokenizer.pieces[0].decode()},
        "1": {"logprob": -1.0, "rank": 2, "decoded_token": site.model.tokenizer.pieces[1].decode()},
        str(ids[1]): {
            "logprob": value_of(ids[1]),
            "rank": ids[1] + 1,
            "decoded_token": site.model.tokenizer.pieces[ids[1]].decode(),
        },
    }
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    answer = (
        await site.http.post(
            "/v1/chat/completions", json={"messages": CHAT, "prompt_logprobs": 0, "max_tokens": 1}
        )
    ).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in answer["choices"][0]


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_stream_starts_with_the_prompt(site: Site, logprobs: int | None) -> None:
    site.worker.script = scoring(*site.encode(" five"))
    body = {"prompt": TEXT, "echo": True, "max_tokens": 1, "n": 2, "logprobs": logprobs}
    whole = await complete(site, **body)
    *chunks, end = await events(site, "/v1/completions", body)
    assert end == "[DONE]"
    for choice in whole["choices"]:
        parts = [
            entry
            for chunk in chunks
            for entry in chunk["choices"]
            if entry["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == "length"
        if logprobs is not None:
            for name, values in choice["logprobs"].items():
                lists = [part["logprobs"][name] for part in parts if part["logprobs"]]
                streamed = [value for found in lists for value in found]
                assert streamed == values


async def test_later_attempt_repeats_nothing(open_site: OpenSite) -> None:
    """The first worker is lost after a part of the prompt, the second one sends all of it."""
    site: Site = await open_site(workers=2)
    ids = site.encode(TEXT)

    async def lost(stream: FakeStream) -> None:
        await send_scores(stream, slice(1, 4))
        await stream.fail(error_pb2.ERROR_CODE_PREFILL_LOST)

    for worker in site.workers:
        worker.script = scoring(*site.encode(" five"))
    site.worker.queued = [lost]
    answer = await complete(site, echo=True, logprobs=1, max_tokens=1)
    starts = [stream.start.request for worker in site.workers for stream in worker.streams]
    assert [start.sampling.prompt_logprobs for start in starts] == [1] * len(starts)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, *map(value_of, ids[1:]), -0.25]


async def test_attempt_after_all_values_does_not_ask_for_them(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    ids, output = site.encode(TEXT), site.encode(" five six")

    async def lost(stream: FakeStream) -> None:
        await send_scores(stream, slice(1, None))
        await stream.tokens(output[0], logprobs=[-0.25])
        await stream.fail(error_pb2.ERROR_CODE_INTERNAL)

    for worker in site.workers:
        worker.script = scoring(*output)
    site.worker.queued = [lost]
    answer = await complete(site, echo=True, logprobs=1, max_tokens=2)
    starts = [stream.start.request for worker in site.workers for stream in worker.streams]
    assert sorted(start.sampling.HasField("prompt_logprobs") for start in starts) == [False, True]
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, *map(value_of, ids[1:]), -0.25, -0.25]


async def test_worker_that_sends_tokens_first_is_failed(site: Site) -> None:
    async def script(stream: FakeStream) -> None:
        await send_scores(stream, slice(1, 3))
        await stream.tokens(5)

    site.worker.script = script
    response = await site.http.post(
        "/v1/completions", json={"prompt": TEXT, "echo": True, "logprobs": 1}
    )
    assert response.status_code == 503
    assert "tokens before the log probabilities of the prompt" in response.text


async def test_grpc_sends_prompt_and_pieces(site: Site) -> None:
    site.worker.script = scoring(*site.encode(" five"))
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    request = pb.GenerateRequest(text=TEXT, echo=True, logprobs=1, max_tokens=1)
    responses = [response async for response in stub.Generate(request)]
    assert "".join(response.text for response in responses) == TEXT + " five"
    pieces = [piece for response in responses for piece in response.prompt_logprobs]
    values = [value for piece in pieces for value in piece.logprobs]
    assert values == [value_of(token) for token in site.encode(TEXT)[1:]]
    assert [piece.first for piece in pieces] == [1, 3]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt": [5] * 8000, "prompt_logprobs": 20, "n": 2}, "prompt_logprobs"),
        ("completions", {"prompt": [[5] * 7000] * 4, "echo": True, "logprobs": 20}, "echo"),
        ("completions", {"echo": 1}, "echo"),
        ("chat/completions", {"messages": CHAT, "echo": True}, "echo"),
        ("chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
    ],
)
async def test_invalid_value_is_named(
    site: Site, path: str, body: dict[str, Any], param: str
) -> None:
    prompt = {} if "messages" in body else {"prompt": TEXT}
    response = await site.http.post(f"/v1/{path}", json={**prompt, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_openai_library_reads_the_answer(site: Site) -> None:
    site.worker.script = scoring(*site.encode(" five"))
    answer = await client(site).completions.create(
        model=site.model.name, prompt=TEXT, echo=True, logprobs=1, max_tokens=1
    )
    assert answer.choices[0].text == TEXT + " five"
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def test_pieces_are_checked_and_repetitions_dropped() -> None:
    scores = PromptScores(8, 2)
    assert scores.take(piece_of([11, 12], 1, 2), VOCAB) == piece_of([11, 12], 1, 2)
    assert scores.take(piece_of([11], 1, 2), VOCAB) is None
    assert scores.take(piece_of([11, 12, 13, 14], 1, 2), VOCAB) == piece_of([13, 14], 3, 2)
    assert scores.take(piece_of([14, 15], 4, 2), VOCAB) == piece_of([15], 5, 2)
    for bad in (
        piece_of([17], 7, 2),
        piece_of([16, 17, 18], 6, 2),
        piece_of([16], 6, 1),
        piece_of([16], 0, 2),
        sampling_pb2.PromptLogprobs(first=6, logprobs=[1.0]),
    ):
        with pytest.raises(ValueError, match="log probabilities"):
            scores.take(bad, VOCAB)
    broken = piece_of([16], 6, 2)
    broken.logprobs[0] = float("nan")
    with pytest.raises(ValueError, match="malformed"):
        scores.take(broken, VOCAB)
    with pytest.raises(ValueError, match="malformed"):
        scores.take(piece_of([16], 6, 2), 1)
    assert not scores.complete
    scores.take(piece_of([16, 17], 6, 2), VOCAB)
    assert scores.complete
