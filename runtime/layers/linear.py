"""Linear layers with weights that are packed once, and projections that share an input.

On the CPU in fp32, oneDNN multiplies weights in its blocked layout, which is faster than MKL's
sgemm for the relevant sizes (2 to 32 rows). A row's result does not depend on the number of other
rows, so a token's KV and logits are bitwise identical in any batch. A few rows are computed by
compiled loops, which read less memory and whose results are bitwise identical to oneDNN's.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import FactorPair, Linear
from runtime.layers.onednn import ExpandedWeight, PackedWeight
from runtime.layers.reduce import Reduce, one_rank
from runtime.layers.stored_weight import StoredWeight

_K_BLOCKS = (512, 1024, 256, 2048, 4096, 128, 1 << 20)
"""Observed block sizes of oneDNN: columns that are summed before the sum is added to the output."""


LinearOp = Callable[[Tensor], Tensor]
"""``x W^T + b`` for one weight: `[n, in]` to `[n, out]`."""


class PackedLinear:
    """Linear layer computed by oneDNN. A row's result does not depend on other rows.

    A weight with a smaller lossless form (`StoredWeight.compact`) is kept in this form only, and
    expanded when more than a few rows are computed. Any other is kept in oneDNN's layout.

    oneDNN sums a single row in another order than several rows, and is slow for a few rows. If its
    block size for several rows is one of `_K_BLOCKS`, compiled loops compute a few rows with the
    same block size. Otherwise a single row is padded.

    Attributes:
        stored: the weight in a form that compiled loops read; None if only oneDNN can read it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._weight, self.stored = _stored_once(weight)
        self._k_block = 0 if self.stored is None else _k_block_of(self._weight, self.stored)

    def __call__(self, x: Tensor) -> Tensor:
        if self.stored and self._k_block and 0 < len(x) <= self.stored.max_rows:
            y = self.stored.multiply(x, self._k_block)
        else:
            y = self._weight.multiply(_with_more_rows(x))[: len(x)]
        return y if self._bias is None else y.add_(self._bias)


def _with_more_rows(x: Tensor) -> Tensor:
    """Return ``x`` with at most an eighth more rows, which are zeros, and at least two rows.

    oneDNN compiles a kernel of 0.6 MB for each number of rows and shape of weights, and keeps up to
    1,024 of them. Up to 512 rows, there are 48 numbers of rows.
    """
    step = max(1 << max(len(x).bit_length() - 4, 0), 2)
    more = -len(x) % step
    return functional.pad(x, (0, 0, 0, more)) if more else x


def _stored_once(weight: Tensor) -> tuple[ExpandedWeight | PackedWeight, StoredWeight | None]:
    """Return a weight for oneDNN and for compiled loops; both share its memory if possible."""
    compact = StoredWeight.compact(weight)
    if compact and (expanded := ExpandedWeight.of(compact, weight)):
        return expanded, compact
    packed = PackedWeight(weight)
    if compact is None and packed.blocks is not None:
        return packed, StoredWeight(packed.blocks, weight.shape)
    return packed, compact


def _k_block_of(weight: ExpandedWeight | PackedWeight, stored: StoredWeight) -> int:
    """Return the ``k_block`` with which results are bitwise identical to oneDNN's, or 0."""
    probe = torch.randn(2, stored.shape[1], generator=torch.Generator().manual_seed(0))
    expected = weight.multiply(probe)
    for k_block in _K_BLOCKS:
        y = torch.cat([stored.multiply(row[None], k_block) for row in probe])
        if torch.equal(y, expected):
            return k_block
    return 0


def uses_packed_layout(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether linear layers of this device and dtype use oneDNN's packed layout."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def linear_op(weight: Tensor, bias: Tensor | None = None) -> LinearOp:
    """Return the fastest available linear layer for a weight ``[out, in]`` and a bias ``[out]``."""
    if uses_packed_layout(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return partial(functional.linear, weight=weight, bias=bias)


SharedOps = dict[tuple[int, ...], LinearOp]
"""Linear layers, keyed by the ``id()`` of the tensors they stack, which must be kept alive."""


class Projection:
    """Several linear layers over one input, in few matmuls: ``[n, in]`` to ``[n, sum(out)]``.

    If all are dense, one matmul multiplies the input by the stacked weights. Otherwise, the first
    matmul multiplies the input by the stacked V of factor pairs and W of dense layers. The U of
    each factor pair then multiplies its slice of the result. The factor pairs may have different
    ranks.

    Args:
        shared: first matmuls of earlier projections. One with the same weights is reused; a new one
            is added.
        reduce: sum over the ranks of the worker, applied to the output of the first matmul. If the
            ranks hold columns of the weights (`runtime.checkpoint.family.LinearTensor`), each
            computes one addend of that output. The bias of a dense layer is then held by one rank
            only.
    """

    def __init__(
        self,
        linears: Sequence[Linear],
        shared: SharedOps | None = None,
        reduce: Reduce = one_rank,
    ) -> None:
        self._reduce = reduce
        inner = [
            linear.v if isinstance(linear, FactorPair) else linear.weight for linear in linears
        ]
        biases = [None if isinstance(linear, FactorPair) else linear.bias for linear in linears]
        self._sizes = [len(weight) for weight in inner]
        key = tuple(id(part) for part in (*inner, *biases) if part is not None)
        shared = {} if shared is None else shared
        if key not in shared:
            shared[key] = linear_op(torch.cat(inner), _stack(biases, self._sizes))
        self._first = shared[key]
        self._second = [
            linear_op(linear.u, linear.bias) if isinstance(linear, FactorPair) else None
            for linear in linears
        ]
        self._dense = not any(self._second)

    def __call__(self, x: Tensor) -> Tensor:
        inner = self._reduce(self._first(x))
        if self._dense:
            return inner
        if len(self._second) == 1 and (only := self._second[0]) is not None:
            return only(inner)
        slices = torch.split(inner, self._sizes, dim=1)
        parts = [
            part if up is None else up(part) for part, up in zip(slices, self._second, strict=True)
        ]
        return torch.cat(parts, dim=1)


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
