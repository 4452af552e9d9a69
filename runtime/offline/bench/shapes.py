"""Random checkpoints with the shapes of real models."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.family import LinearTensor
from runtime.checkpoint.sharing import layers_with_bases
from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    FactorPair,
    LayersOnDemand,
    Linear,
    layer_shapes,
    linears_of,
    mapped,
)
from runtime.config import ModelConfig, RopeConfig
from runtime.models.registry import model_family

PAGE = 16
"""Page size of all GPU benchmarks, in tokens."""
SHAPES = {
    "llama-7b": ModelConfig(
        "LlamaForCausalLM", 32_000, 4096, 11_008, 32, 32, 32, 128, 36_864, 1e-5, False
    ),
    "llama-3-8b": ModelConfig(
        "LlamaForCausalLM", 128_256, 4096, 14_336, 32, 32, 8, 128, 36_864, 1e-5, False,
        RopeConfig(theta=500_000.0),
    ),
    "llama-3-70b": ModelConfig(
        "LlamaForCausalLM", 128_256, 8192, 28_672, 80, 64, 8, 128, 36_864, 1e-5, False,
        RopeConfig(theta=500_000.0),
    ),
    "llama-65b": ModelConfig(
        "LlamaForCausalLM", 32_000, 8192, 22_016, 80, 64, 64, 128, 36_864, 1e-5, False
    ),
    "opt-125m": ModelConfig(
        "OPTForCausalLM", 50_272, 768, 3072, 12, 12, 12, 64, 2048, 1e-5, True,
        RopeConfig(scaling="none"),
    ),
    "opt-30b": ModelConfig(
        "OPTForCausalLM", 50_272, 7168, 28_672, 48, 56, 56, 128, 2048, 1e-5, True,
        RopeConfig(scaling="none"),
    ),
    "qwen3-8b": ModelConfig(
        "Qwen3ForCausalLM", 151_936, 4096, 12_288, 36, 32, 8, 128, 36_864, 1e-6, False,
        RopeConfig(theta=1_000_000.0),
    ),
    "smollm2-135m": ModelConfig(
        "LlamaForCausalLM", 49_152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, False,
        RopeConfig(theta=100_000.0),
    ),
    "tiny": ModelConfig(
        "LlamaForCausalLM", 512, 64, 96, 2, 4, 2, 16, 36_864, 1e-5, False
    ),
}  # fmt: skip


class Kept(StrEnum):
    """Meaning of the fraction that factor pairs keep: of a matrix's parameters, or of its rank.

    The rank fraction is the rank divided by the smaller dimension, as in the DeInfer paper. Pairs
    of a square matrix keep twice that fraction of its parameters.
    """

    PARAMETERS = "keep"
    RANKS = "rank fraction"


def random_checkpoint(
    config: ModelConfig,
    keep: float,
    ragged: int = 0,
    device: str = "cuda",
    *,
    on_demand: bool = False,
    group: int = 1,
    kept: Kept = Kept.PARAMETERS,
) -> Checkpoint:
    """Build a random bf16 checkpoint, which is the same on each device of a kind.

    All linears are factor pairs, even those that the canonical form would keep dense. Biases are
    zeros if the family has them in all models; biases of linears are left out.

    Args:
        keep: fraction that factor pairs keep; 1 for dense layers.
        ragged: variation of ranks. Layers (or groups of them) cycle through rank - ragged, rank
            and rank + ragged.
        on_demand: whether layers are drawn when they are accessed, so that one at a time is in
            memory.
        group: number of consecutive layers that share the V of the linears that do not write to the
            residual stream.
        kept: what ``keep`` is a fraction of.
    """
    generator = torch.Generator(device)

    def random(*shape: int, scale: float) -> Tensor:
        values = torch.empty(*shape, dtype=torch.bfloat16, device=device)
        return values.normal_(0, scale, generator=generator)

    def rank(entry: LinearTensor, layer: int) -> int | None:
        if keep >= 1:
            return None
        return _rank(entry, keep, group, kept) + ragged * (layer // group % 3 - 1)

    family = model_family(config)
    linears, vectors = family.layout(config).linears, _vectors(config, device)

    def layer(number: int, draw: Callable[..., Tensor] = random) -> Any:
        generator.manual_seed(number)
        drawn = {name: _linear(each, rank(each, number), draw) for name, each in linears.items()}
        return family.layer_type(**vectors, **drawn)

    shapes = _sharing([layer(at, _empty) for at in range(config.num_layers)], group)
    generator.manual_seed(config.num_layers)
    hidden, names = config.hidden_size, family.tensor_names
    embedding = random(config.vocab_size, hidden, scale=1.0)
    checkpoint = Checkpoint(
        config,
        embedding,
        LayersOnDemand(layer, shapes),
        _vector("norm", hidden, device),
        embedding if config.tied_embeddings else random(*embedding.shape, scale=hidden**-0.5),
        "",
        keep=keep,
        positions=random(config.context_length, hidden, scale=1.0) if names.positions else None,
        final_norm_bias=_vector("bias", hidden, device) if names.final_norm_bias else None,
    )
    return checkpoint if on_demand else _in_memory(checkpoint)


def _linear(entry: LinearTensor, rank: int | None, draw: Callable[..., Tensor]) -> Linear:
    """Draw a linear layer: a factor pair, or a dense matrix if the rank is None."""
    out, inner = entry.out, entry.inner
    if rank is None:
        return Dense(draw(out, inner, scale=inner**-0.5))
    return FactorPair(draw(out, rank, scale=rank**-0.5), draw(rank, inner, scale=inner**-0.5))


def _vectors(config: ModelConfig, device: str) -> dict[str, Tensor]:
    """Return the vectors of a layer: weights of norms, which are ones, and biases."""
    head_norms = config.architecture == "Qwen3ForCausalLM"
    return {
        name: _vector(name, entry.size, device)
        for name, entry in model_family(config).layout(config).vectors.items()
        if head_norms or not entry.optional
    }


def _vector(name: str, size: int, device: str) -> Tensor:
    value = 0.0 if name.endswith("bias") else 1.0
    return torch.full((size,), value, dtype=torch.bfloat16, device=device)


def _empty(*shape: int, scale: float) -> Tensor:  # noqa: ARG001
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def _in_memory(checkpoint: Checkpoint) -> Checkpoint:
    layers = tuple(layer for layer, _ in layers_with_bases(checkpoint))
    return replace(checkpoint, layers=layers)


def _rank(entry: LinearTensor, keep: float, group: int, kept: Kept) -> int:
    """Return the rank of a factor pair.

    At that rank, ``keep`` of the parameters remain if V counts once for a group, or ``keep`` of the
    full rank.
    """
    if kept is Kept.RANKS:
        return round(min(entry.out, entry.inner) * keep)
    layers = 1 if entry.writes_residual else group
    return int(entry.out * entry.inner * layers * keep / (entry.out * layers + entry.inner))


def _sharing(layers: Sequence[Any], group: int) -> tuple[Any, ...]:
    """Return layers of which ``group`` consecutive ones share V; see `random_checkpoint`."""
    shared = []
    for number, layer in enumerate(layers):
        first = layers[number - number % group]
        pairs: dict[str, Any] = {
            name: replace(pair, v=getattr(first, name).v)
            for name, pair in linears_of(layer)
            if isinstance(pair, FactorPair) and name not in ("o", "down")
        }
        shared.append(replace(layer, **pairs))
    return tuple(shared)


def without_content(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose bf16 tensors have the same shapes, on the meta device.

    No layer shares tensors with another.
    """

    def empty(like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=torch.bfloat16, device="meta")

    return _with_tensors(checkpoint, empty, tuple(mapped(tuple(layer_shapes(checkpoint)), empty)))


