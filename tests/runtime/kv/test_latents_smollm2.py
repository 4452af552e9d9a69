"""Format `lowrank` on SmolLM2 with factorized k and v: as exact on real text as dense bf16 KV."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint, Dense, FactorPair, checkpoint_path, load_checkpoint
from runtime.errors import CheckpointError
from runtime.models.build import build_model
from runtime.offline.compress.forward import forward
from tests.runtime.models.test_model import TEXTS, logits_of

pytestmark = pytest.mark.long


def of_full_rank(dense: Dense) -> FactorPair:
    """Return factors of a matrix; with fewer ranks, the model is not accurate any more."""
    u, values, v = torch.linalg.svd(dense.weight, full_matrices=False)
    root = values.sqrt()
    return FactorPair((u * root).contiguous(), (root[:, None] * v).contiguous(), dense.bias)


@pytest.fixture(scope="module")
def factorized() -> Checkpoint:
    try:
        path = checkpoint_path("smollm2-135m")
    except CheckpointError as missing:
        pytest.skip(str(missing))
    checkpoint = load_checkpoint(path)
    layers = [
        replace(layer, k=of_full_rank(layer.k), v=of_full_rank(layer.v))
        for layer in checkpoint.layers
    ]
    return replace(checkpoint, layers=tuple(layers))


def divergence(exact: Tensor, logits: Tensor) -> float:
    """Return the mean KL divergence of the next token, in nats."""
    expected, found = exact.log_softmax(1), logits.log_softmax(1)
    return float((expected.exp() * (expected - found)).sum(1).mean())


def test_errors_are_those_of_rounding_to_bf16(factorized: Checkpoint) -> None:
    from services.tokenizer.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint_path("smollm2-135m"))
    dense, lowrank = build_model(factorized), build_model(factorized, kv_format="lowrank")
    equal = count = 0
    errors: list[tuple[float, float]] = []
    for text in TEXTS:
        tokens = list(tokenizer.encode(text))
        exact = forward(factorized, torch.tensor([tokens]))[0]  # fp32 KV
        of_dense, of_latents = logits_of(dense, tokens), logits_of(lowrank, tokens)
        errors.append((divergence(exact, of_dense), divergence(exact, of_latents)))
        equal += int((of_dense.argmax(1) == of_latents.argmax(1)).sum())
        count += len(tokens)
    means = torch.tensor(errors).mean(0)
    assert means[1] < 1e-4, f"dense: {means[0]}"
    assert means[1] < 2 * means[0]
    assert equal >= 0.99 * count
