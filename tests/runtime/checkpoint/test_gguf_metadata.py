"""Metadata of GGUF files that change the computation: as in llama.cpp, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.checkpoint import load_checkpoint
from runtime.errors import CheckpointError
from runtime.offline.compress.forward import forward
from tests.runtime.checkpoint.gguf_samples import tiny_model, write_gguf


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 4.0}, 4.0),
        ({"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 4.0}, 2.0),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, 1.0),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, 1.0),
        ({"llama.rope.scaling.type": "linear"}, 1.0),
        ({"llama.rope.scaling.attn_factor": 1.0, "llama.vocab_size": 101}, 1.0),
    ],
)
def test_rope_scaling_has_the_precedence_of_llama_cpp(
    metadata: dict[str, Any], factor: float, tmp_path: Path
) -> None:
    model = tiny_model(tied=True)
    write_gguf(model, tmp_path / "tiny.gguf", metadata=metadata)
    model.model.rotary_emb.inv_freq /= factor
    tokens = torch.randint(0, 101, (1, 100))
    with torch.no_grad():
        expected = model(tokens).logits
    actual = forward(load_checkpoint(tmp_path / "tiny.gguf"), tokens)
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("equal", [True, False])
def test_stored_output_matrix_is_the_lm_head(equal: bool, tmp_path: Path) -> None:
    model = tiny_model(tied=True)
    embedding = model.model.embed_tokens.weight.detach()
    head = embedding if equal else embedding.flip(0)
    write_gguf(model, tmp_path / "tiny.gguf", {"output.weight": head.numpy().copy()})
    assert torch.equal(load_checkpoint(tmp_path / "tiny.gguf").lm_head, head)


def test_context_is_limited_to_the_sliding_window(tmp_path: Path) -> None:
    metadata = {"llama.attention.sliding_window": 32}
    write_gguf(tiny_model(tied=True), tmp_path / "tiny.gguf", metadata=metadata)
    assert load_checkpoint(tmp_path / "tiny.gguf").config.context_length == 32


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.scaling.attn_factor": 1.2}, "attn_factor"),
        ({"llama.rope.dimension_count": 8}, "part of the head"),
        ({"llama.attention.causal": False}, "attention.causal"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.embedding_scale": 12.0}, "embedding_scale"),
        ({"llama.logit_scale": 8.0}, "logit_scale"),
        ({"llama.final_logit_softcapping": 30.0}, "softcapping"),
        ({"llama.expert_count": 4}, "expert_count"),
        ({"llama.vocab_size": 99}, "101 rows, but vocab_size is 99"),
        ({"split.count": 3}, "split.count"),
        ({"general.type": "adapter"}, "general.type"),
    ],
)
def test_metadata_that_change_the_computation_are_refused(
    metadata: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    write_gguf(tiny_model(tied=True), tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(tmp_path / "tiny.gguf")


def test_factors_of_long_rope_are_refused(tmp_path: Path) -> None:
    factors = {"rope_factors_long.weight": np.ones(8, np.float32)}
    write_gguf(tiny_model(tied=True), tmp_path / "tiny.gguf", factors)
    with pytest.raises(CheckpointError, match="rope_factors_long"):
        load_checkpoint(tmp_path / "tiny.gguf")
