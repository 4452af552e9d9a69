"""Factorization of a whole model: budgets, metadata, determinism, and predictions from moments."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from runtime.checkpoint import Checkpoint, Dense, FactorPair, load_checkpoint, write_checkpoint
from runtime.checkpoint.weights import LayerWeights
from runtime.config import ModelConfig
from runtime.errors import CompressionError
from runtime.models.family import rms_norm
from runtime.models.llama import PROJECTIONS
from runtime.offline.compress import (
    artifact_key,
    compress,
    cut_rows,
    decompose_model,
    documentation,
    parameters_kept,
    perplexity,
    truncate_model,
)
from runtime.offline.compress.forward import forward
from runtime.offline.compress.layerwise import LayerwiseModel
from runtime.offline.compress.moments import LayerMoments, backward_moments
from tests.runtime.tiny import linear_shape

CONFIG = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=83,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    context_length=256,
    rms_norm_eps=1e-6,
    tied_embeddings=True,
)


def random_model() -> Checkpoint:
    generator = torch.Generator().manual_seed(5)

    def linear(projection: str) -> Dense:
        out, inner = linear_shape(CONFIG, projection)
        scale = torch.logspace(0, -1.5, inner)
        bias = torch.randn(out, generator=generator) if projection in "qkv" else None
        return Dense(torch.randn(out, inner, generator=generator) * scale / inner**0.5, bias)

    def layer() -> LayerWeights:
        linears: dict[str, Any] = {name: linear(name) for name in PROJECTIONS}
        return LayerWeights(
            input_norm=torch.ones(48),
            post_norm=torch.ones(48),
            **linears,
        )

    embedding = torch.randn(83, 48, generator=generator)
    layers = (layer(), layer())
    # A small final norm keeps predictions uncertain; certain predictions have no gradient.
    return Checkpoint(CONFIG, embedding, layers, torch.full((48,), 0.2), embedding, "d" * 64)


MODEL = random_model()
TOKENS = torch.randint(0, 83, (24, 63), generator=torch.Generator().manual_seed(6))


def divergence(model: Checkpoint) -> float:
    """Return the KL divergence from the dense model, in nats per token, on held-out tokens."""
    tokens = torch.randint(0, 83, (16, 63), generator=torch.Generator().manual_seed(7))
    expected = forward(MODEL, tokens).log_softmax(-1)
    actual = forward(model, tokens).log_softmax(-1)
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


@pytest.mark.parametrize("keep", [0.95, 0.7, 0.4])
def test_parameters_stay_within_the_budget_and_use_it(keep: float) -> None:
    made, report = compress(MODEL, TOKENS, keep, rank_multiple=1)
    parameters = 0
    for layer, ranks in zip(made.layers, report.ranks, strict=True):
        for projection in PROJECTIONS:
            linear = getattr(layer, projection)
            out, inner = linear_shape(CONFIG, projection)
            if isinstance(linear, FactorPair):
                assert (linear.u.shape[0], linear.v.shape[1]) == (out, inner)
                assert linear.rank == ranks[projection]
                assert linear.rank * (out + inner) < out * inner
                parameters += linear.rank * (out + inner)
            else:
                assert ranks[projection] is None
                parameters += out * inner
    total = 2 * sum(math.prod(linear_shape(CONFIG, projection)) for projection in PROJECTIONS)
    assert report.parameters_kept == parameters / total
    assert keep - 0.06 < report.parameters_kept <= keep
    assert report.factorized > 0


def test_divergence_grows_as_keep_falls() -> None:
    divergences = [
        divergence(compress(MODEL, TOKENS, keep, rank_multiple=1)[0]) for keep in (0.9, 0.6, 0.3)
    ]
    assert divergences == sorted(divergences)
    assert divergences[0] < 0.05 * divergences[2]


def test_compress_beats_plain_svd_with_uniform_ranks() -> None:
    made, _report = compress(MODEL, TOKENS, 0.6, rank_multiple=1)

    def plain(linear: Dense) -> Any:
        U, S, Vh = torch.linalg.svd(linear.weight, full_matrices=False)
        rank = int(linear.weight.numel() * 0.6 / sum(linear.weight.shape))
        return FactorPair(U[:, :rank] * S[:rank], Vh[:rank], linear.bias)

    layers = tuple(
        replace(layer, **{name: plain(getattr(layer, name)) for name in PROJECTIONS})
        for layer in MODEL.layers
    )
    assert divergence(made) < 0.8 * divergence(replace(MODEL, layers=layers))


def moments_of(checkpoint: Checkpoint, tokens: torch.Tensor, seed: int) -> list[LayerMoments]:
    layers = range(checkpoint.config.num_layers)
    found = backward_moments(LayerwiseModel(checkpoint), tokens, layers, seed)
    return [layer.moments[0] for layer in found][::-1]


def test_moments_predict_the_loss_of_a_small_change() -> None:
    moments = moments_of(MODEL, TOKENS.repeat(4, 1), seed=1)
    change = torch.randn(48, 96, generator=torch.Generator().manual_seed(8)) * 2e-2
    C, G = moments[1].inputs["down"], moments[1].gradients["down"]
    predicted = 0.5 * float(torch.trace(G @ change @ C @ change.t()))
    down = Dense(MODEL.layers[1].down.weight + change)
    layers = (MODEL.layers[0], replace(MODEL.layers[1], down=down))
    # Kronecker factors ignore correlations between inputs and gradients; allow a factor of two.
    assert 0.5 < predicted / divergence(replace(MODEL, layers=layers)) < 2.0


def test_input_moments_are_means_over_linear_inputs() -> None:
    moments = moments_of(MODEL, TOKENS, seed=0)
    x = rms_norm(MODEL.embedding[TOKENS], MODEL.layers[0].input_norm, 1e-6).flatten(0, 1)
    expected = x.t() @ x / TOKENS.numel()
    # fp32 sums over 1,512 tokens are added in a different order.
    torch.testing.assert_close(moments[0].inputs["q"], expected, rtol=1e-4, atol=1e-5)


def test_result_is_reproducible_and_round_trips_through_a_file(tmp_path: Path) -> None:
    first, _ = compress(MODEL, TOKENS, 0.7, rank_multiple=4)
    again, _ = compress(MODEL, TOKENS, 0.7, rank_multiple=4)
    assert first.model_hash == again.model_hash != MODEL.model_hash
    write_checkpoint(first, tmp_path / "model")
    read = load_checkpoint(tmp_path / "model")
    assert (read.model_hash, read.keep) == (first.model_hash, 0.7)
    assert read.factorization is not None
    assert read.factorization == first.factorization
    assert read.factorization.method == "fisher-svd-2"
    assert read.factorization.source_hash == MODEL.model_hash
    assert read.factorization.calibration_tokens == TOKENS.numel()
    assert torch.equal(forward(read, TOKENS[:2]), forward(first, TOKENS[:2]))


def test_decomposed_model_is_truncated_to_any_keep() -> None:
    model = decompose_model(MODEL, TOKENS)
    for keep in (0.8, 0.5):
        made, report = compress(MODEL, TOKENS, keep, rank_multiple=4)
        again = truncate_model(model, keep, rank_multiple=4)
        assert again.model_hash == made.model_hash
        assert parameters_kept(again) == report.parameters_kept
    with pytest.raises(CompressionError, match="keep"):
        truncate_model(model, 1.5)


def test_progress_rises_to_one() -> None:
    calls: list[tuple[str, float]] = []
    compress(MODEL, TOKENS[:3], 0.7, lambda stage, done: calls.append((stage, done)), 1)
    fractions = [done for _stage, done in calls]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)
    assert {stage for stage, _done in calls} == {"calibrating", "factorizing"}


def test_keep_one_returns_the_dense_model() -> None:
    made, report = compress(MODEL, TOKENS, 1.0)
    assert made is MODEL
    assert (report.parameters_kept, report.factorized) == (1.0, 0)


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.01, math.nan])
def test_keep_outside_of_zero_to_one_is_refused(keep: float) -> None:
    with pytest.raises(CompressionError, match="keep"):
        compress(MODEL, TOKENS, keep)


def test_factorized_model_and_invalid_tokens_are_refused() -> None:
    made, _ = compress(MODEL, TOKENS[:2], 0.7, rank_multiple=1)
    with pytest.raises(CompressionError, match="already"):
        compress(made, TOKENS, 0.5)
    with pytest.raises(CompressionError, match="vocabulary"):
        compress(MODEL, TOKENS + 83, 0.5)
    with pytest.raises(CompressionError, match="length"):
        compress(MODEL, TOKENS[0], 0.5)


def test_artifact_key_depends_on_every_input() -> None:
    keys = {
        artifact_key("a" * 64, 0.8, TOKENS),
        artifact_key("b" * 64, 0.8, TOKENS),
        artifact_key("a" * 64, 0.9, TOKENS),
        artifact_key("a" * 64, 0.8, TOKENS.flip(0)),
        artifact_key("a" * 64, 0.8, TOKENS.reshape(63, 24)),
    }
    assert len(keys) == 5
    assert artifact_key("a" * 64, 0.8, TOKENS) == artifact_key("a" * 64, 0.80, TOKENS.clone())


def test_perplexity_of_uniform_logits_is_the_vocabulary_size() -> None:
    blank = replace(MODEL, lm_head=torch.zeros(83, 48))
    assert perplexity(blank, TOKENS[:3]) == pytest.approx(83.0, rel=1e-5)


def test_perplexity_is_the_exponential_of_the_mean_cross_entropy() -> None:
    scores = forward(MODEL, TOKENS[:4])[:, :-1].flatten(0, 1)
    expected = functional.cross_entropy(scores, TOKENS[:4, 1:].flatten()).exp()
    assert perplexity(MODEL, TOKENS[:4]) == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(CompressionError, match="perplexity needs"):
        perplexity(MODEL, TOKENS[:, :1])


def test_calibration_and_held_out_text_are_disjoint() -> None:
    calibration, held_out = documentation()
    assert len(calibration) > 5 * len(held_out) > 50_000
    paragraphs = set(held_out.split("\n\n"))
    assert not [text for text in calibration.split("\n\n") if text in paragraphs]


def test_rows_are_spread_over_the_text() -> None:
    rows = cut_rows(range(1000), length=17, count=3)
    assert rows.shape == (3, 17)
    assert rows[:, 0].tolist() == [0, 19 * 17, 38 * 17]
    assert cut_rows(range(40), length=17, count=9).shape == (2, 17)
    with pytest.raises(CompressionError, match="do not fill"):
        cut_rows(range(16), length=17, count=1)
