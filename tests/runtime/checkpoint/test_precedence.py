"""Two sources of one fact give the logits of transformers, or a `CheckpointError`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from runtime.checkpoint import load_checkpoint
from runtime.errors import CheckpointError
from runtime.offline.compress.forward import forward
from tests.runtime.checkpoint.samples import (
    LINEAR,
    LLAMA3,
    LONGROPE,
    YARN,
    change_config,
    change_weights,
    save_random,
)

Weights = dict[str, Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ABSENT = ...
SLIDES = {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ABSENT}
LAST_LAYER = ["full_attention", "sliding_attention"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the unchanged folder of a model."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save_random(name, root / name)
        return root / name

    return folder


def compare(directory: Path, length: int = 40) -> None:
    """Check that the logits of ``length`` tokens are those of transformers."""
    tokens = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(1))
    transformers.logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(tokens).logits
    # Both compute in fp32, but add up to 80 terms in different orders, over two layers.
    torch.testing.assert_close(
        forward(load_checkpoint(directory), tokens), expected, rtol=2e-4, atol=2e-4
    )


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": ABSENT}),
    ("mistral", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"attention_bias": False, "mlp_bias": True}),
    ("qwen3", {"mlp_bias": True}),
    ("llama", {"head_dim": None}),
    ("llama", {"rms_norm_eps": ABSENT}),
    ("llama", {"hidden_act": "swish"}),
    ("llama", {"pretraining_tp": 2}),
    ("llama", {"torch_dtype": "bfloat16", "dtype": "float16"}),
    ("llama", {"embedding_multiplier": 1.0, "logits_scaling": 1, "logit_scale": None}),
    *((name, {"rope_parameters": ABSENT}) for name in ("llama", "mistral", "qwen2", "qwen3")),
    ("llama", {"rope_parameters": ABSENT, "rope_theta": 500.0}),
    ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0}),
    ("llama", {"rope_parameters": {"rope_theta": 100.0}, "rope_theta": 500.0}),
    ("llama", {"rope_parameters": LINEAR, "rope_scaling": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR, "rope_scaling": {"rope_type": "default"}}),
    ("llama", {"rope_parameters": LINEAR, "rope_scaling": {}}),
    ("llama", {"rope_parameters": ABSENT, "rope_scaling": {"factor": 4.0}}),
    ("llama", {"rope_parameters": LLAMA3 | {"type": "dynamic"}}),
    ("qwen2", {"rope_parameters": {"type": "default", "mrope_section": [1, 1, 2]}}),
    ("llama", {"partial_rotary_factor": 1.0}),
    *(
        ("llama", {"rope_parameters": rope, "original_max_position_embeddings": 48})
        for rope in (LLAMA3, YARN)
    ),
    ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
    ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "attention_factor": 1.3}}),
    ("llama", {"rope_parameters": YARN | {"factor": None}}),
    ("llama", {"rope_parameters": LLAMA3 | {"attention_factor": 1.3}}),
    ("llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32}}),
    ("llama", {"rope_parameters": LONGROPE}),
    ("phi3-long", {"original_max_position_embeddings": ABSENT}),
    *(
        ("phi3-long", {"rope_parameters": LONGROPE | change})
        for change in (
            {"factor": None},
            {"factor": 0.5},
            {"attention_factor": 1.3},
            {"original_max_position_embeddings": 48},
        )
    ),
    ("phi3", {"rms_norm_eps": ABSENT}),
    ("phi3", {"tie_word_embeddings": ABSENT}),
    ("opt", {"tie_word_embeddings": ABSENT, "enable_bias": ABSENT}),
    ("opt", {"word_embed_proj_dim": ABSENT, "do_layer_norm_before": ABSENT}),
]


@pytest.mark.parametrize(("name", "change"), CONFIGS, ids=str)
def test_config_keys_have_the_precedence_of_transformers(
    name: str, change: dict[str, Any], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folders(name), tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, **change)
    compare(tmp_path)


WINDOWS: list[tuple[str, dict[str, Any], int]] = [
    ("phi3", {"sliding_window": ABSENT}, 96),
    ("phi3", {"sliding_window": 8, "use_sliding_window": False}, 8),
    ("phi3-long", {"sliding_window": 40}, 40),
    ("llama", {**SLIDES, "sliding_window": 8}, 96),
    ("mistral", {"sliding_window": 8, "use_sliding_window": False}, 8),
    ("mistral", {"sliding_window": 8, "layer_types": LAST_LAYER}, 8),
    ("mistral", {"sliding_window": ABSENT, "max_position_embeddings": 8192}, 4096),
]
for opt_in in ("qwen2", "qwen3"):
    WINDOWS += [
        (opt_in, {**SLIDES, "sliding_window": 8}, 8),
        (opt_in, {**SLIDES, "sliding_window": None}, 96),
        (opt_in, {**SLIDES, "sliding_window": ABSENT, "max_position_embeddings": 8192}, 4096),
        (opt_in, {**SLIDES, "sliding_window": 8, "max_window_layers": 1}, 8),
        (opt_in, {**SLIDES, "sliding_window": 8, "max_window_layers": 2}, 96),
        (opt_in, {**SLIDES, "sliding_window": 8, "max_window_layers": ABSENT}, 96),
        (opt_in, {**SLIDES, "sliding_window": 8, "layer_types": LAST_LAYER}, 8),
        (opt_in, {**SLIDES, "sliding_window": 8, "layer_types": ["full_attention"] * 2}, 96),
    ]


@pytest.mark.parametrize(("name", "change", "context"), WINDOWS, ids=str)
def test_context_is_limited_to_the_window_that_transformers_applies(
    name: str,
    change: dict[str, Any],
    context: int,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    shutil.copytree(folders(name), tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, **change)
    assert load_checkpoint(tmp_path).config.context_length == context
    compare(tmp_path, min(context, 96))


def other_head(weights: Weights) -> None:
    weights[HEAD] = torch.randn(97, 48, generator=torch.Generator().manual_seed(5))


def equal_head(weights: Weights) -> None:
    weights[HEAD] = weights[EMBEDDING].clone()


def only_head(weights: Weights) -> None:
    weights[HEAD] = weights.pop(EMBEDDING)


def stale_frequencies(weights: Weights) -> None:
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


@pytest.mark.parametrize(
    ("name", "change", "tied"),
    [
        ("llama-tied", other_head, False),
        ("llama-tied", equal_head, True),
        ("llama-tied", only_head, True),
        ("llama", equal_head, False),
        ("llama", stale_frequencies, False),
    ],
)
def test_stored_tensors_have_precedence_over_the_config(
    name: str,
    change: Callable[[Weights], None],
    tied: bool,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    shutil.copytree(folders(name), tmp_path, dirs_exist_ok=True)
    change_weights(tmp_path, change)
    compare(tmp_path)
    made = load_checkpoint(tmp_path)
    assert made.config.tied_embeddings is tied
    assert (made.lm_head is made.embedding) is tied


def shards(directory: Path, weight_map: dict[str, str], **files: Weights) -> None:
    """Write an index and shards, named by their number such as ``s1``."""
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, weights in files.items():
        save_file(weights, directory / f"{name}.safetensors", metadata={"format": "pt"})


def stale_index(directory: Path) -> None:
    shards(directory, {"model.norm.weight": "model-00001-of-00002.safetensors"})


def older_shards(directory: Path) -> None:
    older = {name: tensor + 1 for name, tensor in load_file(directory / SINGLE).items()}
    shards(directory, dict.fromkeys(older, "s1.safetensors"), s1=older)


def other_formats(directory: Path) -> None:
    other = {name: tensor + 1 for name, tensor in load_file(directory / SINGLE).items()}
    torch.save(other, directory / "pytorch_model.bin")
    save_file(other, directory / "consolidated.safetensors")
    (directory / "params.json").write_text(json.dumps({"dim": 96}))


def incomplete_index(directory: Path) -> None:
    weights = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    shards(directory, {"model.norm.weight": "s1.safetensors"}, s1=weights)


@pytest.mark.parametrize("change", [stale_index, older_shards, other_formats, incomplete_index])
def test_weight_files_have_the_precedence_of_transformers(
    change: Callable[[Path], None], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folders("llama"), tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    compare(tmp_path)


def biases(weights: Weights) -> None:
    for name, tensor in list(weights.items()):
        if "_proj" in name and "self_attn" in name:
            weights[name.replace("weight", "bias")] = torch.ones(len(tensor))


def head_norms(weights: Weights) -> None:
    for layer in (0, 1):
        for head in ("q", "k"):
            weights[f"model.layers.{layer}.self_attn.{head}_norm.weight"] = torch.ones(8)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("llama", biases, "self_attn.k_proj.bias"),
        ("mistral", biases, "self_attn.k_proj.bias"),
        ("llama", head_norms, "self_attn.k_norm.weight"),
        ("llama", lambda weights: weights.pop(HEAD), "no tensor lm_head.weight"),
        ("llama-tied", lambda weights: weights.pop(EMBEDDING), "no tensor model.embed_tokens"),
        ("llama-tied", lambda weights: weights.update({HEAD: torch.ones(99, 48)}), "99, 48"),
        ("llama", lambda weights: weights.update({"lm_head.bias": torch.ones(97)}), "head.bias"),
        ("qwen3", lambda weights: weights.pop("model.layers.1.self_attn.k_norm.weight"), "k_norm"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(
    name: str,
    change: Callable[[Weights], None],
    complaint: str,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    shutil.copytree(folders(name), tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, attention_bias=False)
    change_weights(tmp_path, change)
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"model_type": "granite"}),
        ("llama", {"model_type": "qwen2"}),
        ("qwen2", {"model_type": "llama"}),
        ("llama", {"hidden_activation": "gelu_pytorch_tanh"}),
        ("llama", {"embedding_multiplier": 12.0}),
        ("llama", {"residual_multiplier": 0.22}),
        ("llama", {"attention_multiplier": 0.0078125}),
        ("llama", {"logits_scaling": 8.0}),
        ("llama", {"logit_scale": 0.0625}),
        ("llama", {"scale_emb": 12}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"clip_qkv": 8.0}),
        ("llama", {"use_qk_norm": True}),
        ("llama", {"no_rope_layers": [1, 0]}),
        ("llama", {"attention_chunk_size": 8192}),
        ("llama", {"transformers_weights": "other.safetensors"}),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}),
        ("llama", {"tie_word_embeddings": "false"}),
        ("qwen2", {"sliding_window": 8, "layer_types": LAST_LAYER}),
        ("llama", {"rope_parameters": YARN | {"attn_factor": 1.2}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000}}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}),
    ],
    ids=str,
)
def test_keys_that_change_the_computation_are_refused_by_name(
    name: str, change: dict[str, Any], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folders(name), tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, **change)
    names = [
        *change,
        *(key for value in change.values() if isinstance(value, dict) for key in value),
    ]
    pattern = "|".join([*names, "part of the head", "quantized"])
    with pytest.raises(CheckpointError, match=pattern):
        load_checkpoint(tmp_path)


def test_tensor_in_two_shards_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folders("llama"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / SINGLE)
    (tmp_path / SINGLE).unlink()
    again = {"model.norm.weight": weights["model.norm.weight"] + 1}
    weight_map = {"a": "s1.safetensors", "b": "s2.safetensors"}
    shards(tmp_path, weight_map, s1=weights, s2=again)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in more than one file"):
        load_checkpoint(tmp_path)


def test_folder_with_an_adapter_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folders("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(CheckpointError, match="merge the adapter"):
        load_checkpoint(tmp_path)
