"""The layers of BERT and RoBERTa on a GPU, with fused operations between torch's matmuls.

Linears over the same input are stacked: W, or the V of their factor pairs. The residual stream, the
queries and the inner activations of the MLP are overwritten.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Dense, FactorPair, Linear
from runtime.config import EncoderConfig
from runtime.encoder.batch import RaggedBatch
from runtime.encoder.gpu import add_norm, gelu
from runtime.encoder.passes import Passes
from runtime.kernels.alignment import round_up


class Pair:
    """A factor pair. Its rank is padded to a multiple of 8.

    torch's matmuls are several times slower with other widths.
    """

    def __init__(self, pair: FactorPair) -> None:
        self.v, self.u, self.bias = padded(pair.v, 0), padded(pair.u, 1), pair.bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[n, out]` for `[n, in]`."""
        return self.expanded(self.reduced(x))

    def reduced(self, x: Tensor) -> Tensor:
        """Return V x, `[n, rank]`."""
        return functional.linear(x, self.v)

    def expanded(self, inner: Tensor) -> Tensor:
        """Return U x + b for `[n, rank]`."""
        return functional.linear(inner, self.u, self.bias)


class Matrix:
    """``W x + b``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.u, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[n, out]` for `[n, in]`."""
        return self.expanded(self.reduced(x))

    def reduced(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def expanded(self, inner: Tensor) -> Tensor:
        """Return W x + b."""
        return functional.linear(inner, self.u, self.bias)


def single(linear: Linear) -> Pair | Matrix:
    """Return the operation of one linear."""
    return Pair(linear) if isinstance(linear, FactorPair) else Matrix(linear.weight, linear.bias)


class StackedLinears:
    """Linears over one input `[n, in]`, with as few matmuls as possible.

    All V of factor pairs are one matmul, and so are all W if there is no factor pair.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._dense: Matrix | None = None
        if all(isinstance(linear, Dense) for linear in linears):
            self._dense = Matrix(torch.cat([outer(each) for each in linears]), _biases(linears))
            self._sizes = [len(outer(linear)) for linear in linears]
            return
        self._parts = [single(linear) for linear in linears]
        pairs = [part for part in self._parts if isinstance(part, Pair)]
        self._v = torch.cat([pair.v for pair in pairs])
        spans = pairwise(accumulate((len(pair.v) for pair in pairs), initial=0))
        self._columns = [
            slice(*next(spans)) if isinstance(part, Pair) else None for part in self._parts
        ]
        for pair in pairs:
            del pair.v  # now a part of the stack

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return the output `[n, out]` of each linear."""
        if self._dense is not None:
            return torch.split(self._dense(x), self._sizes, dim=1)
        inner = functional.linear(x, self._v)
        return [
            part.expanded(x if columns is None else inner[:, columns])
            for part, columns in zip(self._parts, self._columns, strict=True)
        ]


class BatchedPairs:
    """Factor pairs of equal sizes and ranks over one input, without biases, in two matmuls."""

    def __init__(self, pairs: Sequence[FactorPair]) -> None:
        self._v = torch.cat([padded(pair.v, 0) for pair in pairs])
        self._u = torch.stack([padded(pair.u, 1) for pair in pairs])  # [pairs, out, rank]

    @staticmethod
    def supports(linears: Sequence[Linear]) -> bool:
        """Return whether the linears are such factor pairs."""
        pairs = [linear for linear in linears if isinstance(linear, FactorPair)]
        sizes = {(len(pair.u), round_up(pair.rank)) for pair in pairs}
        return len(pairs) == len(linears) and len(sizes) == 1

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return the output `[n, out]` of each factor pair."""
        pairs, _, rank = self._u.shape
        inner = functional.linear(x, self._v).view(len(x), pairs, rank)
        return torch.bmm(inner.transpose(0, 1), self._u.transpose(1, 2)).unbind()


class Attends(Protocol):
    """Kernels of attention."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: RaggedBatch,
        out: Tensor,
        q_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
    ) -> Tensor:
        """See `runtime.encoder.gpu.TritonRaggedAttention.attend`."""
        ...


