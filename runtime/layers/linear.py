"""Matrix products with weights that are packed once, and projections that share an input.

On the CPU in fp32 the weights are kept in oneDNN's blocked layout. It is faster than MKL's sgemm
where it matters here (2 to 32 rows), and a row's result does not depend on how many other rows are
computed with it, which is what makes a token's KV and logits the same bits in any batch. A few rows
go through our own loops, which read less memory and give the same bits (`few_rows.py`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Dense, FactorPair, Linear
from runtime.layers.few_rows import FewRows, few_rows

_TYPICAL_ROWS = 64  # oneDNN packs for a row count; measured the same from 8 to 256
_K_BLOCKS = (512, 1024, 256, 2048, 4096, 128, 1 << 20)  # as oneDNN was seen to choose them


class Product(Protocol):
    """``x W^T + b`` for one weight."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainProduct:
    """The product as torch computes it on the weight's device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedProduct:
    """The product over oneDNN's blocked layout: rows are independent of one another, bit for bit.

    oneDNN blocks the sum of a single row differently, and does not reach the memory's speed with a
    few rows. Where its order of summing several rows is one that we know, few rows are computed by
    our own loops, to the same bits; else a single row is computed as two.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self._bias = bias
        self._few = few_rows(weight, self._weight)
        if self._few is not None and not self._match(self._few, weight.shape[1]):
            self._few = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._few is not None and 0 < len(x) <= self._few.most:
            y = self._few(x)
            return y if self._bias is None else y.add_(self._bias)
        if len(x) == 1:
            return self._product(x.repeat(2, 1))[:1]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product

    def _match(self, few: FewRows, columns: int) -> bool:
        """Find the block of the sum with which ``few`` gives oneDNN's bits. False if none does."""
        probe = torch.randn(2, columns, generator=torch.Generator().manual_seed(0))
        expected = self._product(probe)
        for few.k_block in _K_BLOCKS:
            y = torch.cat([few(row[None]) for row in probe])
            if torch.equal(y if self._bias is None else y + self._bias, expected):
                return True
        return False


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this kind use the packed layout."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The best product that there is for a weight ``[out, in]``."""
    kind = PackedProduct if packs(weight.device, weight.dtype) else PlainProduct
    return kind(weight, bias)


Packed = dict[tuple[int, ...], Product]
"""Products by the tensors that are stacked in them, while these live."""


class Projection:
    """Linear layers that read the same input, as few products: ``[n, in]`` to ``[n, sum(out)]``.

    All dense: one product over the stacked weights. Otherwise the first product stacks V of the
    factor pairs and W of the dense ones, and each pair's U takes its slice: the ranks may differ.
    What ``packed`` has already is not stacked again.
    """

    def __init__(self, linears: Sequence[Linear], packed: Packed | None = None) -> None:
        self.factorized = any(isinstance(linear, FactorPair) for linear in linears)
        if not self.factorized:
            weights = [linear.weight for linear in linears if isinstance(linear, Dense)]
            self._first = product(torch.cat(weights), _stack_biases(linears))
            return
        inner = [
            linear.v if isinstance(linear, FactorPair) else linear.weight for linear in linears
        ]
        biases = [None if isinstance(linear, FactorPair) else linear.bias for linear in linears]
        key = tuple(id(part) for part in (*inner, *biases) if part is not None)
        packed = {} if packed is None else packed
        if key not in packed:
            packed[key] = product(torch.cat(inner), _stack(biases, [len(rows) for rows in inner]))
        self._first = packed[key]
        self._sizes = [len(rows) for rows in inner]
        self._second = [
            product(linear.u, linear.bias) if isinstance(linear, FactorPair) else None
            for linear in linears
        ]

    def __call__(self, x: Tensor) -> Tensor:
        inner = self._first(x)
        if not self.factorized:
            return inner
        if len(self._second) == 1 and (only := self._second[0]) is not None:
            return only(inner)
        slices = torch.split(inner, self._sizes, dim=1)
        parts = [
            part if up is None else up(part) for part, up in zip(slices, self._second, strict=True)
        ]
        return torch.cat(parts, dim=1)


def _stack_biases(linears: Sequence[Linear]) -> Tensor | None:
    sizes = [len(linear.weight if isinstance(linear, Dense) else linear.u) for linear in linears]
    return _stack([linear.bias for linear in linears], sizes)


def _stack(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Biases one after the other, zeros where there is none; None if there is none at all."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    return torch.cat(
        [
            given[0].new_zeros(size) if bias is None else bias
            for bias, size in zip(biases, sizes, strict=True)
        ]
    )
