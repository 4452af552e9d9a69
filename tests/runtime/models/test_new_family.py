"""A model family defined in this file only: loaded, served, compressed and served again.

It differs from Llama in its layer (LayerNorm, attention and MLP in parallel, an ungated GELU MLP,
one fused q, k and v matrix with a bias) and in its tensor names. No other file mentions it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint import (
    Checkpoint,
    FactorPair,
    Linear,
    load_checkpoint,
    write_checkpoint,
)
from runtime.checkpoint import family as registry
from runtime.checkpoint.assemble import nbytes
from runtime.checkpoint.family import LayerLayout, LinearTensor, TensorNames, VectorTensor
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.weights import linears_of
from runtime.config import ModelConfig, RopeConfig
from runtime.engine import Add
from runtime.errors import CheckpointError
from runtime.gemm.model import build_gemm_model, unsupported_by_gemm
from runtime.models.build import build_model
from runtime.models.family import LayerBuilder, LayerParts, ModelFamily, Norm
from runtime.models.model import Model
from runtime.models.registry import register
from runtime.offline.compress import Method, compress
from runtime.offline.compress.forward import forward
from runtime.parallel.partition import Partition
from tests.runtime.tiny import drive, engine_of, request_of


@dataclass(frozen=True)
class PuddleLayer:
    norm: Tensor
    qkv: Linear
    dense: Linear
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, kw_only=True)
class PuddleParts(LayerParts):
    norm: Callable[[Tensor], Tensor]
    dense: Callable[[Tensor, Tensor], Tensor]
    fc1: Callable[[Tensor], Tensor]
    fc2: Callable[[Tensor, Tensor], Tensor]


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, None, eps)


class PuddleFamily(ModelFamily[PuddleParts]):
    name = "Puddle"
    architectures = ("PuddleForCausalLM",)
    layer_type = PuddleLayer
    tensor_names = TensorNames(
        "puddle.wte.weight", "puddle.ln_f.weight", "head.weight", "puddle.h.{index}."
    )
    norm = Norm(layer_norm)

    def parse_config(
        self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        width, heads = hf_config["n_embd"], hf_config["n_head"]
        return ModelConfig(
            architecture=self.architectures[0],
            vocab_size=hf_config["vocab_size"],
            hidden_size=width,
            intermediate_size=hf_config["n_inner"],
            num_layers=hf_config["n_layer"],
            num_heads=heads,
            num_kv_heads=hf_config["n_head_kv"],
            head_dim=width // heads,
            context_length=hf_config["n_positions"],
            rms_norm_eps=hf_config["layer_norm_epsilon"],
            tied_embeddings=False,
            rope=RopeConfig(theta=hf_config["rotary_base"]),
        )

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "architectures": [config.architecture],
            "vocab_size": config.vocab_size,
            "n_embd": config.hidden_size,
            "n_inner": config.intermediate_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_head_kv": config.num_kv_heads,
            "n_positions": config.context_length,
            "layer_norm_epsilon": config.rms_norm_eps,
            "rotary_base": config.rope.theta,
        }

    def layout(self, config: ModelConfig) -> LayerLayout:
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        fused = queries + 2 * config.num_kv_heads * config.head_dim
        return LayerLayout(
            linears={
                "qkv": LinearTensor("attn.qkv", fused, hidden),
                "dense": LinearTensor("attn.dense", hidden, queries, writes_residual=True),
                "fc1": LinearTensor("ffn.fc1", inner, hidden, same_input_as="qkv"),
                "fc2": LinearTensor("ffn.fc2", hidden, inner, writes_residual=True),
            },
            vectors={"norm": VectorTensor("ln.weight", hidden)},
        )

    def optional_tensors(self, hf_config: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"attn.qkv.bias"})

    def parts(self, build: LayerBuilder) -> PuddleParts:
        return PuddleParts(
            norm=build.norm("norm"),
            qkv=build.qkv("qkv"),
            dense=build.residual("dense"),
            fc1=build.linear("fc1"),
            fc2=build.residual("fc2"),
        )

    def before_attention(
        self, parts: PuddleParts, hidden: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = parts.norm(hidden)
        return x, (x, hidden)

    def after_attention(self, parts: PuddleParts, attended: Tensor, *carried: Tensor) -> Tensor:
        x, hidden = carried
        hidden = parts.dense(attended, hidden)
        return parts.fc2(functional.gelu(parts.fc1(x)), hidden)


PUDDLE = PuddleFamily()
HF_CONFIG = {
    "architectures": ["PuddleForCausalLM"],
    "vocab_size": 211,
    "n_embd": 48,
    "n_inner": 80,
    "n_layer": 3,
    "n_head": 6,
    "n_head_kv": 2,
    "n_positions": 400,
    "layer_norm_epsilon": 1e-5,
    "rotary_base": 5000.0,
}
HIDDEN, INNER, HEADS, KV_HEADS, DIM = 48, 80, 6, 2, 8
CALIBRATION = torch.randint(0, 211, (16, 40), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    register(PUDDLE)


def random_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    fused = (HEADS + 2 * KV_HEADS) * DIM
    weights = {
        "puddle.wte.weight": random(211, HIDDEN, scale=1.0),
        "puddle.ln_f.weight": 1 + random(HIDDEN, scale=0.1),
        "head.weight": random(211, HIDDEN, scale=2 * HIDDEN**-0.5),
    }
    for index in range(3):
        prefix = f"puddle.h.{index}."
        weights |= {
            prefix + "ln.weight": 1 + random(HIDDEN, scale=0.1),
            prefix + "attn.qkv.weight": random(fused, HIDDEN, scale=HIDDEN**-0.5),
            prefix + "attn.qkv.bias": random(fused, scale=0.3),
            prefix + "attn.dense.weight": random(HIDDEN, HEADS * DIM, scale=HIDDEN**-0.5),
            prefix + "ffn.fc1.weight": random(INNER, HIDDEN, scale=HIDDEN**-0.5),
            prefix + "ffn.fc2.weight": random(HIDDEN, INNER, scale=INNER**-0.5),
        }
    return weights


def save_folder(folder: Path) -> dict[str, Tensor]:
    """Write a Hugging Face folder and return its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    weights = random_weights()
    save_file(weights, folder / "model.safetensors")
    return weights


