"""Files of OPT and Phi-3: stored names, parts of tensors, and refused configs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from runtime.checkpoint import load_checkpoint
from runtime.errors import CheckpointError
from runtime.offline.compress.forward import forward
from tests.runtime.checkpoint.samples import change_config, change_weights, save_random
from tests.runtime.tiny import prompt_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a model."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save_random(name, root / name)
        return root / name

    return folder


def tokens_of(count: int) -> list[int]:
    return list(prompt_of(count, vocab=97))


@pytest.mark.parametrize("name", ["opt", "phi3", "llama", "llama-tied"])
def test_folder_of_the_model_without_its_head_is_read(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Names then lack ``model.``, and the head is stored beside them or is the embedding."""
    save_random(name, tmp_path)

    def change(weights: dict[str, Tensor]) -> None:
        for key in list(weights):
            weights[key.removeprefix("model.")] = weights.pop(key)

    change_weights(tmp_path, change)
    tokens = torch.tensor([tokens_of(20)])
    expected = forward(load_checkpoint(folders(name)), tokens)
    assert torch.equal(forward(load_checkpoint(tmp_path), tokens), expected)


def test_layers_of_phi3_are_views_of_the_files_tensors(folders: Callable[[str], Path]) -> None:
    """The tensors of a file are memory-mapped and not copied."""
    layer = load_checkpoint(folders("phi3"), dtype=None).layers[0]
    q, k = layer.q.weight, layer.k.weight
    assert q._base is not None
    assert q._base.numel() == (48 + 2 * 16) * 48
    assert k._base is not None
    assert len(q) == 48


@pytest.mark.parametrize("early", ["su", "yarn"])
def test_early_names_of_longrope_are_read(
    early: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    save_random("phi3-long", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values["rope_parameters"]
    kept = {key: rope[key] for key in ("short_factor", "long_factor", "factor")}
    change_config(
        tmp_path,
        rope_parameters=...,
        rope_scaling={"type": early, **kept},
        rope_theta=rope["rope_theta"],
    )
    expected = load_checkpoint(folders("phi3-long")).config
    assert load_checkpoint(tmp_path).config == expected
    assert expected.rope.original_context == 32


def test_context_of_phi3_is_limited_to_its_window(tmp_path: Path) -> None:
    save_random("phi3-long", tmp_path)
    assert load_checkpoint(tmp_path).config.context_length == 96
    change_config(tmp_path, sliding_window=32)
    assert load_checkpoint(tmp_path).config.context_length == 32
    tokens = tokens_of(32)
    transformers.logging.disable_progress_bar()
    peer: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = peer(torch.tensor([tokens])).logits[0]
    actual = forward(load_checkpoint(tmp_path), torch.tensor([tokens]))[0]
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("opt", {"activation_function": "gelu"}, "activation_function"),
    ("opt", {"model_type": "llama"}, "model_type"),
    ("opt", {"num_attention_heads": 5}, "5 heads"),
    ("opt", {"max_position_embeddings": 95}, "positions.weight has shape"),
    ("opt", {"enable_bias": False}, "not part of this architecture"),
    ("opt-untied", {"enable_bias": True}, "q_proj.bias"),
    ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.75}}, "part of the head"),
    ("phi3", {"num_key_value_heads": 3}, "v_proj.weight has shape"),
    ("phi3", {"intermediate_size": 81}, "up_proj.weight has shape"),
    ("phi3-long", {"rope_parameters": {"rope_type": "longrope"}}, "without short_factor"),
]


@pytest.mark.parametrize(("name", "change", "complaint"), REFUSED, ids=str)
def test_unsupported_configs_are_refused_by_name(
    name: str, change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    save_random(name, tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("opt", "model.decoder.embed_positions.weight"),
    ],
)
def test_missing_tensor_error_has_the_name_in_the_file(
    name: str, stored: str, tmp_path: Path
) -> None:
    save_random(name, tmp_path)
    change_weights(tmp_path, lambda weights: weights.pop(stored))
    with pytest.raises(CheckpointError, match=f"no tensor {stored}"):
        load_checkpoint(tmp_path)