def with_random_weights(checkpoint: Checkpoint, device: str) -> Checkpoint:
    """Return a checkpoint with random bf16 tensors of the same shapes, drawn layer by layer.

    No layer shares tensors with another.
    """

    def random(like: Tensor) -> Tensor:
        values = torch.empty(like.shape, dtype=torch.bfloat16, device=device)
        return values.normal_(0, like.shape[-1] ** -0.5)

    shapes = without_content(checkpoint).layers
    return _with_tensors(
        checkpoint, random, LayersOnDemand(lambda index: mapped(shapes[index], random), shapes)
    )


def _with_tensors(
    checkpoint: Checkpoint, tensor: Callable[[Tensor], Tensor], layers: Sequence[Any]
) -> Checkpoint:
    embedding = tensor(checkpoint.embedding)
    tied = checkpoint.lm_head is checkpoint.embedding
    return replace(
        checkpoint,
        embedding=embedding,
        layers=layers,
        final_norm=tensor(checkpoint.final_norm),
        lm_head=embedding if tied else tensor(checkpoint.lm_head),
    )


def kv_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the size in bytes of the bf16 K and V of ``tokens`` tokens in all layers."""
    return 4 * config.num_layers * config.num_kv_heads * config.head_dim * tokens


def title(shape: str, keep: float, ragged: int = 0, kept: Kept = Kept.PARAMETERS) -> str:
    """Return the name of a model in a table."""
    kind = "dense" if keep >= 1 else f"{kept} {keep:g}"
    return f"{shape}, {kind}" + (f", ragged by {ragged}" if ragged else "")
