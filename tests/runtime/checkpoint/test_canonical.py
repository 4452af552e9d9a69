"""The canonical factorized checkpoint: round trips, atomic writes, and altered files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoint import (
    Checkpoint,
    Dense,
    Factorization,
    FactorPair,
    LayerWeights,
    Linear,
    load_checkpoint,
    write_checkpoint,
)
from runtime.checkpoint.assemble import named_tensors
from runtime.checkpoint.canonical import canonical_hash
from runtime.checkpoint.safetensors_file import SafetensorsDirectory, ShardWriter
from runtime.config import ModelConfig, RopeConfig
from runtime.errors import CheckpointError
from runtime.models.llama import PROJECTIONS
from tests.runtime.tiny import linear_shape

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    context_length=1000,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    eos_token_ids=(2, 60),
)
ROPES = {
    "longrope": RopeConfig(
        scaling="longrope",
        factor=4.0,
        original_context=250,
        attention_factor=1.25,
        short_factor=(1.0, 1.5, 2.0),
        long_factor=(1.0, 3.0, 5.0),
    ),
    "default": RopeConfig(theta=12_345.0, frequency_divisors=(1.0, 2.0, 8.0)),
    "linear": RopeConfig(scaling="linear", factor=3.0),
    "llama3": RopeConfig(
        scaling="llama3",
        factor=8.0,
        original_context=100,
        low_freq_factor=1.5,
        high_freq_factor=5.0,
    ),
    "yarn": RopeConfig(
        scaling="yarn",
        factor=4.0,
        original_context=250,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.25,
        truncate=False,
    ),
}


def random_checkpoint(
    config: ModelConfig = CONFIG,
    rank: int = 5,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Checkpoint:
    """Return random factor pairs of ``rank``, except that gate is dense and k has rank 1."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def linear(projection: str) -> Linear:
        out, inner = linear_shape(config, projection)
        offset = random(out) if bias else None
        if projection == "gate":
            return Dense(random(out, inner), offset)
        r = 1 if projection == "k" else rank
        return FactorPair(random(out, r), random(r, inner), offset)

    def layer() -> LayerWeights:
        normed = config.architecture == "Qwen3ForCausalLM"
        return LayerWeights(
            input_norm=random(config.hidden_size),
            post_norm=random(config.hidden_size),
            q_norm=random(config.head_dim) if normed else None,
            k_norm=random(config.head_dim) if normed else None,
            **{projection: linear(projection) for projection in PROJECTIONS},
        )

    embedding = random(config.vocab_size, config.hidden_size)
    tied = config.tied_embeddings
    checkpoint = Checkpoint(
        config=config,
        embedding=embedding,
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=random(config.hidden_size),
        lm_head=embedding if tied else random(config.vocab_size, config.hidden_size),
        model_hash="",
        keep=0.7,
        factorization=Factorization("svd", "a" * 64, "b" * 64, 4096),
    )
    return replace(checkpoint, model_hash=canonical_hash(checkpoint))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_config_round_trips(rope: str, architecture: str, tmp_path: Path) -> None:
    config = replace(CONFIG, architecture=architecture, rope=ROPES[rope])
    write_checkpoint(random_checkpoint(config), tmp_path / "model")
    assert load_checkpoint(tmp_path / "model").config == config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "bias", "tied"),
    [
        ("LlamaForCausalLM", False, True),
        ("Qwen2ForCausalLM", True, False),
        ("Qwen3ForCausalLM", False, True),
    ],
)
def test_weights_and_metadata_round_trip(
    architecture: str, bias: bool, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = replace(CONFIG, architecture=architecture, tied_embeddings=tied)
    written = random_checkpoint(config, bias=bias, dtype=dtype)
    write_checkpoint(written, tmp_path / "deep" / "model")
    read = load_checkpoint(tmp_path / "deep" / "model", dtype)
    theirs = dict(named_tensors(read))
    ours = dict(named_tensors(written))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    assert (read.model_hash, read.keep) == (written.model_hash, 0.7)
    assert read.factorization == written.factorization
    assert (read.lm_head is read.embedding) is tied


def test_ranks_are_written_and_verified(tmp_path: Path) -> None:
    write_checkpoint(random_checkpoint(), tmp_path / "model")
    path = tmp_path / "model" / "headrace.json"
    metadata = json.loads(path.read_text())
    assert metadata["ranks"]["model.layers.1.self_attn.k_proj"] == 1
    assert "model.layers.0.mlp.gate_proj" not in metadata["ranks"]
    metadata["ranks"]["model.layers.1.self_attn.k_proj"] = 2
    path.write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match="ranks"):
        load_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("change", ["weights", "config", "hash"])
