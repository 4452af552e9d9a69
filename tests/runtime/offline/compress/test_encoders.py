"""Factorized encoders: methods, canonical checkpoints, and their results."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoint import load_checkpoint, write_checkpoint
from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, linears_of
from runtime.encoder import EncoderInput, load_encoder
from runtime.encoder.batch import RaggedBatch
from runtime.offline.compress import Method, compress, embeddings, forward, similarity
from runtime.offline.compress.decompose import decompose
from runtime.offline.compress.layerwise import LayerwiseModel
from runtime.offline.compress.moments import backward_moments
from tests.runtime.encoder.folders import VOCABULARY, random_inputs, write_encoder

ROWS, LENGTH = 12, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert")
    write_encoder(made, "BertModel", initializer_range=0.1)
    return made


@pytest.fixture(scope="module")
def dense(folder: Path) -> Checkpoint:
    return load_checkpoint(folder)


def tokens_of(seed: int, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)


def test_plain_forward_pass_equals_the_served_one(folder: Path, dense: Checkpoint) -> None:
    tokens = tokens_of(0, 3)
    inputs = [EncoderInput(tuple(row)) for row in tokens.tolist()]
    encoder = load_encoder(folder)
    with torch.inference_mode():
        served = encoder.backbone(RaggedBatch.of(inputs)).view(*tokens.shape, -1)
    expected = torch.nn.functional.normalize(served.mean(1), dim=-1)
    torch.testing.assert_close(embeddings(dense, tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", [Method.SVD, Method.FWSVD, Method.SVD_LLM, Method.FISHER])
def test_factorized_encoders_are_written_loaded_and_served(
    method: Method, dense: Checkpoint, tmp_path: Path
) -> None:
    made, report = compress(dense, tokens_of(0), 0.6, method=method)
    assert report.parameters_kept <= 0.6
    assert report.factorized > 0
    write_checkpoint(made, tmp_path / "made")
    loaded = load_checkpoint(tmp_path / "made")
    assert loaded.model_hash == made.model_hash
    assert loaded.config == dense.config
    assert loaded.factorization == made.factorization
    tokens = tokens_of(1, 3)
    inputs = [EncoderInput(tuple(row)) for row in tokens.tolist()]
    found = torch.nn.functional.normalize(load_encoder(tmp_path / "made").encode(inputs))
    torch.testing.assert_close(found, embeddings(made, tokens), rtol=0, atol=1e-5)
    # Random weights have no small singular values; trained ones are closer.
    assert 0.5 < similarity(found, embeddings(dense, tokens)) < 1.0


def test_factorized_results_are_bitwise_equal_in_any_batch(
    dense: Checkpoint, tmp_path: Path
) -> None:
    write_checkpoint(compress(dense, tokens_of(0), 0.5)[0], tmp_path / "made")
    encoder = load_encoder(tmp_path / "made")
    inputs = random_inputs(typed=True)
    together = encoder.encode(inputs)
    assert torch.equal(torch.cat([encoder.encode([each]) for each in inputs]), together)


def test_classification_head_is_kept(tmp_path: Path) -> None:
    write_encoder(tmp_path / "dense", "RobertaForSequenceClassification", num_labels=3)
    dense = load_checkpoint(tmp_path / "dense")
    full = replace(dense, layers=tuple(map(in_full_rank, dense.layers)))
    write_checkpoint(full, tmp_path / "made")
    expected = load_encoder(tmp_path / "dense").encode(random_inputs())
    found = load_encoder(tmp_path / "made").encode(random_inputs())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def in_full_rank(layer: object) -> object:
    pairs = {}
    for field, linear in linears_of(layer):
        assert isinstance(linear, Dense)
        u, s, v = torch.linalg.svd(linear.weight, full_matrices=False)
        pairs[field] = FactorPair(u * s, v, linear.bias)
    return replace(layer, **pairs)  # type: ignore[type-var]


def test_svd_is_the_truncated_svd(dense: Checkpoint) -> None:
    weight = dense.layers[0].up.weight
    part = decompose(weight, None, None)
    rank = 9
    pair = part.truncate(rank)
    u, s, v = torch.linalg.svd(weight.double())
    expected = (u[:, :rank] * s[:rank]) @ v[:rank]
    torch.testing.assert_close((pair.u @ pair.v).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(part.loss, s.square(), rtol=1e-6, atol=1e-9)


def test_row_importance_weights_rows(dense: Checkpoint) -> None:
    weight = dense.layers[0].down.weight
    importance = torch.rand(len(weight)) + 0.1
    pair = decompose(weight, None, importance).truncate(9)
    root = importance.double().sqrt()[:, None]
    u, s, v = torch.linalg.svd(root * weight.double(), full_matrices=False)
    expected = (u[:, :9] * s[:9]) @ v[:9] / root
    torch.testing.assert_close((pair.u @ pair.v).double(), expected, rtol=0, atol=1e-5)


def test_row_importance_is_the_squared_gradient_of_the_weight(dense: Checkpoint) -> None:
    """Compare with gradients of the weights that autograd computes, for the same loss."""
    tokens, seed = tokens_of(3, 2), 5
    model = LayerwiseModel(dense)
    last = dense.config.num_layers - 1
    *_, first = backward_moments(model, tokens, range(last + 1), seed, by_row=True)
    found = first.moments[0].gradients["up"]
    generator = torch.Generator().manual_seed(seed)
    expected = torch.zeros_like(found)
    for row in tokens:
        weight = dense.layers[0].up.weight.clone().requires_grad_()
        layer = replace(dense.layers[0], up=Dense(weight, dense.layers[0].up.bias))
        changed = replace(dense, layers=(layer, *dense.layers[1:]))
        embedding = with_gradient(changed, row)
        loss = embedding @ torch.randn(len(embedding), generator=generator)
        (gradient,) = torch.autograd.grad(loss, weight)
        expected += gradient.square().sum(1)
    torch.testing.assert_close(found, expected / tokens.numel(), rtol=1e-3, atol=1e-9)


def with_gradient(checkpoint: Checkpoint, row: Tensor) -> Tensor:
    hidden = forward.embed(checkpoint, row[None])
    rope = forward.rope_rows(checkpoint.config, len(row), hidden)
    for layer in checkpoint.layers:
        hidden = forward.forward_layer(checkpoint.config, layer, hidden, rope)
    return forward.mean_embedding(hidden)[0]
