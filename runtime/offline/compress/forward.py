"""A plain differentiable forward pass over whole sequences.

Calibration and perplexity use it, and tests compare the serving engine with it. It uses neither the
KV cache nor the serving kernels. Observers receive the input and output of every linear, and the
input of attention.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint, Dense, Linear
from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.layers.rope import cos_sin_table
from runtime.models.family import Gate, LayerParts, ModelFamily
from runtime.models.registry import model_family

Observer = Callable[[str, Tensor, Tensor], None]
"""Callback for every linear, in the order of computation: field name, input ``[batch, length, in]``
and output ``[batch, length, out]``."""

HeadObserver = Callable[[Tensor, Tensor, Tensor], None]
"""Callback for the input of attention: q and k after RoPE and v, each ``[batch, heads, length,
head_dim]``; k and v have the KV heads."""


def apply_linear(linear: Linear, x: Tensor) -> Tensor:
    """Apply a linear to ``[..., in]``; a factor pair is applied as V, then U."""
    if isinstance(linear, Dense):
        return functional.linear(x, linear.weight, linear.bias)
    return functional.linear(functional.linear(x, linear.v), linear.u, linear.bias)


class PlainBuilder:
    """Builds the parts of a layer for this forward pass; see `runtime.models.family.LayerBuilder`.

    Args:
        weights: weights of the layer, an instance of the family's ``layer_type``.
        observe: callback for every linear, or None.
    """

    def __init__(
        self,
        family: ModelFamily[Any],
        config: ModelConfig,
        weights: Any,
        observe: Observer | None = None,
    ) -> None:
        self._family = family
        self.config = config
        self._weights = weights
        self._observe = observe

    def has(self, field: str) -> bool:
        return getattr(self._weights, field) is not None

    def qkv(self, *fields: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
        linears = [self.linear(field) for field in fields]
        return lambda x: tuple(linear(x) for linear in linears)

    def linear(self, field: str) -> Callable[[Tensor], Tensor]:
        linear = getattr(self._weights, field)
        observe = self._observe

        def apply(x: Tensor) -> Tensor:
            y = apply_linear(linear, x)
            if observe is not None:
                observe(field, x, y)
            return y

        return apply

    def residual(self, field: str) -> Callable[[Tensor, Tensor], Tensor]:
        linear = self.linear(field)
        return lambda x, hidden: hidden + linear(x)

    def gated(self, gate_field: str, up_field: str, gate: Gate) -> Callable[[Tensor], Tensor]:
        first, second = self.linear(gate_field), self.linear(up_field)
        return lambda x: gate.function(first(x), second(x))

    def norm(self, field: str, bias: str = "") -> Callable[[Tensor], Tensor]:
        weight = getattr(self._weights, field)
        added = getattr(self._weights, bias) if bias else None
        return self._family.norm.plain(weight, self.config.rms_norm_eps, added)


def forward_layer(
    config: ModelConfig,
    layer: Any,
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    observe: Observer | None = None,
    observe_heads: HeadObserver | None = None,
) -> Tensor:
    """Compute one layer. Attention is causal from position 0, or bidirectional in encoders.

    Args:
        layer: weights, an instance of the family's ``layer_type``.
        hidden: ``[batch, length, hidden]``.
        rope: the first ``length`` rows of `runtime.layers.rope.cos_sin_table`.
        observe: callback for every linear, or None.
        observe_heads: callback for the input of attention, or None.

    Returns:
        ``[batch, length, hidden]``.
    """
    family = model_family(config)
    parts: LayerParts = family.parts(PlainBuilder(family, config, layer, observe))
    x, carried = family.before_attention(parts, hidden)
    causal = not family.encoder
    attended = _attend(config, parts, parts.qkv(x), rope, observe_heads, causal=causal)
    return family.after_attention(parts, attended, *carried)


def forward(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    """Return logits ``[batch, length, vocab]`` of ``tokens`` ``[batch, length]`` int64."""
    config = checkpoint.config
    hidden = embed(checkpoint, tokens)
    rope = rope_rows(config, tokens.shape[1], hidden)
    for layer in checkpoint.layers:
        hidden = forward_layer(config, layer, hidden, rope)
    return logits(checkpoint, hidden)


def embed(checkpoint: Checkpoint, tokens: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the input of the first layer ``[..., length, hidden]`` for ``[..., length]`` tokens.

    Args:
        dtype: dtype of the result; None for that of the embedding.

    Raises:
        CheckpointError: there are more tokens than learned position embeddings.
    """
    hidden = functional.embedding(tokens, checkpoint.embedding)
    hidden = hidden.to(dtype or hidden.dtype)
    positions, length = checkpoint.positions, tokens.shape[-1]
    if positions is not None:
        if length > len(positions):
            raise CheckpointError(f"{length} tokens exceed the model's {len(positions)} positions")
        hidden = hidden + positions[:length].to(hidden.dtype)
    return model_family(checkpoint.config).embedded(checkpoint, hidden)


def logits(checkpoint: Checkpoint, hidden: Tensor) -> Tensor:
    """Return logits ``[..., vocab]`` from the output of the last layer, ``[..., hidden]``."""
    config = checkpoint.config
    norm = model_family(config).norm.plain(
        checkpoint.final_norm, config.rms_norm_eps, checkpoint.final_norm_bias
    )
    return functional.linear(norm(hidden), checkpoint.lm_head)


def mean_embedding(hidden: Tensor) -> Tensor:
    """Return the mean of each row's hidden states ``[..., length, hidden]``, with norm 1.

    It represents the output of an encoder of any pooling.
    """
    return functional.normalize(hidden.mean(-2), dim=-1)


def rope_rows(config: ModelConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 cosines and sines ``[length, head_dim / 2]`` on the device of ``like``.

    Raises:
        CheckpointError: a layer has a sliding window shorter than ``length``. Attention has no
            windows here.
    """
    if (window := min(filter(None, config.windows), default=length)) < length:
        raise CheckpointError(f"{length} tokens exceed the model's sliding window of {window}")
    cos, sin = cos_sin_table(config, length)
    return cos.to(like.device), sin.to(like.device)


def _attend(
    config: ModelConfig,
    parts: LayerParts,
    qkv: Sequence[Tensor],
    rope: tuple[Tensor, Tensor],
    observe: HeadObserver | None,
    *,
    causal: bool,
) -> Tensor:
    """Return attention, heads concatenated: ``[batch, length, num_heads * head_dim]``.

    Args:
        qkv: q, k and v, or one tensor with all three concatenated.
    """
    dim, kv_size = config.head_dim, config.num_kv_heads * config.head_dim
    if len(qkv) == 1:
        qkv = torch.split(qkv[0], [config.num_heads * dim, kv_size, kv_size], dim=-1)
    q, k, v = (x.view(*x.shape[:2], -1, dim).transpose(1, 2) for x in qkv)  # [batch, heads, n, dim]
    if parts.head_norms is not None:
        norm_q, norm_k = parts.head_norms
        q, k = norm_q(q), norm_k(k)
    if config.rope.scaling != "none":
        q, k = _rotate(q, rope), _rotate(k, rope)
    if observe is not None:
        observe(q, k, v)
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return attended.transpose(1, 2).flatten(-2)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotate-half RoPE to ``[batch, heads, length, head_dim]``, in fp32."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
