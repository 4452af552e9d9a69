"""Pooling and the modules after it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from runtime.encoder import load_encoder
from runtime.encoder.batch import RaggedBatch
from runtime.errors import CheckpointError
from tests.runtime.encoder.folders import SHAPE, random_inputs, write_encoder, write_modules

HIDDEN = SHAPE["hidden_size"]
POOLED = {
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(0),
    "max": lambda hidden: hidden.amax(0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(0) / len(hidden) ** 0.5,
    "lasttoken": lambda hidden: hidden[-1],
}
FORMER = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_encoder(tmp_path, "BertModel")
    return tmp_path


def expected_of(folder: Path, modes: tuple[str, ...]) -> torch.Tensor:
    encoder = load_encoder(folder)
    rows = []
    for each in random_inputs():
        with torch.inference_mode():
            hidden = encoder.backbone(RaggedBatch.of([each]))
        rows.append(torch.cat([POOLED[mode](hidden) for mode in modes]))
    return torch.stack(rows)


@pytest.mark.parametrize("modes", [*((mode,) for mode in POOLED), ("cls", "mean")])
def test_pooling_modes(modes: tuple[str, ...], folder: Path) -> None:
    expected = expected_of(folder, modes)
    former = {key: mode in modes for mode, key in FORMER.items()}
    for config in ({"pooling_mode": list(modes), "embedding_dimension": HIDDEN}, former):
        write_modules(folder, config)
        encoder = load_encoder(folder)
        found = encoder.encode(random_inputs())
        assert found.shape[1] == encoder.dimension
        # Sums of up to 80 addends in fp32, in another order.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        alone = torch.cat([encoder.encode([each]) for each in random_inputs()])
        assert torch.equal(alone, found)


def test_folder_without_modules_has_mean_pooling(folder: Path) -> None:
    expected = expected_of(folder, ("mean",))
    torch.testing.assert_close(load_encoder(folder).encode(random_inputs()), expected)


def test_normalized_embeddings(folder: Path) -> None:
    expected = functional.normalize(load_encoder(folder).encode(random_inputs()))
    write_modules(folder, {"pooling_mode": "mean"}, normalize=True)
    torch.testing.assert_close(load_encoder(folder).encode(random_inputs()), expected)


@pytest.mark.parametrize("activation", ["Tanh", "Identity"])
@pytest.mark.parametrize("bias", [False, True])
def test_dense_module(activation: str, bias: bool, folder: Path) -> None:
    pooled = load_encoder(folder).encode(random_inputs())
    write_modules(folder, {"pooling_mode": "mean"}, more=["Dense"], normalize=True)
    dense = folder / "2_Dense"
    dense.mkdir()
    config = {
        "in_features": HIDDEN,
        "out_features": 20,
        "bias": bias,
        "activation_function": f"torch.nn.modules.activation.{activation}",
    }
    (dense / "config.json").write_text(json.dumps(config))
    weight, added = torch.randn(20, HIDDEN) / HIDDEN**0.5, torch.randn(20)
    tensors = {"linear.weight": weight} | ({"linear.bias": added} if bias else {})
    save_file(tensors, dense / "model.safetensors")
    x = functional.linear(pooled, weight, added if bias else None)
    expected = functional.normalize(torch.tanh(x) if activation == "Tanh" else x)
    encoder = load_encoder(folder)
    assert encoder.dimension == 20
    torch.testing.assert_close(encoder.encode(random_inputs()), expected)


@pytest.mark.parametrize(
    ("pooling", "more", "message"),
    [
        ({"pooling_mode": "weightedmean"}, (), "weightedmean"),
        ({"pooling_mode_weightedmean_tokens": True}, (), "weightedmean"),
        ({"pooling_mode": "mean", "include_prompt": False}, (), "prompt"),
        ({"pooling_mode": "mean", "word_embedding_dimension": 47}, (), "47"),
        ({"pooling_mode": "mean"}, ("WordWeights",), "WordWeights"),
    ],
)
def test_unsupported_modules_are_named(
    pooling: dict[str, Any], more: tuple[str, ...], message: str, folder: Path
) -> None:
    write_modules(folder, pooling, more=more)
    with pytest.raises(CheckpointError, match=message):
        load_encoder(folder)


def test_hash_depends_on_the_modules(folder: Path) -> None:
    hashes = {load_encoder(folder).model_hash}
    for pooling in ("cls", "max"):
        for normalize in (False, True):
            write_modules(folder, {FORMER[pooling]: True}, normalize=normalize)
            hashes.add(load_encoder(folder).model_hash)
    assert len(hashes) == 5
    assert load_encoder(folder).model_hash in hashes
