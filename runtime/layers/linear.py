"""Matrix products with weights that are packed once, and projections that share an input.

On the CPU in fp32 the weights are kept in oneDNN's blocked layout. It is faster than MKL's sgemm
where it matters here (2 to 32 rows), and a row's result does not depend on how many other rows are
computed with it, which is what makes a token's KV and logits the same bits in any batch.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Dense, FactorPair, Linear
from runtime.compiled import Floats
from runtime.layers.loops import BLOCK, K_ALIGNMENT, block_gemv

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

    oneDNN blocks the sum of a single row differently, and does not reach the memory's speed with
    it. Where its layout and its order of summing several rows are the ones we know, a single row is
    computed by our own loop over the same memory, to the same bits; else it is computed as two.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self._bias = bias
        self._rows, self._columns = weight.shape
        self._blocks, self._k_block = _blocks_of(self._weight, weight), 0
        if self._blocks is not None:
            self._k_block = self._match(self._blocks)
            self._blocks = self._blocks if self._k_block else None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) != 1:
            return self._product(x)
        if self._blocks is None:
            return self._product(x.repeat(2, 1))[:1]
        return self._single(x, self._blocks, self._k_block)

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product

    def _single(self, x: Tensor, blocks: Floats, k_block: int) -> Tensor:
        y = x.new_empty(1, self._rows)
        block_gemv(blocks, x.numpy()[0], k_block, y.numpy()[0])
        return y if self._bias is None else y.add_(self._bias)

    def _match(self, blocks: Floats) -> int:
        """The block of the sum with which our loop gives oneDNN's bits, or 0 where none does."""
        probe = torch.randn(1, self._columns, generator=torch.Generator().manual_seed(0))
        expected = self._product(probe.repeat(2, 1))[:1]
        found = (k for k in _K_BLOCKS if torch.equal(self._single(probe, blocks, k), expected))
        return next(found, 0)


def _blocks_of(packed: Tensor, weight: Tensor) -> Floats | None:
    """The packed weight's memory as `block_gemv` reads it; None where the layout is another."""
    rows, columns = weight.shape
    padded = functional.pad(weight, (0, -columns % K_ALIGNMENT, 0, -rows % BLOCK))
    if torch.ops.mkldnn._nbytes(packed) != padded.nbytes:
        return None
    known = padded.view(-1, BLOCK, padded.shape[1]).transpose(1, 2).numpy()
    memory = (ctypes.c_float * padded.numel()).from_address(torch.ops.mkldnn.data_ptr(packed))
    blocks: Floats = np.ctypeslib.as_array(memory).reshape(known.shape)
    return blocks if np.array_equal(blocks, known) else None


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this kind use the packed layout."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The best product that there is for a weight ``[out, in]``."""
    kind = PackedProduct if packs(weight.device, weight.dtype) else PlainProduct
    return kind(weight, bias)


class Projection:
    """Linear layers that read the same input, as few products: ``[n, in]`` to ``[n, sum(out)]``.

    All dense: one product over the stacked weights. Otherwise the first product stacks V of the
    factor pairs and W of the dense ones, and each pair's U takes its slice: the ranks may differ.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.factorized = any(isinstance(linear, FactorPair) for linear in linears)
        if not self.factorized:
            weights = [linear.weight for linear in linears if isinstance(linear, Dense)]
            self._first = product(torch.cat(weights), _stack_biases(linears))
            return
        inner = [
            linear.v if isinstance(linear, FactorPair) else linear.weight for linear in linears
        ]
        biases = [None if isinstance(linear, FactorPair) else linear.bias for linear in linears]
        self._first = product(torch.cat(inner), _stack(biases, [len(rows) for rows in inner]))
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
