"""`/v1/rerank` and `/v1/score` by an embedder and by a cross encoder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.encoder.model import EncoderInput
from services.tokenizer import encoder
from tests.services.gateway.encoding.conftest import EncoderSite, OpenSite

QUERY = "abc"
DOCUMENTS = ["xyz uvw", "abd", "hello"]


@pytest.fixture
async def cross(open_site: OpenSite, cross_encoder: Path) -> EncoderSite:
    opened: EncoderSite = await open_site(path=cross_encoder)
    return opened


def cosines(site: EncoderSite, first: list[str], second: list[str]) -> list[float]:
    encode = site.encoder.tokenizer.encode
    rows = [
        site.loaded.encoder.encode([EncoderInput(tuple(encode(text).tokens)) for text in texts])
        for texts in (first, second)
    ]
    found: list[float] = torch.cosine_similarity(rows[0], rows[1]).tolist()
    return found


def logits(site: EncoderSite, pairs: list[tuple[str, str]]) -> list[float]:
    found = [site.encoder.tokenizer.encode_pair(*pair) for pair in pairs]
    inputs = [EncoderInput(tuple(each.tokens), tuple(each.types)) for each in found]
    scores = site.loaded.encoder.activation(site.loaded.encoder.encode(inputs))
    values: list[float] = scores[:, 0].tolist()
    return values


async def scores_of(site: EncoderSite, **body: Any) -> list[float]:
    answer = await site.post("/v1/score", body)
    assert answer.status_code == 200, answer.text
    return [entry["score"] for entry in answer.json()["data"]]


async def test_embedder_ranks_by_cosine_with_its_prompts(site: EncoderSite) -> None:
    answer = (await site.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})).json()
    expected = cosines(site, [f"q {QUERY}"] * 3, DOCUMENTS)
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [found[index] for index in range(3)] == pytest.approx(expected, abs=1e-6)
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert "document" not in answer["results"][0]
    assert answer["id"].startswith("rerank-")


async def test_cross_encoder_ranks_by_its_scores(cross: EncoderSite) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    body = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": True}
    results = (await cross.post("/v1/rerank", body)).json()["results"]
    expected = logits(cross, [(QUERY, text) for text in DOCUMENTS])
    order = sorted(range(3), key=lambda index: -expected[index])[:2]
    assert [result["index"] for result in results] == order
    for result in results:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], rel=1e-5)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}


@pytest.mark.parametrize(
    "fields",
    [{"top_n": 0}, {"top_n": 9}, {"top_n": None}, {"rank_fields": ["text"], "raw_scores": False}],
)
async def test_fields_of_clients_that_select_all_documents(
    site: EncoderSite, fields: dict[str, Any]
) -> None:
    answer = await site.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, **fields})
    assert len(answer.json()["results"]) == 3


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
async def test_other_paths_of_rerank(site: EncoderSite, path: str) -> None:
    answer = await site.post(path, {"query": QUERY, "documents": DOCUMENTS})
    assert len(answer.json()["results"]) == 3


async def test_score_of_one_with_many_and_of_many_with_many(cross: EncoderSite) -> None:
    pairs = [(QUERY, text) for text in DOCUMENTS]
    expected = logits(cross, pairs)
    assert await scores_of(cross, text_1=QUERY, text_2=DOCUMENTS) == pytest.approx(expected)
    assert await scores_of(cross, queries=[QUERY] * 3, documents=DOCUMENTS) == pytest.approx(
        expected
    )
    assert await scores_of(cross, text_1=QUERY, text_2="abd") == pytest.approx(expected[1:2])


async def test_embedder_scores_pairs(site: EncoderSite) -> None:
    first = ["ab", "cd"]
    expected = cosines(site, ["q ab", "q cd"], ["x", "y"])
    assert await scores_of(site, text_1=first, text_2=["x", "y"]) == pytest.approx(
        expected, abs=1e-6
    )


async def test_cross_encoder_has_no_embeddings(cross: EncoderSite) -> None:
    answer = await cross.post("/v1/embeddings", {"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_supported")


async def test_long_pair_is_refused_or_cut(cross: EncoderSite) -> None:
    body = {"query": QUERY, "documents": ["a", "b " * 90]}
    answer = await cross.post("/v1/rerank", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents[1]")
    answer = await cross.post("/v1/rerank", {**body, "truncate_prompt_tokens": -1})
    assert answer.status_code == 200


@pytest.fixture
def tokenized(cross: EncoderSite, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Size of each tokenization, and whether it runs while a slot is held."""
    prompts = cross.gateway.prompts
    tokenize, found = prompts.tokenize, []

    async def record(size: int, work: Any) -> Any:
        found.append((size, bool(prompts._slots._held)))
        return await tokenize(size, work)

    monkeypatch.setattr(prompts, "tokenize", record)
    return found


async def test_small_body_with_many_pairs_is_tokenized_as_a_large_request(
    cross: EncoderSite, tokenized: list[tuple[int, bool]]
) -> None:
    large = {"query": "a " * 1000, "documents": ["b"] * 500}
    assert len(json.dumps(large, separators=(",", ":"))) <= 4096
    answer = await cross.post("/v1/rerank", large)  # the first pair is too long
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    small = {"text_1": QUERY, "text_2": ["b"] * 3}
    assert (await cross.post("/v1/score", small)).status_code == 200
    small_bytes = len(json.dumps(small, separators=(",", ":")))
    assert tokenized == [(2001 * 500, True), (small_bytes, False)]


async def test_pairs_beyond_the_limit_are_refused_before_they_are_tokenized(
    cross: EncoderSite, tokenized: list[tuple[int, bool]]
) -> None:
    query, documents = "a" * 900_000, ["b"] * 2048
    for path, body in (
        ("/v1/rerank", {"query": query, "documents": documents}),
        ("/v1/score", {"text_1": query, "text_2": documents}),
    ):
        answer = await cross.post(path, {**body, "truncate_prompt_tokens": -1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert not tokenized


@pytest.mark.parametrize(("size", "batch"), [(1, 100), (3000, 7000)])
async def test_pairs_after_one_that_is_too_long_are_not_tokenized(
    cross: EncoderSite, monkeypatch: pytest.MonkeyPatch, size: int, batch: int
) -> None:
    backend = cross.encoder.tokenizer._backend
    found: list[str] = []

    class Recording:
        def encode_batch(self, pairs: list[tuple[str, str]]) -> Any:
            found.extend(second for _, second in pairs)
            return backend.encode_batch(pairs)

    monkeypatch.setattr(encoder, "_BATCH_CHARS", batch)
    monkeypatch.setattr(cross.encoder.tokenizer, "_backend", Recording())
    body = {"query": QUERY, "documents": ["a" * size, "b " * (90 + size), "c" * size]}
    answer = await cross.post("/v1/rerank", body)
    assert answer.json()["error"]["param"] == "documents[1]"
    assert found == body["documents"][:2]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/rerank", {"documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "a"}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": [1]}, "documents[0]"),
    ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
    ("/v1/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields"),
    ("/v1/score", {"text_1": "a"}, "text_2"),
    ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/v1/score", {"text_1": "a", "text_2": [1]}, "text_2"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_body_gets_a_typed_error(
    site: EncoderSite, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await site.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert str(error["param"]).startswith(param), error
