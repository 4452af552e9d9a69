"""`/v1/embeddings` through a real router and a real worker with a tiny random encoder."""

import asyncio
import base64
import hashlib
import math
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from runtime.encoder.model import EncoderInput
from services.common.encoder_placement import EncoderModel
from services.common.errors import ModelNotFound
from services.gateway.gateway import Gateway
from services.gateway.http.encoder_api.bodies import EmbeddingsBody
from services.gateway.http.other_fields import IN_EMBEDDINGS, IN_RERANK, IN_SCORE
from services.gateway.http.reading import body_limit
from services.gateway.http.schemas import CompletionBody
from services.gateway.keys import ApiKeys
from services.gateway.router_client import RouterClient
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from services.router.app import build_encoder_dispatcher
from services.router.settings import RouterSettings
from tests.services.encoder.samples import CLS, MAX_TOKENS, SEP
from tests.services.gateway.encoding.conftest import (
    EncoderSite,
    OpenSite,
    RunningWorker,
    embeddings_of,
    running_worker,
)
from tests.services.gateway.field_tables import expected_rows, table_rows
from tests.services.tls_ports import router_port
from tests.services.workers import until

TEXTS = ("abc", "hello world", "a b c d e f g h i j k l m n o p")


def expected(site: EncoderSite, *texts: str, limit: int | None = None) -> list[list[float]]:
    inputs = [
        EncoderInput(tuple(site.encoder.tokenizer.encode(text, limit=limit).tokens))
        for text in texts
    ]
    found: list[list[float]] = site.loaded.encoder.encode(inputs).tolist()
    return found


async def test_embeddings_are_those_of_the_encoder(site: EncoderSite) -> None:
    answer = await site.post("/v1/embeddings", {"input": list(TEXTS), "model": "tiny"})
    body = answer.json()
    assert embeddings_of(answer) == expected(site, *TEXTS)
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2]
    tokens = sum(len(site.encoder.tokenizer.encode(text).tokens) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["object"], body["model"]) == ("list", "tiny")


async def test_single_text_and_token_ids(site: EncoderSite) -> None:
    ids = list(site.encoder.tokenizer.encode("abc").tokens)
    (wanted,) = expected(site, "abc")
    for given, count in (("abc", 1), (["abc"], 1), (ids, 1), ([ids], 1), ([ids, ids], 2)):
        answer = await site.post("/v1/embeddings", {"input": given})
        assert embeddings_of(answer) == [wanted] * count


async def test_base64_is_little_endian_float32(site: EncoderSite) -> None:
    answer = await site.post("/v1/embeddings", {"input": "abc", "encoding_format": "base64"})
    raw = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert list(struct.unpack("<48f", raw)) == expected(site, "abc")[0]


async def test_dimensions_are_cut_and_normalized_again(site: EncoderSite) -> None:
    (found,) = await site.embed("abc", dimensions=8)
    (whole,) = expected(site, "abc")
    length = math.sqrt(sum(value * value for value in whole[:8]))
    assert found == pytest.approx([value / length for value in whole[:8]], rel=1e-6)
    assert (await site.embed("abc", dimensions=48))[0] == whole


async def test_embeddings_are_normalized_on_request(site: EncoderSite) -> None:
    (found,) = await site.embed("abc", normalize=True)
    (given,) = expected(site, "abc")
    length = math.hypot(*given)
    assert length != pytest.approx(1.0, abs=0.1)
    assert found == pytest.approx([value / length for value in given], rel=1e-6)


