"""A plain forward pass over whole sequences that shows what goes into and out of every projection.

It has no cache, no pages and no kernels of ours: calibration and perplexity run on it, and tests
compare the serving engine with it.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint, Dense, LayerWeights, Linear
from runtime.config import ModelConfig
from runtime.layers.rope import cos_sin_table

Observer = Callable[[str, Tensor, Tensor], None]
"""Called with a projection (a field of `LayerWeights`), its input ``[batch, length, in]`` and its
output ``[batch, length, out]``, in the order of computation: q, k, v, o, gate, up, down."""


def apply_linear(linear: Linear, x: Tensor) -> Tensor:
    """``[..., in]`` to ``[..., out]``, through the low rank where there is one."""
    if isinstance(linear, Dense):
        return functional.linear(x, linear.weight, linear.bias)
    return functional.linear(functional.linear(x, linear.v), linear.u, linear.bias)


def forward_layer(
    config: ModelConfig,
    layer: LayerWeights,
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    observe: Observer | None = None,
) -> Tensor:
    """One decoder layer over ``hidden`` ``[batch, length, hidden]``, causal from position 0.

    ``rope`` is the first ``length`` rows of `runtime.layers.rope.cos_sin_table`.
    """

    def project(name: str, x: Tensor) -> Tensor:
        y = apply_linear(getattr(layer, name), x)
        if observe is not None:
            observe(name, x, y)
        return y

    x = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
    attended = _attend(config, layer, project("q", x), project("k", x), project("v", x), rope)
    hidden = hidden + project("o", attended)
    x = rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
    return hidden + project("down", functional.silu(project("gate", x)) * project("up", x))


def forward(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    """Logits ``[batch, length, vocab]`` of ``tokens`` ``[batch, length]`` int64."""
    config = checkpoint.config
    hidden = functional.embedding(tokens, checkpoint.embedding)
    rope = rope_rows(config, tokens.shape[1], hidden)
    for layer in checkpoint.layers:
        hidden = forward_layer(config, layer, hidden, rope)
    return logits(checkpoint, hidden)


def logits(checkpoint: Checkpoint, hidden: Tensor) -> Tensor:
    """``[..., vocab]`` from what the last layer gives, ``[..., hidden]``."""
    normed = rms_norm(hidden, checkpoint.final_norm, checkpoint.config.rms_norm_eps)
    return functional.linear(normed, checkpoint.lm_head)


def rope_rows(config: ModelConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions ``0 .. length - 1`` on the device of ``like``, fp32."""
    cos, sin = cos_sin_table(config, length)
    return cos.to(like.device), sin.to(like.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, the mean square in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def _attend(
    config: ModelConfig,
    layer: LayerWeights,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: tuple[Tensor, Tensor],
) -> Tensor:
    """Causal attention, heads concatenated: ``[batch, length, num_heads * head_dim]``."""
    q, k, v = (x.view(*x.shape[:2], -1, config.head_dim).transpose(1, 2) for x in (q, k, v))
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
        k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
    attended = functional.scaled_dot_product_attention(
        _rotate(q, rope), _rotate(k, rope), v, is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2).flatten(-2)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate-half RoPE of ``[batch, heads, length, head_dim]``, in fp32."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
