"""``min_tokens``: bounds, stop strings, and the message to the worker."""

from typing import Any

import pytest

from headrace.v1 import error_pb2, inference_pb2_grpc, sampling_pb2
from headrace.v1 import inference_pb2 as pb
from services.common.errors import InvalidRequest
from services.common.token_ids import pack_tokens
from services.gateway.limits import ModelLimits
from services.gateway.request_builder import RequestBuilder
from services.gateway.requests import GenerationOptions, RequestContext
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from services.gateway.text import Stops, StopStringFilter, TextAssembler
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import failing
from tests.services.gateway.fakes import LENGTH, say


def assembled(model: ServedModel, text: str, stops: list[str], min_tokens: int) -> tuple[str, int]:
    """Return the text up to a stop string, and the number of tokens."""
    tokens = [
        sampling_pb2.Token(index=index, token=token)
        for index, token in enumerate(model.tokenizer.encode(text))
    ]
    assembler = TextAssembler(model.tokenizer, 1, Stops(stops, min_tokens=min_tokens))
    deltas = [delta for token in tokens for delta in assembler.push([token], [])]
    deltas += assembler.push([], [(0, sampling_pb2.FINISH_REASON_LENGTH)])
    return "".join(delta.text for delta in deltas), sum(len(delta.tokens) for delta in deltas)


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, ("a", 2)), (1, ("a", 2)), (2, ("a b a", 4)), (3, ("a b a", 4)), (4, ("a b a b", 4))],
)
def test_stop_string_ends_the_output_from_min_tokens_on(
    model: ServedModel, min_tokens: int, expected: tuple[str, int]
) -> None:
    """The text has the four tokens "a", " b", " a" and " b"."""
    assert assembled(model, "a b a b", [" b"], min_tokens) == expected


def test_stop_string_may_begin_before_min_tokens(model: ServedModel) -> None:
    assert assembled(model, "a b a b", ["b a"], 2) == ("a ", 3)


def test_ended_stop_string_in_the_buffer_does_not_count_later() -> None:
    strings = StopStringFilter(["b", "abc"])
    assert strings.push("ab", stops=False) == ("", False)
    assert strings.push("x") == ("abx", False)
    assert strings.push("yb") == ("y", True)


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    values = {"default_max_tokens": 16, "context_length": 100}
    settings = GatewaySettings.model_validate(values)
    builder = RequestBuilder(settings, ModelLimits(settings), 9, lambda _: [1])
    context = RequestContext("r", None, 0.0, 1.0)
    for min_tokens, max_tokens, chat, fits in (
        (16, None, False, True),
        (17, None, False, False),
        (97, None, True, True),
        (98, None, True, False),
        (5, 5, True, True),
        (6, 5, True, False),
    ):
        options = GenerationOptions(min_tokens=min_tokens, max_tokens=max_tokens)
        if fits:
            builder.build(context, pack_tokens([1, 2, 3]), options, chat=chat)
            continue
        with pytest.raises(InvalidRequest, match="min_tokens must be at most max_tokens") as caught:
            builder.build(context, pack_tokens([1, 2, 3]), options, chat=chat)
        assert caught.value.param == "min_tokens"


async def test_min_tokens_reaches_the_worker_on_every_attempt(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    ids = site.encode("one two three four")
    for worker in site.workers:
        worker.script = say(*ids, end=LENGTH)
    site.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, *ids[:2])]
    body = {"prompt": "x", "min_tokens": 3, "max_tokens": 4, "stop": " two"}
    answer = (await site.http.post("/v1/completions", json=body)).json()
    starts = [stream.start.request for worker in site.workers for stream in worker.streams]
    assert [start.sampling.min_tokens for start in starts] == [3, 3]
    assert answer["choices"][0]["text"] == "one two three four"


async def test_grpc_has_min_tokens(site: Site) -> None:
    async def script(stream: Any) -> None:
        await stream.tokens(5)
        await stream.end()

    site.worker.script = script
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    async for _ in stub.Generate(pb.GenerateRequest(text="x", min_tokens=2)):
        pass
    assert site.worker.streams[0].start.request.sampling.min_tokens == 2
