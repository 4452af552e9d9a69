"""Logits and configs of tiny random models that transformers wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import load_checkpoint
from runtime.errors import CheckpointError
from runtime.layers.rope import cos_sin_table, inverse_frequencies
from runtime.offline.compress.forward import forward
from tests.runtime.checkpoint.samples import (
    LINEAR,
    LLAMA3,
    MODELS,
    YARN,
    change_config,
    change_weights,
    save_random,
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 63])
def test_logits_equal_those_of_transformers(name: str, length: int, tmp_path: Path) -> None:
    model = save_random(name, tmp_path)
    # With few tokens, transformers uses the short factors of LongRoPE.
    tokens = torch.randint(0, 97, (3, 63 if name == "phi3-long" else length))
    with torch.no_grad():
        expected = model(tokens).logits
    actual = forward(load_checkpoint(tmp_path), tokens)
    # Both models compute in fp32, but add up to 80 terms in different orders, over two layers.
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama-llama3", "qwen2-yarn"])
def test_rope_tables_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_random(name, tmp_path)
    config = load_checkpoint(tmp_path).config
    rotary = model.model.rotary_emb
    torch.testing.assert_close(inverse_frequencies(config), rotary.inv_freq, rtol=1e-6, atol=0)
    cos, sin = cos_sin_table(config, 63)
    expected = rotary(torch.zeros(1), torch.arange(63)[None])
    half = config.head_dim // 2
    torch.testing.assert_close(cos, expected[0][0, :, :half], rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, expected[1][0, :, :half], rtol=0, atol=1e-5)


def test_sharded_model_equals_the_single_file(tmp_path: Path) -> None:
    save_random("qwen2", tmp_path / "one")
    save_random("qwen2", tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    tokens = torch.randint(0, 97, (1, 17))
    one, many = (load_checkpoint(tmp_path / folder) for folder in ("one", "many"))
    assert torch.equal(forward(one, tokens), forward(many, tokens))


def test_rope_keys_of_older_configs_are_read(tmp_path: Path) -> None:
    save_random("llama-llama3", tmp_path)
    new = load_checkpoint(tmp_path).config
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    change_config(tmp_path, rope_parameters=None, rope_scaling=scaling, rope_theta=500.0)
    assert load_checkpoint(tmp_path).config == new
    change_config(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    assert load_checkpoint(tmp_path).config.rope.scaling == "linear"


def test_eos_tokens_of_both_config_files_are_merged(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert load_checkpoint(tmp_path).config.eos_token_ids == (3, 5, 7)


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({}, 96),
        ({"max_position_embeddings": 24}, 96),
        ({"max_position_embeddings": 24, "original_max_position_embeddings": 12}, 48),
        ({"max_position_embeddings": 120}, 120),
        ({"original_max_position_embeddings": 30}, 120),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 96),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": None}}, 96),
    ],
)
def test_context_length_includes_the_extension_of_yarn(
    change: dict[str, Any], context: int, tmp_path: Path
) -> None:
    save_random("qwen2-yarn", tmp_path)
    change_config(tmp_path, **change)
    assert load_checkpoint(tmp_path).config.context_length == context


def test_model_hash_depends_on_config_and_weights_only(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    original = load_checkpoint(tmp_path).model_hash
    assert load_checkpoint(tmp_path, torch.bfloat16).model_hash == original
    change_config(tmp_path, rms_norm_eps=1e-5)
    changed = load_checkpoint(tmp_path).model_hash
    change_weights(tmp_path, lambda weights: weights["model.norm.weight"].mul_(2))
    assert len({original, changed, load_checkpoint(tmp_path).model_hash}) == 3


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architecture None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "not part of this architecture"),
        ({"num_key_value_heads": 4}, "cannot share"),
        ({"num_key_value_heads": 3}, "k_proj.weight has shape"),
        ({"intermediate_size": 81}, "gate_proj.weight has shape"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": float("nan")}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"head_dim": 7}, "odd"),
        ({"attention_bias": True}, "no tensor model.layers.0.self_attn.q_proj.bias"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layers"),
        ({"partial_rotary_factor": 0.5}, "part of the head"),
        ({"rope_parameters": LINEAR | {"factor": 0}}, "factor = 0"),
        ({"rope_parameters": LINEAR | {"rope_theta": 0}}, "rope_theta = 0"),
        ({"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta = 1"),
        ({"rope_parameters": YARN | {"beta_fast": 0}}, "beta_fast = 0"),
        ({"rope_parameters": YARN | {"factor": -2.0}}, "factor = -2"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor at or above"),
        ({"rope_parameters": LINEAR | {"frequency_divisors": [2.0]}}, "1 frequency_divisors"),
        ({"rope_parameters": LINEAR | {"frequency_divisors": [0.0] * 8}}, "divisors = 0"),
    ],
)
def test_error_names_the_unsupported_or_inconsistent_config_value(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    save_random("llama", tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(tmp_path)


def test_error_names_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    change_weights(tmp_path, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"no tensor model\.norm\.weight"):
        load_checkpoint(tmp_path)
    change_weights(tmp_path, lambda weights: weights.update(extra=torch.ones(1)))
    change_weights(tmp_path, lambda weights: weights.update({"model.norm.weight": torch.ones(48)}))
    with pytest.raises(CheckpointError, match="extra"):
        load_checkpoint(tmp_path)


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    change_weights(
        tmp_path,
        lambda weights: weights.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
    )
    with pytest.raises(CheckpointError, match="int8"):
        load_checkpoint(tmp_path)


class Bomb:
    """An object that fails the test when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was read",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused_without_reading(name: str, tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model": Bomb()}, tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match="pickled"):
            load_checkpoint(path)


def test_malformed_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model directory"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "nothing")
    save_random("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{not json       ")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="elsewhere"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_embedding_that_is_not_finite_is_refused(
    name: str, value: float, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """Only requests with that token would fail, so that a test prompt does not find it."""
    save_random(name, tmp_path)
    change_weights(tmp_path, lambda weights: _set(weights["model.embed_tokens.weight"], value))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight .* NaN or infinite"):
        load_checkpoint(tmp_path, dtype=dtype)


def _set(embedding: torch.Tensor, value: float) -> None:
    embedding[90, 7] = value
