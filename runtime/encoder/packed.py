"""The layers of BERT and RoBERTa on a GPU, with fused operations between torch's matmuls.

Linears over the same input are stacked: W, or the V of their factor pairs. The residual stream and
the inner activations of the MLP are overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Dense, FactorPair, Linear
from runtime.config import EncoderConfig
from runtime.encoder.attention import RaggedAttention
from runtime.encoder.batch import RaggedBatch
from runtime.encoder.gpu import add_norm, gelu
from runtime.kernels.alignment import round_up


class StackedLinears:
    """Linears over one input `[n, in]`, with as few matmuls as possible.

    All V of factor pairs are one matmul. Their ranks are padded to multiples of 8, because torch's
    matmuls are several times slower with other widths. So are all W if there is no factor pair.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._dense = None
        if all(isinstance(linear, Dense) for linear in linears):
            weight = torch.cat([outer(linear) for linear in linears])
            self._dense = weight, _biases(linears)
        pairs = [linear for linear in linears if isinstance(linear, FactorPair)]
        self._inner = torch.cat([_padded(pair.v, 0) for pair in pairs]) if pairs else None
        spans = pairwise(accumulate((round_up(pair.rank) for pair in pairs), initial=0))
        self._parts = [
            (slice(*next(spans)), _padded(linear.u, 1), linear.bias)
            if isinstance(linear, FactorPair)
            else (None, linear.weight, linear.bias)
            for linear in linears
        ]
        self._sizes = [len(outer(linear)) for linear in linears]
        if self._dense is not None:
            self._parts = []

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return the output `[n, out]` of each linear."""
        if self._dense is not None:
            return torch.split(functional.linear(x, *self._dense), self._sizes, dim=1)
        inner = x if self._inner is None else functional.linear(x, self._inner)
        return [
            functional.linear(x if columns is None else inner[:, columns], weight, bias)
            for columns, weight, bias in self._parts
        ]


@dataclass(frozen=True)
class AddNorm:
    """LayerNorm of the residual stream plus an addend. ``weight`` and ``bias`` are `[hidden]`."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor, added: Tensor) -> Tensor:
        """Overwrite ``x`` `[n, hidden]` and return it."""
        return add_norm(x, added, self.weight, self.bias, self.eps)


class PackedEncoderLayer:
    """One post-norm layer.

    Args:
        weights: an `EncoderLayerWeights` on the device.
    """

    def __init__(self, config: EncoderConfig, weights: Any, attention: RaggedAttention) -> None:
        def linears(*names: str) -> StackedLinears:
            return StackedLinears([getattr(weights, name) for name in names])

        def norm(name: str) -> AddNorm:
            weight, bias = getattr(weights, name), getattr(weights, f"{name}_bias")
            return AddNorm(weight, bias, config.rms_norm_eps)

        self._attention = attention
        self._qkv, self._o = linears("q", "k", "v"), linears("o")
        self._up, self._down = linears("up"), linears("down")
        self._attention_norm, self._output_norm = norm("attention_norm"), norm("output_norm")

    def __call__(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        """Replace the residual stream `[n, hidden]` by that after the layer, and return it."""
        q, k, v = self._qkv(hidden)
        (attended,) = self._o(self._attention(q, k, v, batch))
        del q, k, v
        hidden = self._attention_norm(hidden, attended)
        del attended
        (inner,) = self._up(hidden)
        (made,) = self._down(gelu(inner))
        return self._output_norm(hidden, made)


def outer(linear: Linear) -> Tensor:
    """Return the matrix whose product is the output: W, or U of a factor pair."""
    return linear.u if isinstance(linear, FactorPair) else linear.weight


def _biases(linears: Sequence[Linear]) -> Tensor | None:
    """Return the concatenated biases, with 0 where there is none; None if all are missing."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            outer(linear).new_zeros(len(outer(linear))) if linear.bias is None else linear.bias
            for linear in linears
        ]
    )


def _padded(factor: Tensor, dim: int) -> Tensor:
    """Return a factor whose rank, its size in dimension ``dim``, is a multiple of 8."""
    missing = round_up(factor.shape[dim]) - factor.shape[dim]
    if not missing:
        return factor
    return functional.pad(factor, (0, missing) if dim else (0, 0, 0, missing))
