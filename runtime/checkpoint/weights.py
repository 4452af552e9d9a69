"""The weights of a model in canonical form, whatever file they were read from.

A linear layer is `Dense` (``y = W x + b``) or a `FactorPair` (``y = U (V x) + b``); every
projection of every layer may be either, with any rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor

from runtime.config import ModelConfig


@dataclass(frozen=True)
class Dense:
    """``y = W x + b``: weight ``[out, in]``, bias ``[out]`` or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class FactorPair:
    """``y = U (V x) + b``: u ``[out, r]``, v ``[r, in]``, bias ``[out]`` or None."""

    u: Tensor
    v: Tensor
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.v.shape[0]


Linear = Dense | FactorPair


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. ``q_norm``/``k_norm`` are Qwen3's per-head RMSNorms ``[head_dim]``."""

    input_norm: Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    post_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class Factorization:
    """How a factorized checkpoint was made: the facts that reproduce it.

    ``source_hash`` is the ``model_hash`` of the dense model, ``calibration_hash`` a sha256 over the
    ``calibration_tokens`` token ids whose activations weighted the truncation.
    """

    method: str
    source_hash: str
    calibration_hash: str
    calibration_tokens: int


@dataclass(frozen=True)
class Checkpoint:
    """A whole model: q and k rows are in Hugging Face's rotate-half order.

    ``lm_head`` ``[vocab, hidden]`` is the same tensor as ``embedding`` where embeddings are tied.
    ``model_hash`` is a sha256 over config and weights: two workers that share KV must agree on it.
    ``keep`` is the fraction of the projections' parameters that a factorization kept, 1.0 if dense;
    ``factorization`` tells how, None if dense.
    """

    config: ModelConfig
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor
    model_hash: str
    keep: float = 1.0
    factorization: Factorization | None = None

    @property
    def nbytes(self) -> int:
        """Of all tensors; one that is used more than once counts once."""
        tensors = [self.embedding, self.final_norm, self.lm_head]
        for layer in self.layers:
            norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
            parts = (part for _, linear in linears_of(layer) for part in vars(linear).values())
            tensors += [tensor for tensor in (*norms, *parts) if tensor is not None]
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


def linears_of(layer: LayerWeights) -> Iterator[tuple[str, Linear]]:
    """The projections of a layer by their field's name."""
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, Dense | FactorPair):
            yield field.name, value


def parameters_kept(checkpoint: Checkpoint) -> float:
    """The fraction of the dense projections' parameters that a checkpoint's projections have; a
    shared V counts once."""
    kept = total = 0
    counted: set[int] = set()
    for layer in checkpoint.layers:
        for _, linear in linears_of(layer):
            if isinstance(linear, Dense):
                kept += linear.weight.numel()
                total += linear.weight.numel()
                continue
            kept += linear.u.numel()
            total += linear.u.shape[0] * linear.v.shape[1]
            if id(linear.v) not in counted:
                counted.add(id(linear.v))
                kept += linear.v.numel()
    return kept / total
