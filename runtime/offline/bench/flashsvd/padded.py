"""The backends ``naive`` and ``sdpa``: padded batches, one torch operation after another."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint, Dense, Linear, moved
from runtime.config import EncoderConfig
from runtime.encoder.bert import encoder_family
from runtime.models.bert import EncoderLayerWeights


class PaddedEncoder:
    """The transformer over a padded batch, one torch operation after another.

    Args:
        materialize: whether scores are materialized; otherwise torch's fused attention is used.
    """

    def __init__(self, checkpoint: Checkpoint, device: str, *, materialize: bool) -> None:
        assert isinstance(checkpoint.config, EncoderConfig)
        self._config = checkpoint.config
        self._materialize = materialize
        family = encoder_family(self._config)
        names = [family.token_types, *(f"{family.embedding_norm}.{n}" for n in ("weight", "bias"))]
        assert checkpoint.positions is not None
        tensors = [checkpoint.embedding, checkpoint.positions, *(checkpoint.more[n] for n in names)]
        self._tokens, self._positions, self._types, self._norm, self._norm_bias = (
            tensor.to(device) for tensor in tensors
        )
        self._layers: list[EncoderLayerWeights] = [
            moved(layer, torch.device(device), torch.bfloat16, {}) for layer in checkpoint.layers
        ]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the hidden states `[b, length, hidden]` of token ids `[b, length]`."""
        x = functional.embedding(tokens, self._tokens)
        x = self._normed(
            x + self._positions[: tokens.shape[1]] + self._types[0], self._norm, self._norm_bias
        )
        for layer in self._layers:
            attended = _linear(self._attention(x, layer), layer.o)
            x = self._normed(x + attended, layer.attention_norm, layer.attention_norm_bias)
            del attended
            made = _linear(functional.gelu(_linear(x, layer.up)), layer.down)
            x = self._normed(x + made, layer.output_norm, layer.output_norm_bias)
        return x

    def _attention(self, x: Tensor, layer: EncoderLayerWeights) -> Tensor:
        q, k, v = (
            _linear(x, each).view(*x.shape[:2], -1, self._config.head_dim).transpose(1, 2)
            for each in (layer.q, layer.k, layer.v)
        )
        if self._materialize:
            scores = q @ k.transpose(2, 3) / math.sqrt(self._config.head_dim)
            attended = scores.softmax(-1) @ v
        else:
            attended = functional.scaled_dot_product_attention(q, k, v)
        merged: Tensor = attended.transpose(1, 2).flatten(2)
        return merged

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, weight.shape, weight, bias, self._config.rms_norm_eps)


def _linear(x: Tensor, linear: Linear) -> Tensor:
    if isinstance(linear, Dense):
        return functional.linear(x, linear.weight, linear.bias)
    return functional.linear(functional.linear(x, linear.v), linear.u, linear.bias)
