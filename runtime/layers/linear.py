"""Linear layers with weights that are packed once, and projections that share an input.

On the CPU in fp32, weights are kept in oneDNN's blocked layout, which is faster than MKL's sgemm
for the relevant sizes (2 to 32 rows). A row's result does not depend on the number of other rows,
so a token's KV and logits are bitwise identical in any batch. A few rows are computed by compiled
loops (`few_rows.py`), which read less memory and whose results are bitwise identical to oneDNN's.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Dense, FactorPair, Linear
from runtime.layers.few_rows import FewRowsLinear, few_rows_linear

_TYPICAL_ROWS = 64
"""Number of input rows that oneDNN packs weights for. Any from 8 to 256 is equally fast."""
_K_BLOCKS = (512, 1024, 256, 2048, 4096, 128, 1 << 20)
"""Observed block sizes of oneDNN: columns that are summed before the sum is added to the output."""


class LinearOp(Protocol):
    """``x W^T + b`` for one weight: `[n, in]` to `[n, out]`."""

    def __call__(self, x: Tensor) -> Tensor: ...


class TorchLinear:
    """Linear layer computed by torch on the weight's device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """Linear layer in oneDNN's packed layout. A row's result does not depend on other rows.

    oneDNN sums a single row in another order than several rows, and is slow for a few rows. If its
    block size for several rows is one of `_K_BLOCKS`, compiled loops compute a few rows with the
    same block size. Otherwise a single row is duplicated and computed as two.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self._bias = bias
        self._few = few_rows_linear(weight, self._weight)
        if self._few is not None and not self._match(self._few, weight.shape[1]):
            self._few = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._few is not None and 0 < len(x) <= self._few.max_rows:
            y = self._few(x)
            return y if self._bias is None else y.add_(self._bias)
        if len(x) == 1:
            return self._onednn(x.repeat(2, 1))[:1]
        return self._onednn(x)

    def _onednn(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def _match(self, few: FewRowsLinear, columns: int) -> bool:
        """Set ``few.k_block`` so that results are bitwise identical to oneDNN's, if possible.

        Returns:
            Whether a suitable block size was found.
        """
        probe = torch.randn(2, columns, generator=torch.Generator().manual_seed(0))
        expected = self._onednn(probe)
        for few.k_block in _K_BLOCKS:
            y = torch.cat([few(row[None]) for row in probe])
            if torch.equal(y if self._bias is None else y + self._bias, expected):
                return True
        return False


def uses_packed_layout(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether linear layers of this device and dtype use oneDNN's packed layout."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def linear_op(weight: Tensor, bias: Tensor | None = None) -> LinearOp:
    """Return the fastest available linear layer for a weight ``[out, in]`` and a bias ``[out]``."""
    kind = PackedLinear if uses_packed_layout(weight.device, weight.dtype) else TorchLinear
    return kind(weight, bias)


SharedOps = dict[tuple[int, ...], LinearOp]
"""Linear layers, keyed by the ``id()`` of the tensors they stack, which must be kept alive."""


class Projection:
    """Several linear layers over one input, in few matmuls: ``[n, in]`` to ``[n, sum(out)]``.

    If all are dense, one matmul multiplies the input by the stacked weights. Otherwise, the first
    matmul multiplies the input by the stacked V of factor pairs and W of dense layers. The U of
    each factor pair then multiplies its slice of the result. Ranks may differ.

    Args:
        shared: first matmuls of earlier projections. One with the same weights is reused; a new one
            is added.
    """

    def __init__(self, linears: Sequence[Linear], shared: SharedOps | None = None) -> None:
        self.factorized = any(isinstance(linear, FactorPair) for linear in linears)
        if not self.factorized:
            weights = [linear.weight for linear in linears if isinstance(linear, Dense)]
            self._first = linear_op(torch.cat(weights), _stack_biases(linears))
            return
        inner = [
            linear.v if isinstance(linear, FactorPair) else linear.weight for linear in linears
        ]
        biases = [None if isinstance(linear, FactorPair) else linear.bias for linear in linears]
        key = tuple(id(part) for part in (*inner, *biases) if part is not None)
        shared = {} if shared is None else shared
        if key not in shared:
            bias = _stack(biases, [len(weight) for weight in inner])
            shared[key] = linear_op(torch.cat(inner), bias)
        self._first = shared[key]
        self._sizes = [len(weight) for weight in inner]
        self._second = [
            linear_op(linear.u, linear.bias) if isinstance(linear, FactorPair) else None
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
    """Concatenate biases, with zeros for missing ones. Return None if all are missing."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    return torch.cat(
        [
            given[0].new_zeros(size) if bias is None else bias
            for bias, size in zip(biases, sizes, strict=True)
        ]
    )