def rotate(x: Tensor) -> Tensor:
    """Apply rotate-half RoPE to ``[heads, length, dim]``."""
    frequencies = 5000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def plain_logits(weights: Mapping[str, Tensor], tokens: list[int], kv: torch.dtype) -> Tensor:
    """Compute logits ``[length, vocab]`` in plain torch, with K and V rounded to ``kv``."""
    hidden = weights["puddle.wte.weight"][tokens]
    for index in range(3):
        layer = {
            name.removeprefix(f"puddle.h.{index}."): tensor for name, tensor in weights.items()
        }
        x = functional.layer_norm(hidden, (HIDDEN,), layer["ln.weight"], None, 1e-5)
        qkv = x @ layer["attn.qkv.weight"].t() + layer["attn.qkv.bias"]
        heads = qkv.view(len(tokens), -1, DIM).transpose(0, 1)
        q, k, v = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS])
        k, v = (
            one.to(kv).float().repeat_interleave(HEADS // KV_HEADS, dim=0) for one in (rotate(k), v)
        )
        scores = rotate(q) @ k.transpose(1, 2) / DIM**0.5
        later = torch.ones(len(tokens), len(tokens)).triu(1).bool()
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        attention = attended.transpose(0, 1).flatten(1) @ layer["attn.dense.weight"].t()
        mlp = functional.gelu(x @ layer["ffn.fc1.weight"].t()) @ layer["ffn.fc2.weight"].t()
        hidden = hidden + attention + mlp
    normed = functional.layer_norm(hidden, (HIDDEN,), weights["puddle.ln_f.weight"], None, 1e-5)
    return normed @ weights["head.weight"].t()


def plain_greedy(weights: Mapping[str, Tensor], prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain_logits(weights, tokens, torch.bfloat16)[-1].argmax()))
    return tokens[len(prompt) :]


