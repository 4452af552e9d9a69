"""Which tokens end an output, which it may have, and which it must not have."""

from typing import Any

import pytest

from headrace.v1 import error_pb2, inference_pb2_grpc, sampling_pb2
from headrace.v1 import inference_pb2 as pb
from runtime.core import request as runtime_limits
from services.common import messages
from services.common.errors import InvalidRequest
from services.common.token_ids import unpack_tokens
from services.gateway.excluded_tokens import bad_word_ids
from services.gateway.served import ServedModel
from services.gateway.text import Stops, StopStringFilter, TextAssembler
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import failing
from tests.services.gateway.fakes import STOP, say


def assembled(model: ServedModel, text: str, stops: Stops) -> tuple[str, list[int]]:
    """Return the output of a worker that ends with the tokens of ``text``, and token offsets."""
    assembler = TextAssembler(model.tokenizer, 1, stops)
    tokens = [
        sampling_pb2.Token(index=index, token=token)
        for index, token in enumerate(model.tokenizer.encode(text))
    ]
    deltas = [delta for token in tokens for delta in assembler.push([token], [])]
    deltas += assembler.push([], [(0, sampling_pb2.FINISH_REASON_STOP)])
    return (
        "".join(delta.text for delta in deltas),
        [offset for delta in deltas for offset in delta.offsets],
    )


def test_limits_of_bad_words_are_those_of_workers() -> None:
    assert messages.MAX_BAD_WORDS == runtime_limits.MAX_BAD_WORDS
    assert messages.MAX_BAD_WORD_TOKENS == runtime_limits.MAX_BAD_WORD_TOKENS


@pytest.mark.parametrize("strings", [[], ["never"]])
def test_text_excludes_the_stop_token_unless_it_is_included(
    model: ServedModel, strings: list[str]
) -> None:
    (end,) = model.tokenizer.encode(" b")
    tokens = frozenset({end})
    assert assembled(model, "a b", Stops(strings, tokens)) == ("a", [0, 1])
    assert assembled(model, "a b", Stops(strings, tokens, included=True)) == ("a b", [0, 1])


def test_text_includes_the_stop_string_on_request(model: ServedModel) -> None:
    assert assembled(model, "a b c", Stops([" b"]))[0] == "a"
    assert assembled(model, "a b c", Stops([" b"], included=True))[0] == "a b"


def test_included_stop_string_does_not_depend_on_the_division_of_the_text() -> None:
    strings = StopStringFilter(["bcd", "bc"], included=True)
    assert strings.push("ab") == ("a", False)
    assert strings.push("cde") == ("bc", True)


def test_bad_word_is_excluded_with_and_without_a_leading_space(model: ServedModel) -> None:
    encode = model.tokenizer.encode
    words = bad_word_ids(["cat", "  dog house"], encode)
    assert tuple(encode("cat")) in words
    assert tuple(encode(" cat")) in words
    assert tuple(encode("dog house")) in words
    assert all(1 <= len(word) <= 3 for word in words)


def test_bad_word_that_is_longer_with_a_space_is_excluded_once() -> None:
    assert bad_word_ids(["x"], lambda text: [1, 2] if text[0] == " " else [3]) == ((3,),)
    assert bad_word_ids(["x"], lambda text: [3, 2] if text[0] == " " else [3, 1]) == ((3, 1),)
    assert bad_word_ids(["x"], lambda text: [1] if text[0] == " " else [3]) == ((3,), (1,))


def test_word_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        bad_word_ids(["x"], lambda _: [])
    assert caught.value.param == "bad_words[0]"


async def test_tokens_reach_the_worker_on_every_attempt(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    ids = site.encode("one two three four")
    for worker in site.workers:
        worker.script = say(*ids[:3], end=STOP)
    site.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, *ids[:2])]
    body = {
        "prompt": "x",
        "stop_token_ids": [ids[2]],
        "allowed_token_ids": ids,
        "bad_words": ["cat"],
        "ignore_eos": True,
    }
    answer = (await site.http.post("/v1/completions", json=body)).json()
    starts = [stream.start.request for worker in site.workers for stream in worker.streams]
    assert len(starts) == 2
    for start in starts:
        assert list(start.stop_token_ids) == [ids[2]]
        assert list(start.sampling.allowed_token_ids) == ids
        assert [list(word.tokens) for word in start.sampling.bad_words] == [
            site.encode("cat"),
            site.encode(" cat"),
        ]
    assert answer["choices"][0]["text"] == "one two"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


async def test_stop_tokens_are_added_to_those_of_the_model(site: Site) -> None:
    site.worker.script = say(*site.encode("one"), end=STOP)
    await site.http.post("/v1/completions", json={"prompt": "x"})
    await site.http.post("/v1/completions", json={"prompt": "x", "stop_token_ids": [7, 7]})
    ends = [list(stream.start.request.stop_token_ids) for stream in site.worker.streams]
    assert ends[1] == [*ends[0], 7]


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [
        (2, "left", slice(-2, None)),
        (2, "right", slice(None, 2)),
        (99, "left", slice(None)),
        (-1, "left", slice(None)),
    ],
)
async def test_prompt_is_truncated(site: Site, limit: int, side: str, kept: slice) -> None:
    site.worker.script = say(*site.encode("one"), end=STOP)
    ids = site.encode("one two three four")
    options = {"truncate_prompt_tokens": limit, "truncation_side": side}
    for prompt in (ids, "one two three four"):
        answer = await site.http.post("/v1/completions", json={"prompt": prompt, **options})
        assert answer.json()["usage"]["prompt_tokens"] == len(ids[kept])
        start = site.worker.streams[-1].start.request
        assert unpack_tokens(start.tokens) == tuple(ids[kept])


async def test_long_prompt_is_truncated_to_the_context(site: Site) -> None:
    """-1 leaves space for ``max_tokens``."""
    site.worker.script = say(*site.encode("one"), end=STOP)
    context = (await site.http.get("/v1/models")).json()["data"][0]["max_model_len"]
    options = {"truncate_prompt_tokens": -1, "max_tokens": 5}
    body = {"prompt": "one two " * context, **options}
    answer = (await site.http.post("/v1/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens"] == context - 5
    chat = {"messages": [{"role": "user", "content": "one two " * context}], **options}
    answer = (await site.http.post("/v1/chat/completions", json=chat)).json()
    assert answer["usage"]["prompt_tokens"] == context - 5


async def test_grpc_has_the_same_fields(site: Site) -> None:
    ids = site.encode("one two three")

    async def script(stream: Any) -> None:
        await stream.tokens(*ids)
        await stream.end(STOP)

    site.worker.script = script
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    request = pb.GenerateRequest(
        text="one two three",
        stop_token_ids=[ids[-1]],
        include_stop_str_in_output=True,
        allowed_token_ids=ids,
        bad_words=["cat"],
        truncate_prompt_tokens=2,
        truncation_side="right",
    )
    text = "".join([response.text async for response in stub.Generate(request)])
    start = site.worker.streams[0].start.request
    assert text == "one two three"
    assert unpack_tokens(start.tokens) == tuple(ids[:2])
    assert ids[-1] in start.stop_token_ids
    assert list(start.sampling.allowed_token_ids) == ids
    assert list(start.sampling.bad_words[0].tokens) == site.encode("cat")