async def test_long_text_is_refused_or_cut(site: EncoderSite) -> None:
    text = "a " * MAX_TOKENS
    answer = await site.post("/v1/embeddings", {"input": ["a", text]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "input[1]"
    for given, limit in ((-1, MAX_TOKENS), (10, 10)):
        cut = await site.embed(text, truncate_prompt_tokens=given)
        assert cut == expected(site, text, limit=limit)


async def test_long_text_is_cut_by_default_if_the_gateway_says_so(open_site: OpenSite) -> None:
    site = await open_site(truncate_inputs=True)
    text = "a " * MAX_TOKENS
    assert await site.embed(text) == expected(site, text, limit=MAX_TOKENS)
    assert await site.embed(text, truncate_prompt_tokens=10) == expected(site, text, limit=10)


async def test_setting_does_not_cut_token_ids(open_site: OpenSite) -> None:
    site = await open_site(truncate_inputs=True)
    ids = list(site.encoder.tokenizer.encode("a " * MAX_TOKENS).tokens)
    answer = await site.post("/v1/embeddings", {"input": ids})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    cut = await site.post("/v1/embeddings", {"input": ids, "truncate_prompt_tokens": 10})
    assert cut.status_code == 200
    assert cut.json()["usage"]["prompt_tokens"] == 10


async def test_list_of_texts_may_be_larger_than_a_prompt(open_site: OpenSite) -> None:
    site = await open_site(max_body_bytes=1024, max_encoder_body_bytes=4096)
    texts = ["a" * 20] * 100
    assert await site.embed(*texts) == expected(site, *texts)
    for given in (texts * 2, ["a", "b" * 1025]):
        answer = await site.post("/v1/embeddings", {"input": given})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert "input[1] has more than 1024 bytes" in answer.json()["error"]["message"]


async def test_limit_of_a_text_counts_bytes(open_site: OpenSite) -> None:
    site = await open_site(max_body_bytes=1024, max_encoder_body_bytes=8192)
    assert len(await site.embed("é " * 340, truncate_prompt_tokens=-1)) == 1  # 1,020 bytes
    for text in ("é " * 342, "語" * 342):  # 1,026 bytes, fewer characters than 1,024
        answer = await site.post("/v1/embeddings", {"input": text})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_prompt_precedes_texts(site: EncoderSite) -> None:
    assert await site.embed("abc", prompt_name="query") == expected(site, "q abc")
    answer = await site.post("/v1/embeddings", {"input": "abc", "prompt_name": "other"})
    assert answer.status_code == 400
    assert "'document', 'query'" in answer.json()["error"]["message"]


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": [[CLS, SEP], []]}, "input[1]"),
    ({"input": [97]}, "input"),
    ({"input": [[CLS], [-1]]}, "input[1]"),
    ({"input": ["a", 1]}, "input"),
    ({"input": {"a": 1}}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 49}, "dimensions"),
    ({"input": "a", "dimensions": "8"}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": MAX_TOKENS + 1}, "truncate_prompt_tokens"),
    ({"input": "a", "priority": 101}, "priority"),
    ({"input": "a", "normalize": False}, "normalize"),
    ({"input": "a", "unknown": 1}, "unknown"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_bad_body_gets_a_typed_error(
    site: EncoderSite, body: dict[str, Any], param: str | None
) -> None:
    answer = await site.post("/v1/embeddings", body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert str(error["param"]).startswith(param or "None")
    assert error["type"] == "invalid_request_error"


async def test_too_many_inputs_are_refused(open_site: OpenSite) -> None:
    site = await open_site(max_inputs=2)
    answer = await site.post("/v1/embeddings", {"input": ["a"] * 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


async def test_ignored_fields_are_accepted(site: EncoderSite) -> None:
    fields = {"user": "me", "normalize": None, "metadata": {"a": 1}, "dimensions": None}
    assert await site.embed("abc", **fields) == expected(site, "abc")


async def test_model_of_another_kind_or_name_is_refused(site: EncoderSite) -> None:
    answer = await site.post("/v1/embeddings", {"input": "a", "model": "gpt"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        answer = await site.post(path, {**body, "model": "tiny"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_supported")
        answer = await site.post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_encoder_beside_a_model(open_site: OpenSite) -> None:
    """Both are listed, each is refused on the routes of the other, and names are chosen."""
    model = ServedModel.load(GatewaySettings.model_validate({"model": "smollm2-135m"}))
    site = await open_site(model=model)
    listed = (await site.http.get("/v1/models")).json()["data"]
    lengths = {entry["id"]: entry["max_model_len"] for entry in listed}
    assert lengths == {model.name: None, "tiny": MAX_TOKENS}
    assert (await site.http.get("/v1/models/tiny")).json()["id"] == "tiny"
    assert await site.embed("abc") == expected(site, "abc")
    answer = await site.post("/v1/embeddings", {"input": "a", "model": model.name})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_supported")
    answer = await site.post("/v1/completions", {"prompt": "a", "model": "tiny"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_supported")
    assert await site.gateway.not_ready() is not None  # the model has no workers


async def test_gateway_without_an_encoder_says_so() -> None:
    settings = GatewaySettings.model_validate({"model": "smollm2-135m"})
    model = ServedModel.load(settings)
    gateway = Gateway(settings, model, ApiKeys())
    with pytest.raises(ModelNotFound, match="no encoder is served"):
        gateway.require_encoder(None)
    await gateway.close()


@pytest.mark.parametrize("encoder", [None, "all-minilm-l6-v2"])
def test_limit_of_encoder_bodies_applies_only_with_an_encoder(encoder: str | None) -> None:
    limits = {"max_body_bytes": 1 << 20, "max_encoder_body_bytes": 1 << 22}
    given = {"model": "smollm2-135m", "encoder_model": encoder, **limits}
    settings = GatewaySettings.model_validate(given)
    expected = 1 << 20 if encoder is None else 1 << 22
    assert body_limit(EmbeddingsBody, settings) == expected
    assert settings.largest_body_bytes == expected
    assert body_limit(CompletionBody, settings) == 1 << 20


def test_memory_for_bodies_counts_bodies_of_an_encoder_only_with_an_encoder() -> None:
    given = {"model": "smollm2-135m", "max_buffered_bytes": 1 << 23}
    assert GatewaySettings.model_validate(given).largest_body_bytes == 1 << 20
    with pytest.raises(ValidationError, match="four times max_encoder_body_bytes"):
        GatewaySettings.model_validate({**given, "encoder_model": "all-minilm-l6-v2"})


async def test_long_list_is_cut_and_spread_over_workers(open_site: OpenSite) -> None:
    site = await open_site(workers=2, encode_part_tokens=30)
    texts = [f"{'abc ' * (number % 7)}x" for number in range(60)]
    assert await site.embed(*texts) == expected(site, *texts)
    computed = [each.worker.thread.load.inputs for each in site.workers]
    assert sum(computed) == 60
    assert min(computed) > 0


async def test_part_has_at_most_a_batch_of_the_workers(open_site: OpenSite) -> None:
    site = await open_site(worker={"batch_tokens": 24})
    texts = [f"{'abc ' * (number % 7)}x" for number in range(60)]
    assert await site.embed(*texts) == expected(site, *texts)
    tokens = sum(len(site.encoder.tokenizer.encode(text).tokens) for text in texts)
    assert site.workers[0].worker.thread.load.calls >= tokens / 24


async def test_smallest_limit_of_the_workers_applies(open_site: OpenSite) -> None:
    site = await open_site()
    model = site.loaded.model.model_copy(update={"max_tokens": 16})
    async with other_worker(site, model):
        known = site.encoder.facts
        assert known is not None
        assert known.max_tokens == 16
        answer = await site.post("/v1/embeddings", {"input": "a " * 40})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        cut = {"input": "a " * 40, "truncate_prompt_tokens": -1}
        for _ in range(8):
            answer = await site.post("/v1/embeddings", cut)
            assert answer.json()["usage"]["prompt_tokens"] == 16


async def test_facts_come_from_a_router_that_knows_the_encoder(open_site: OpenSite) -> None:
    site = await open_site()
    without_workers = build_encoder_dispatcher(RouterSettings.model_validate({}), -1e9)
    async with router_port(encoders=without_workers) as port:
        urls = [f"http://127.0.0.1:{port}", *site.gateway.settings.routers]
        client = RouterClient(urls, token=None, timeout_s=5)
        listed = await client.encoders("tiny")
        assert listed is not None
        assert [each.ready for each in listed.models] == [True]
        unknown = await client.encoders("unknown")
        assert unknown is not None
        assert unknown.models == []
        await client.close()


async def test_request_is_computed_by_workers_of_one_version(open_site: OpenSite) -> None:
    site = await open_site()
    model = site.loaded.model.model_copy(update={"dimension": 24, "model_hash": "other"})
    async with other_worker(site, model) as other:
        for _ in range(8):
            assert await site.embed("abc") == expected(site, "abc")
        assert other.worker.thread.load.calls == 0
        registrar = site.workers[0].worker.registrar
        assert registrar is not None
        await registrar.drain()
        await site.until_registered(1)
        assert site.encoder.facts == model


@asynccontextmanager
async def other_worker(site: EncoderSite, model: EncoderModel) -> AsyncIterator[RunningWorker]:
    """Run a worker that registers another model beside those of a site."""
    loaded = replace(site.loaded, worker_id="encoder-other", epoch="other", model=model)
    port = int(site.gateway.settings.routers[0].rpartition(":")[2])
    async with running_worker(loaded, port, {}) as running:
        await site.until_registered(len(site.workers) + 1)
        yield running


async def test_worker_that_dies_loses_nothing(open_site: OpenSite) -> None:
    site = await open_site(workers=2, encode_part_tokens=64)
    texts = [f"{'abc ' * (number % 9)}x" for number in range(200)]
    calls = [asyncio.create_task(site.embed(*texts)) for _ in range(4)]
    victim = site.workers[0]
    await until(lambda: not victim.worker.idle)
    await victim.kill()
    for found in await asyncio.gather(*calls):
        assert found == expected(site, *texts)
    assert site.metric("headrace_failovers_total", reason="worker_lost") >= 1


async def test_refused_call_is_placed_again(open_site: OpenSite, monkeypatch: Any) -> None:
    site = await open_site(workers=2)
    refusing = site.workers[0].worker
    refusing.draining = True
    for _ in range(8):
        assert await site.embed("abc") == expected(site, "abc")
    assert site.workers[1].worker.thread.load.inputs >= 8


async def test_without_workers_the_error_is_typed(site: EncoderSite) -> None:
    await site.workers[0].kill()
    site.router.fleet.deregister("encoder-0", "e0")
    answer = await site.post("/v1/embeddings", {"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "retry-after" in answer.headers


async def test_deadline_ends_a_call(open_site: OpenSite, monkeypatch: Any) -> None:
    site = await open_site(deadline_s=0.3)
    block(site, monkeypatch)
    answer = await site.post("/v1/embeddings", {"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_drain_ends_what_still_runs(site: EncoderSite, monkeypatch: Any) -> None:
    block(site, monkeypatch)
    call = asyncio.create_task(site.post("/v1/embeddings", {"input": "a"}))
    await until(lambda: site.gateway.running > 0)
    await site.gateway.drain(0.05)
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_client_that_leaves_frees_its_worker(site: EncoderSite, monkeypatch: Any) -> None:
    block(site, monkeypatch)
    first = asyncio.create_task(site.embed("abc"))
    await until(lambda: not site.workers[0].worker.idle)
    first.cancel()
    await until(lambda: site.workers[0].worker.idle and not site.gateway.running)
    await until(lambda: site.router.fleet.idle)


async def test_key_is_required(open_site: OpenSite, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{hashlib.sha256(b'secret').hexdigest()} me\n")
    site = await open_site(keys=ApiKeys.load(file))
    assert (await site.post("/v1/embeddings", {"input": "a"})).status_code == 401
    authorized = {"authorization": "Bearer secret"}
    answer = await site.post("/v1/embeddings", {"input": "a"}, **authorized)
    assert answer.status_code == 200


async def test_metrics_count_requests_and_tokens(site: EncoderSite) -> None:
    await site.embed("abc")
    labels = {"endpoint": "/v1/embeddings", "status": "200"}
    assert site.metric("headrace_requests_total", **labels) == 1
    assert site.metric("headrace_prompt_tokens_total") == 5
    assert site.metric("headrace_encode_request_latency_seconds_count") == 1
    assert site.metric("headrace_request_stage_seconds_count", stage="encode") == 1


def block(site: EncoderSite, monkeypatch: Any) -> None:
    """Let the encoder take a second for each batch."""
    encode: Callable[..., torch.Tensor] = site.loaded.encoder.encode

    def slow(inputs: Any) -> torch.Tensor:
        time.sleep(1.0)
        return encode(inputs)

    monkeypatch.setattr(site.loaded.encoder, "encode", slow)


def test_table_of_ignored_fields_follows_from_the_declarations() -> None:
    common = {name: IN_EMBEDDINGS[name] for name in IN_EMBEDDINGS if name in IN_SCORE}
    places = {"": common} | {
        place: {name: other for name, other in others.items() if name not in common}
        for place, others in (
            ("embeddings.", IN_EMBEDDINGS),
            ("rerank.", IN_RERANK),
            ("score.", IN_SCORE),
        )
    }
    assert table_rows("EMBEDDINGS.md", "| ignored values") == expected_rows(places)
