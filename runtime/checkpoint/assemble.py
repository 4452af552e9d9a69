"""From named tensors to a `Checkpoint`: every name demanded, every shape checked.

Readers present their file as a `TensorSource` under Hugging Face's names. A factorized projection
has ``….u.weight`` ``[out, r]`` and ``….v.weight`` ``[r, in]`` in place of ``….weight``.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, LayerWeights, Linear
from runtime.config import ModelConfig
from runtime.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

PROJECTIONS: dict[str, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Field of `LayerWeights` -> Hugging Face's name inside a layer."""

NORMS: dict[str, str] = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


class TensorSource(Protocol):
    """A file's tensors under Hugging Face's names, read when asked for."""

    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Biases:
    """Which projections of a layer have a bias, and whether q and k are normed per head."""

    projections: frozenset[str] = frozenset()
    qk_norm: bool = False

    @classmethod
    def present(cls, names: Collection[str]) -> "Biases":
        """What the first layer has, where no config says what all layers must have."""
        prefix = layer_prefix(0)
        return cls(
            frozenset(p for p, name in PROJECTIONS.items() if f"{prefix}{name}.bias" in names),
            qk_norm=prefix + NORMS["q_norm"] in names,
        )


def projection_shape(config: ModelConfig, projection: str) -> tuple[int, int]:
    """``(out, in)`` of a projection, which is a field name of `LayerWeights`."""
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }[projection]


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def assemble(
    config: ModelConfig,
    source: TensorSource,
    biases: Biases,
    model_hash: str,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Checkpoint:
    """Read every tensor of the model, checked, as ``dtype`` on ``device``.

    Raises `CheckpointError` naming the tensors that are missing, misshapen, or not understood.
    """
    reader = _Reader(config, source, biases, dtype, torch.device(device))
    embedding = reader.tensor(EMBEDDING, (config.vocab_size, config.hidden_size))
    lm_head = (
        embedding if config.tied_embeddings else reader.tensor(LM_HEAD, tuple(embedding.shape))
    )
    layers = tuple(reader.layer(index) for index in range(config.num_layers))
    final_norm = reader.tensor(FINAL_NORM, (config.hidden_size,))
    reader.refuse_unread()
    return Checkpoint(config, embedding, layers, final_norm, lm_head, model_hash)


def named_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint under the name that `assemble` reads it from."""
    yield EMBEDDING, checkpoint.embedding
    for index, layer in enumerate(checkpoint.layers):
        prefix = layer_prefix(index)
        for norm, name in NORMS.items():
            weight = getattr(layer, norm)
            if weight is not None:
                yield prefix + name, weight
        for projection, name in PROJECTIONS.items():
            linear: Linear = getattr(layer, projection)
            if isinstance(linear, Dense):
                yield f"{prefix}{name}.weight", linear.weight
            else:
                yield f"{prefix}{name}.u.weight", linear.u
                yield f"{prefix}{name}.v.weight", linear.v
            if linear.bias is not None:
                yield f"{prefix}{name}.bias", linear.bias
    yield FINAL_NORM, checkpoint.final_norm
    if not checkpoint.config.tied_embeddings:
        yield LM_HEAD, checkpoint.lm_head


class _Reader:
    """Reads and remembers, so that what the model does not use can be refused at the end."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        biases: Biases,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._source = source
        self._biases = biases
        self._dtype = dtype
        self._device = device
        self._unread = set(source.names())

    def tensor(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """One tensor; None in ``shape`` matches any extent of at least 1."""
        if name not in self._unread:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        self._unread.remove(name)
        tensor = self._source.read(name)
        fits = len(tensor.shape) == len(shape) and all(
            extent == wanted if wanted is not None else extent > 0
            for extent, wanted in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            wanted_text = ", ".join("*" if extent is None else str(extent) for extent in shape)
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, the config asks for [{wanted_text}]"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{name} holds {tensor.dtype}: quantized weights are not read")
        return tensor.to(device=self._device, dtype=self._dtype)

    def linear(self, prefix: str, projection: str) -> Linear:
        out, inner = projection_shape(self._config, projection)
        name = prefix + PROJECTIONS[projection]
        bias = (
            self.tensor(f"{name}.bias", (out,)) if projection in self._biases.projections else None
        )
        if f"{name}.u.weight" not in self._unread:
            return Dense(self.tensor(f"{name}.weight", (out, inner)), bias)
        u = self.tensor(f"{name}.u.weight", (out, None))
        return FactorPair(u, self.tensor(f"{name}.v.weight", (u.shape[1], inner)), bias)

    def layer(self, index: int) -> LayerWeights:
        prefix = layer_prefix(index)
        hidden = (self._config.hidden_size,)
        head = (self._config.head_dim,)
        linears = {projection: self.linear(prefix, projection) for projection in PROJECTIONS}
        normed = self._biases.qk_norm
        return LayerWeights(
            input_norm=self.tensor(prefix + NORMS["input_norm"], hidden),
            post_norm=self.tensor(prefix + NORMS["post_norm"], hidden),
            q_norm=self.tensor(prefix + NORMS["q_norm"], head) if normed else None,
            k_norm=self.tensor(prefix + NORMS["k_norm"], head) if normed else None,
            **linears,
        )

    def refuse_unread(self) -> None:
        """Refuse tensors that would be silently ignored; recomputed or tied ones may be."""
        ignorable = {LM_HEAD} if self._config.tied_embeddings else set()
        strange = sorted(
            name for name in self._unread - ignorable if not name.endswith("rotary_emb.inv_freq")
        )
        if strange:
            shown = ", ".join(strange[:4]) + (" …" if len(strange) > 4 else "")
            raise CheckpointError(f"{len(strange)} tensors are not of this architecture: {shown}")
