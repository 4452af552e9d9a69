"""The gRPC call `Embed`."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from tests.services.gateway.encoding.conftest import EncoderSite, OpenSite

Stub = Any


@pytest.fixture
def stub(site: EncoderSite) -> Stub:
    return InferenceStub(site.rpc)


async def test_embeddings_equal_those_over_http(site: EncoderSite, stub: Stub) -> None:
    texts = ["abc", "hello world"]
    found = await stub.Embed(pb.EmbedRequest(texts=texts, request_id="mine"))
    assert [list(each.values) for each in found.embeddings] == await site.embed(*texts)
    assert (found.request_id, found.model) == ("mine", "tiny")
    assert found.prompt_tokens == 5 + 12
    ids = pb.TokenIds(ids=site.encoder.tokenizer.encode("abc").tokens)
    by_ids = await stub.Embed(pb.EmbedRequest(tokens=[ids]))
    assert by_ids.embeddings[0] == found.embeddings[0]


async def test_options(site: EncoderSite, stub: Stub) -> None:
    request = pb.EmbedRequest(
        texts=["a " * 90], truncate_prompt_tokens=-1, dimensions=4, prompt_name="query"
    )
    found = await stub.Embed(request)
    expected = await site.embed(
        "a " * 90, truncate_prompt_tokens=-1, dimensions=4, prompt_name="query"
    )
    assert [list(found.embeddings[0].values)] == expected


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"texts": ["a"], "tokens": [pb.TokenIds(ids=[1])]},
        {"tokens": [pb.TokenIds()]},
        {"tokens": [pb.TokenIds(ids=[97])]},
        {"texts": ["a"], "dimensions": 0},
        {"texts": ["a"], "dimensions": 49},
        {"texts": ["a"], "truncate_prompt_tokens": 0},
        {"texts": ["a"], "prompt_name": "other"},
        {"texts": ["a"], "priority": 101},
        {"texts": ["a " * 90]},
    ],
)
async def test_invalid_request_is_refused(stub: Stub, values: dict[str, Any]) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await stub.Embed(pb.EmbedRequest(**values))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_prompts_count_towards_the_limit_of_texts(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await open_site(max_body_bytes=1024, max_encoder_body_bytes=1024)
    stub: Stub = InferenceStub(site.rpc)
    # Each text of 2 bytes has 4 in the message, and with its prompt as many to tokenize.
    fits = pb.EmbedRequest(texts=["ab"] * 250, prompt_name="query")
    assert len((await stub.Embed(fits)).embeddings) == 250
    monkeypatch.setitem(site.encoder.tokenizer.prompts.by_name, "query", "long prompt ")
    with pytest.raises(aio.AioRpcError, match="bytes of text to be tokenized"):
        await stub.Embed(fits)
    body = {"input": ["ab"] * 150, "prompt_name": "query"}
    assert (await site.post("/v1/embeddings", body)).status_code == 413


async def test_unknown_model_and_generation_are_refused(stub: Stub) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await stub.Embed(pb.EmbedRequest(texts=["a"], model="gpt"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(aio.AioRpcError) as refused:
        await anext(aiter(stub.Generate(pb.GenerateRequest(text="a", model="tiny"))))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_cross_encoder_is_refused(open_site: OpenSite, cross_encoder: Path) -> None:
    site = await open_site(path=cross_encoder)
    stub: Stub = InferenceStub(site.rpc)
    with pytest.raises(aio.AioRpcError) as refused:
        await stub.Embed(pb.EmbedRequest(texts=["a"]))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_encoder_is_listed(stub: Stub) -> None:
    (listed,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (listed.id, listed.context_length, listed.is_encoder) == ("tiny", 64, True)
