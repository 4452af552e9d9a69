"""Projections and prefill attention over packed weights, for any number of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.attention.gpu import TritonAttention
from runtime.gemm.epilogues import Kind
from runtime.gemm.ops import Products
from runtime.gemm.plan import KernelPlan
from runtime.gemm.weights import GROUPS, LayerMatrices, Matrix, StepWeights, by_halves


class StepProjection:
    """A group's projections, `[n, in]` to what `Products` makes of them; q, k and v with their rows
    as `by_halves` has them."""

    def __init__(
        self,
        weights: StepWeights,
        layer: LayerMatrices,
        names: Sequence[str],
        kind: Kind,
        plan: KernelPlan,
    ) -> None:
        base = weights.head.weight
        first = layer.inner.get(names[0])
        outer = [layer.outer[name] for name in names]
        biases = _biases(weights, layer, names)
        whole = layer.stacked.get(names[0])
        if whole is not None and kind is Kind.PLAIN:
            outer = [Matrix(whole)]
        self._inner = None if first is None else Products(base, [first], plan, inner=True)
        self._outer = Products(base, outer, plan, kind, biases, whole)

    @property
    def products(self) -> list[Products]:
        """What it is computed by, first to last."""
        return [self._outer] if self._inner is None else [self._inner, self._outer]

    def __call__(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        inner = x if self._inner is None else self._inner(x, x)
        return self._outer(x, inner, hidden)


class FactoredAttention:
    """Prefill whose queries are made of their factors where they are needed, and never written."""

    def __init__(
        self,
        weights: StepWeights,
        layer: LayerMatrices,
        attention: TritonAttention,
        plan: KernelPlan,
    ) -> None:
        names, base = GROUPS[0], weights.head.weight
        biases = _biases(weights, layer, names)
        self._attention, self._query = attention, layer.outer["q"]
        self._inner = Products(base, [layer.inner["q"]], plan, inner=True)
        rows = len(self._query.weight)
        self._biases = None if biases is None else biases[:rows]
        others = None if biases is None else biases[rows:]
        self._kv = Products(base, [layer.outer[n] for n in names[1:]], plan, biases=others)

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        """What the tokens of a batch find: `[n, heads * dim]`; their K and V go into ``planes``."""
        k_pages, v_pages = planes
        inner = self._inner(x, x)
        self._attention.write_kv(self._kv(x, inner), rope, k_pages, v_pages, batch)
        return self._attention.attend_factored(
            inner, self._query.weight, self._biases, rope, k_pages, v_pages, batch
        )


def _biases(weights: StepWeights, layer: LayerMatrices, names: Sequence[str]) -> Tensor | None:
    """Of a group's projections, one after the other; zeros where there is none."""
    outer = [layer.outer[name] for name in names]
    if all(matrix.bias < 0 for matrix in outer):
        return None
    found = []
    for name, matrix in zip(names, outer, strict=True):
        rows = len(matrix.weight)
        bias = weights.vectors.new_zeros(rows)
        if matrix.bias >= 0:
            bias = weights.vectors[matrix.bias : matrix.bias + rows]
        found.append(by_halves(bias, weights.config.head_dim) if name in GROUPS[0] else bias)
    return torch.cat(found)