class Attention:
    """Attention with its linears, without the sum with the residual stream."""

    def __init__(
        self,
        projections: tuple[Linear, Linear, Linear],
        output: Linear,
        attention: Attends,
    ) -> None:
        self._attention = attention
        self._output = single(output)
        self._qkv: BatchedPairs | StackedLinears
        self._biases: tuple[Tensor | None, Tensor | None] = None, None
        if BatchedPairs.supports(projections):
            self._qkv = BatchedPairs([each for each in projections if isinstance(each, FactorPair)])
            self._biases = projections[0].bias, projections[2].bias
        else:
            self._qkv = StackedLinears(projections)

    def __call__(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        """Return `[n, hidden]` for `[n, hidden]`."""
        # q, k and v are freed before the output is allocated.
        return self._output.expanded(self._output.reduced(self._attended(x, batch)))

    def _attended(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        """Return the output of attention, which is in the memory of the queries."""
        q, k, v = self._qkv(x)
        return self._attention.attend(q, k, v, batch, q, *self._biases)


class Mlp:
    """The MLP with GELU, without the sum with the residual stream."""

    def __init__(self, up: Linear, down: Linear, passes: Passes) -> None:
        self._up, self._down = single(up), single(down)
        self._between = None
        if passes.fused_mlp and isinstance(self._up, Pair) and isinstance(self._down, Pair):
            self._between = _rank_space_mlp(self._up, self._down)

    def fused(self, tokens: int) -> bool:
        """Return whether a call with so many tokens has no inner activations in memory."""
        return self._between is not None and self._between.fills(tokens)

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[n, hidden]` for `[n, hidden]`."""
        reduced = self._up.reduced(x)
        if self._between is not None and self._between.fills(len(x)):
            return self._down.expanded(self._between(reduced))
        return self._down(gelu(self._up.expanded(reduced)))


def _rank_space_mlp(up: Pair, down: Pair) -> Any:
    """Return a `RankSpaceMlp`, or None if it does not support the factors."""
    if not up.u.is_cuda:
        return None
    from runtime.encoder.rank_space_mlp import RankSpaceMlp  # optional: Triton

    supported = RankSpaceMlp.supports(up.u, down.v)
    return RankSpaceMlp(up.u, up.bias, down.v) if supported else None


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

    def __init__(
        self,
        config: EncoderConfig,
        weights: Any,
        attention: Attends,
        passes: Passes,
    ) -> None:
        def norm(name: str) -> AddNorm:
            weight, bias = getattr(weights, name), getattr(weights, f"{name}_bias")
            return AddNorm(weight, bias, config.rms_norm_eps)

        self._attention = Attention((weights.q, weights.k, weights.v), weights.o, attention)
        self._mlp = Mlp(weights.up, weights.down, passes)
        self._attention_norm, self._output_norm = norm("attention_norm"), norm("output_norm")
        self._mlp_tokens = passes.mlp_tokens

    def __call__(self, hidden: Tensor, parts: Sequence[RaggedBatch]) -> Tensor:
        """Replace the residual stream `[n, hidden]` by that after the layer, and return it.

        Args:
            parts: the batch, divided into those that attention computes at once.
        """
        first = 0
        for part in parts:
            x = hidden[first : first + len(part.tokens)]
            self._attention_norm(x, self._attention(x, part))
            first += len(x)
        at_once = self._mlp.fused(len(hidden))
        for x in (hidden,) if at_once else torch.split(hidden, self._mlp_tokens):
            self._output_norm(x, self._mlp(x))
        return hidden


class PackedEncoderLayers:
    """All layers of a model.

    Args:
        layers: weights of each layer, `EncoderLayerWeights` on the device.
    """

    def __init__(
        self,
        config: EncoderConfig,
        layers: Iterable[Any],
        attention: Attends,
        passes: Passes,
    ) -> None:
        self._layers = [PackedEncoderLayer(config, each, attention, passes) for each in layers]
        self._attention_tokens = passes.attention_tokens

    def __call__(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        """Replace the residual stream `[n, hidden]` by that after all layers, and return it."""
        parts = batch.divided(self._attention_tokens)
        for layer in self._layers:
            hidden = layer(hidden, parts)
        return hidden


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


def padded(factor: Tensor, dim: int) -> Tensor:
    """Return a factor whose rank, its size in dimension ``dim``, is a multiple of 8."""
    missing = round_up(factor.shape[dim]) - factor.shape[dim]
    if not missing:
        return factor
    return functional.pad(factor, (0, missing) if dim else (0, 0, 0, missing))
