"""Embeddings of all-MiniLM-L6-v2 through `headrace up --encoder`, alone and beside a model."""

import subprocess
from collections.abc import Iterator

import httpx
import pytest
import torch

from headrace.v1 import inference_pb2
from runtime.encoder import EncoderInput, load_encoder
from services.common.interpreter import headrace_command
from services.common.model_source import resolve_model
from services.tokenizer.encoder import EncoderTokenizer
from tests.harness.deployment import Running, deployed
from tests.harness.encoders import ALONE, ENCODER, needs_encoder

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900), needs_encoder]

QUERY = "Which animal chases mice?"
DOCUMENTS = [
    "The stock market fell sharply on Monday.",
    "A cat hunts mice and rats around the farm.",
    "The train to Paris leaves at nine.",
]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Running]:
    with deployed(*ALONE) as running:
        yield running


@pytest.fixture
def http(deployment: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=deployment.url, timeout=120, trust_env=False) as client:
        yield client


def embeddings(client: httpx.Client, texts: list[str]) -> torch.Tensor:
    answer = client.post("/v1/embeddings", json={"input": texts}).raise_for_status().json()
    return torch.tensor([entry["embedding"] for entry in answer["data"]])


def test_embeddings_are_those_of_the_runtime_in_any_composition(http: httpx.Client) -> None:
    path = resolve_model(ENCODER)
    tokenizer = EncoderTokenizer.load(path)
    texts = [QUERY, *DOCUMENTS, "a", "many words " * 100]
    inputs = [EncoderInput(tuple(tokenizer.encode(text).tokens)) for text in texts]
    expected = load_encoder(path, max_tokens=tokenizer.trained_tokens).encode(inputs)
    assert torch.equal(embeddings(http, texts), expected)
    alone = torch.cat([embeddings(http, [text]) for text in texts])
    assert torch.equal(alone, expected)


def test_relevant_document_ranks_first(http: httpx.Client) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS}
    results = http.post("/v1/rerank", json=body).raise_for_status().json()["results"]
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] > results[1]["relevance_score"] + 0.2


def test_grpc_embeddings_equal_those_over_http(deployment: Running, http: httpx.Client) -> None:
    reply = deployment.stub().Embed(inference_pb2.EmbedRequest(texts=DOCUMENTS))
    found = torch.tensor([list(each.values) for each in reply.embeddings])
    assert torch.equal(found, embeddings(http, DOCUMENTS))


def test_encoder_is_listed_and_does_not_chat(http: httpx.Client) -> None:
    (listed,) = http.get("/v1/models").json()["data"]
    assert (listed["id"], listed["max_model_len"]) == ("all-MiniLM-L6-v2", 256)
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": listed["id"], "messages": messages}
    assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_status_lists_the_encoder_worker(deployment: Running) -> None:
    command = headrace_command("status", "--port", str(deployment.port))
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "encoder all-MiniLM-L6-v2" in shown
    (row,) = [line for line in shown.splitlines() if "encoder-0" in line and "ready" in line]
    assert " encoder " in row


def test_encoder_beside_a_model() -> None:
    flags = ("--encoder", ENCODER, "--colocated", "--device", "cpu")
    with deployed(*flags) as running, httpx.Client(base_url=running.url, timeout=300) as client:
        names = [entry["id"] for entry in client.get("/v1/models").json()["data"]]
        assert names == [running.model, "all-MiniLM-L6-v2"]
        assert embeddings(client, ["hello"]).shape == (1, 384)
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 4
