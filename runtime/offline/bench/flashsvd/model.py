"""Encoders of factor pairs that compute attention and MLP in rank space."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint, FactorPair, moved
from runtime.config import EncoderConfig
from runtime.encoder.batch import RaggedBatch
from runtime.encoder.bert import encoder_family
from runtime.encoder.gpu import add_norm
from runtime.errors import RuntimeFault
from runtime.models.bert import EncoderLayerWeights
from runtime.offline.bench.flashsvd.ops import (
    ResidentAttention,
    StreamingAttention,
    StreamingFfn,
    resident_ffn,
)

Layer = Callable[[Tensor, RaggedBatch], Tensor]
"""A layer: the residual stream `[n, hidden]` before it to that after it, which may overwrite it."""
LayerType = Callable[[EncoderConfig, EncoderLayerWeights], Layer]


class FlashSVDLayer:
    """A layer of FlashSVD v1: one operation for each factor that no kernel has fused."""

    def __init__(self, config: EncoderConfig, weights: EncoderLayerWeights) -> None:
        self._weights, self._eps = weights, config.rms_norm_eps
        self._q, self._k, self._v, self._o, self._up, self._down = (
            _pair(weights, name) for name in ("q", "k", "v", "o", "up", "down")
        )
        self._attention = StreamingAttention(config, [self._q, self._k, self._v])
        self._ffn = StreamingFfn(self._up, self._down)

    def __call__(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        weights = self._weights
        inner = [functional.linear(x, pair.v) for pair in (self._q, self._k, self._v)]
        attended = self._attention(inner, batch)
        del inner
        added = functional.linear(functional.linear(attended, self._o.v), self._o.u, self._o.bias)
        del attended
        x = self._normed(x + added, weights.attention_norm, weights.attention_norm_bias)
        del added
        made = self._ffn(functional.linear(x, self._up.v))
        added = functional.linear(made, self._down.u, self._down.bias)
        return self._normed(x + added, weights.output_norm, weights.output_norm_bias)

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, weight.shape, weight, bias, self._eps)


class FlashSVD15Layer:
    """A layer of FlashSVD v1.5: packed V of Q, K and V, resident tiles, and fused norms.

    It overwrites the residual stream, and the output of attention by that of its projection.
    """

    def __init__(self, config: EncoderConfig, weights: EncoderLayerWeights) -> None:
        self._eps = config.rms_norm_eps
        self._attention_norm = weights.attention_norm, weights.attention_norm_bias
        self._output_norm = weights.output_norm, weights.output_norm_bias
        pairs = [_pair(weights, name) for name in ("q", "k", "v")]
        self._o, self._up, self._down = (_pair(weights, name) for name in ("o", "up", "down"))
        self._inner = torch.cat([pair.v for pair in pairs])
        self._ranks = [pair.rank for pair in pairs]
        self._attention = ResidentAttention(config, pairs)
        self._ffn = resident_ffn(self._up, self._down)

    def __call__(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        inner = functional.linear(x, self._inner)
        attended = self._attention(torch.split(inner, self._ranks, dim=1), batch)
        del inner
        added = _project(functional.linear(attended, self._o.v), self._o, attended)
        add_norm(x, added, *self._attention_norm, self._eps)
        inner = functional.linear(x, self._up.v)
        added = _project(self._ffn(inner), self._down, added)
        return add_norm(x, added, *self._output_norm, self._eps)


class FlashSVDEncoder:
    """The transformer over ragged batches.

    Args:
        checkpoint: an encoder whose linears are all factor pairs.
        layer: `FlashSVDLayer` or `FlashSVD15Layer`.

    Raises:
        RuntimeFault: a linear is dense, or a shape is not supported.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        layer: LayerType,
    ) -> None:
        config = checkpoint.config
        assert isinstance(config, EncoderConfig)
        family = encoder_family(config)
        placed: dict[int, Tensor] = {}

        def on_device(value: Tensor | None) -> Tensor:
            found: Tensor = moved(value, device, dtype, placed)
            return found

        self._eps = config.rms_norm_eps
        self._tokens = on_device(checkpoint.embedding)
        types = on_device(checkpoint.more[family.token_types])
        self._positions = on_device(checkpoint.positions) + types[0]
        norm = family.embedding_norm
        self._norm = (
            on_device(checkpoint.more[f"{norm}.weight"]),
            on_device(checkpoint.more[f"{norm}.bias"]),
        )
        self.layers = [
            layer(config, moved(weights, device, dtype, {})) for weights in checkpoint.layers
        ]

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Return the hidden states `[n, hidden]` of tokens whose type is 0."""
        x = functional.embedding(batch.tokens, self._tokens)
        x = add_norm(x, self._positions[batch.positions], *self._norm, self._eps)
        for layer in self.layers:
            x = layer(x, batch)
        return x


def _pair(weights: EncoderLayerWeights, name: str) -> FactorPair:
    linear = getattr(weights, name)
    if not isinstance(linear, FactorPair):
        raise RuntimeFault(f"{name} is dense: FlashSVD computes factor pairs only")
    return linear


def _project(inner: Tensor, pair: FactorPair, out: Tensor) -> Tensor:
    """Write ``U inner + b`` to ``out`` and return it."""
    if pair.bias is None:
        return torch.mm(inner, pair.u.T, out=out)
    return torch.addmm(pair.bias, inner, pair.u.T, out=out)