def multiplied_out(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, with factor pairs multiplied out to dense weights."""
    names = {"qkv": "attn.qkv", "dense": "attn.dense", "fc1": "ffn.fc1", "fc2": "ffn.fc2"}
    tensors = {
        "puddle.wte.weight": checkpoint.embedding,
        "puddle.ln_f.weight": checkpoint.final_norm,
        "head.weight": checkpoint.lm_head,
    }
    for index, layer in enumerate(checkpoint.layers):
        prefix = f"puddle.h.{index}."
        tensors |= {prefix + "ln.weight": layer.norm, prefix + "attn.qkv.bias": layer.qkv.bias}
        for field, linear in linears_of(layer):
            weight = linear.u @ linear.v if isinstance(linear, FactorPair) else linear.weight
            tensors[f"{prefix}{names[field]}.weight"] = weight
    return tensors


def assert_served(model: Model, weights: Mapping[str, Tensor]) -> None:
    """Check the greedy output of prompts of several lengths, prefilled in chunks in one batch."""
    requests = [request_of(f"r{length}", length, 12) for length in (1, 17, 63, 100)]
    engine = engine_of(model)
    record = drive(engine, *(Add(request) for request in requests))
    for request in requests:
        expected = plain_greedy(weights, request.tokens, 12)
        assert record.output(request.id) == expected, request.id


def test_forward_of_a_loaded_folder_matches_plain_torch(tmp_path: Path) -> None:
    weights = save_folder(tmp_path / "m")
    checkpoint = load_checkpoint(tmp_path / "m")
    tokens = list(range(3, 40))
    computed = forward(checkpoint, torch.tensor([tokens]))[0]
    expected = plain_logits(weights, tokens, torch.float32)
    # Both sides compute in fp32, but add in different orders, over three layers.
    torch.testing.assert_close(computed, expected, rtol=2e-4, atol=2e-4)
    assert nbytes(checkpoint) == sum(tensor.nbytes for tensor in weights.values())


def test_engine_generates_the_tokens_of_the_plain_implementation(tmp_path: Path) -> None:
    weights = save_folder(tmp_path / "m")
    model = build_model(load_checkpoint(tmp_path / "m"))
    assert model.factorized_layers == 0
    assert_served(model, weights)


@pytest.mark.parametrize("method", list(Method))
def test_compressed_model_is_written_loaded_and_served(method: Method, tmp_path: Path) -> None:
    save_folder(tmp_path / "m")
    dense = load_checkpoint(tmp_path / "m")
    made, report = compress(dense, CALIBRATION, 0.7, rank_multiple=2, method=method)
    assert 0.6 < report.parameters_kept <= 0.7
    assert set(report.ranks[0]) == {"qkv", "dense", "fc1", "fc2"}
    assert bool(basis_groups(made)) == (method is Method.BASIS_SHARING)
    write_checkpoint(made, tmp_path / "made")
    again = load_checkpoint(tmp_path / "made")
    assert again.model_hash == made.model_hash
    assert again.config == dense.config
    assert basis_groups(again) == basis_groups(made)
    tokens = CALIBRATION[:2]
    torch.testing.assert_close(forward(again, tokens), forward(made, tokens))
    model = build_model(again)
    assert model.factorized_layers > 0
    assert_served(model, multiplied_out(again))


def test_missing_tensor_error_has_the_name_in_the_file(tmp_path: Path) -> None:
    weights = save_folder(tmp_path / "m")
    del weights["puddle.h.2.attn.qkv.bias"]
    save_file(weights, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor puddle\.h\.2\.attn\.qkv\.bias"):
        load_checkpoint(tmp_path / "m")


def test_gemm_backend_rejects_the_family_with_a_reason(tmp_path: Path) -> None:
    save_folder(tmp_path / "m")
    checkpoint = load_checkpoint(tmp_path / "m")
    assert "Puddle" in str(unsupported_by_gemm(checkpoint, "cuda", torch.bfloat16))
    with pytest.raises(ValueError, match="Puddle"):
        build_gemm_model(checkpoint, device="cpu")


def test_family_without_a_division_is_refused_before_the_files_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "m")
    monkeypatch.setattr(HashedFiles, "of", lambda *_: pytest.fail("the files were hashed"))
    with pytest.raises(CheckpointError, match="Puddle family cannot be divided among ranks"):
        load_checkpoint(tmp_path / "m", part=lambda config: Partition.of(config, 0, 2))


def test_family_is_found_through_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "m")
    monkeypatch.delitem(registry._families, "PuddleForCausalLM")
    with pytest.raises(CheckpointError, match=r"PuddleForCausalLM.*LlamaForCausalLM"):
        load_checkpoint(tmp_path / "m")
    (tmp_path / "puddle_plugin.py").write_text(f"from {__name__} import PUDDLE\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugin = EntryPoint("puddle", "puddle_plugin:PUDDLE", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [plugin])
    registry._load_plugins.cache_clear()
    assert load_checkpoint(tmp_path / "m").config.num_layers == 3
    registry._load_plugins.cache_clear()


def test_two_families_cannot_read_one_architecture() -> None:
    class Other(PuddleFamily):
        architectures = ("LlamaForCausalLM",)

    with pytest.raises(ValueError, match="LlamaForCausalLM is registered by Llama"):
        register(Other())