def test_altered_checkpoints_are_refused(change: str, tmp_path: Path) -> None:
    write_checkpoint(random_checkpoint(), tmp_path / "model")
    path = tmp_path / "model" / "headrace.json"
    metadata = json.loads(path.read_text())
    if change == "weights":
        weights = {k: v.clone() for k, v in load_file(tmp_path / "model/model.safetensors").items()}
        weights["model.norm.weight"][3] += 1e-6
        save_file(weights, tmp_path / "model/model.safetensors")
    elif change == "config":
        metadata["config"]["rms_norm_eps"] = 1e-6
    else:
        del metadata["model_hash"]
    path.write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match="altered"):
        load_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"keep": []}, r"keep = \[\]"),
        ({"has_lm_head": 0}, "malformed has_lm_head"),
        ({"shared_bases": [["none", "model.layers.0.self_attn.k_proj"]]}, "without a tensor none"),
    ],
)
def test_malformed_metadata_is_refused(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    write_checkpoint(random_checkpoint(), tmp_path / "model")
    path = tmp_path / "model" / "headrace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(tmp_path / "model")


def test_model_has_an_lm_head_unless_the_metadata_deny_it(tmp_path: Path) -> None:
    write_checkpoint(replace(random_checkpoint(), has_lm_head=False), tmp_path / "model")
    assert not load_checkpoint(tmp_path / "model").has_lm_head
    path = tmp_path / "model" / "headrace.json"
    metadata = json.loads(path.read_text())
    del metadata["has_lm_head"]
    path.write_text(json.dumps(metadata))
    assert load_checkpoint(tmp_path / "model").has_lm_head


@pytest.mark.parametrize("version", [1, 3])
def test_other_format_versions_are_refused(version: int, tmp_path: Path) -> None:
    write_checkpoint(random_checkpoint(), tmp_path / "model")
    path = tmp_path / "model" / "headrace.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
    with pytest.raises(CheckpointError, match=f"format {version}, expected 2: create"):
        load_checkpoint(tmp_path / "model")


def test_factors_with_different_ranks_are_refused(tmp_path: Path) -> None:
    checkpoint = random_checkpoint()
    broken = replace(checkpoint.layers[1], o=FactorPair(torch.ones(24, 3), torch.ones(4, 24)))
    write_checkpoint(replace(checkpoint, layers=(checkpoint.layers[0], broken)), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"o_proj\.v\.weight has shape \[4, 24\]"):
        load_checkpoint(tmp_path / "model")


def test_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("runtime.checkpoint.safetensors_file.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(random_checkpoint(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_is_written_in_another_dtype(tmp_path: Path) -> None:
    checkpoint = random_checkpoint()
    write_checkpoint(checkpoint, tmp_path / "model", torch.bfloat16)
    read = load_checkpoint(tmp_path / "model", dtype=None)
    assert {tensor.dtype for _, tensor in named_tensors(read)} == {torch.bfloat16}
    for (_, ours), (_, theirs) in zip(named_tensors(read), named_tensors(checkpoint), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


def test_tensors_keep_their_dtypes_on_request(tmp_path: Path) -> None:
    checkpoint = random_checkpoint()
    mixed = replace(checkpoint, final_norm=checkpoint.final_norm.half())
    write_checkpoint(mixed, tmp_path / "model")
    dtypes = {
        name: tensor.dtype
        for name, tensor in named_tensors(load_checkpoint(tmp_path / "model", dtype=None))
    }
    assert dtypes.pop("model.norm.weight") == torch.float16
    assert set(dtypes.values()) == {torch.float32}


@pytest.mark.parametrize(("shard_bytes", "shards"), [(1, 3), (200, 2), (1000, 1)])
def test_shards_and_their_index_are_read_back(
    shard_bytes: int, shards: int, tmp_path: Path
) -> None:
    base = torch.arange(40.0).view(8, 5)
    # 80 bytes each; the first two share memory, and the second is not contiguous.
    tensors = {"a": base[:4], "b": base.t()[:, :4], "c": torch.ones(20)}
    with ShardWriter(tmp_path, shard_bytes) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    assert (tmp_path / "model.safetensors").exists() == (shards == 1)
    source = SafetensorsDirectory(tmp_path)
    assert source.names() == tensors.keys()
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())


def test_existing_directories_are_not_overwritten(tmp_path: Path) -> None:
    write_checkpoint(random_checkpoint(), tmp_path / "model")
    first = load_checkpoint(tmp_path / "model").model_hash
    write_checkpoint(random_checkpoint(rank=3), tmp_path / "model")
    assert load_checkpoint(tmp_path / "model").model_hash == first
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "diary.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(random_checkpoint(), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]
