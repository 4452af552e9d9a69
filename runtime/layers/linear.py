"""Linear layers with weights that are packed once, and projections that share an input.

On the CPU in fp32, compiled loops define the order of each sum. A row's result therefore does not
depend on the number of other rows, and a token's KV and logits are bitwise identical in any batch.
oneDNN multiplies many rows by weights for which its results are bitwise identical to those of the
loops, and is up to a third faster. For other weights, whose sums it orders by the number of rows on
some processors, it is not used.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Dense, FactorPair, Latents, Linear
from runtime.layers.onednn import ExpandedWeight, PackedWeight
from runtime.layers.residual import ResidualPart
from runtime.layers.stored_weight import StoredWeight
from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import LowRankRows

LinearOp = Callable[[Tensor], Tensor]
"""``x W^T + b`` for one weight: `[n, in]` to `[n, out]`."""


class PackedLinear:
    """Linear layer in fp32 on the CPU. A row's result does not depend on other rows.

    A weight with a smaller lossless form (`StoredWeight.compact`) is kept in this form only, and
    expanded when more than a few rows are computed. Any other is kept as fp32.

    Attributes:
        stored: the weight in a form that compiled loops read.
        onednn: the weight for oneDNN, which multiplies more than `stored.max_rows` rows; None if
            its results could be others.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self.onednn, self.stored = _stored_once(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self.onednn is None or len(x) <= self.stored.max_rows:
            y = self.stored.multiply(x)
        else:
            parts = [
                self.onednn.multiply(_with_more_rows(part))[: len(part)]
                for part in torch.split(x, self.onednn.max_rows)
            ]
            y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y if self._bias is None else y.add_(self._bias)


def _with_more_rows(x: Tensor) -> Tensor:
    """Return ``x`` with at most an eighth more rows, which are zeros, and at least two rows.

    oneDNN compiles a kernel of 0.6 MB for each number of rows and shape of weights, and keeps up to
    1,024 of them. Up to 512 rows, there are 48 numbers of rows.
    """
    step = max(1 << max(len(x).bit_length() - 4, 0), 2)
    more = -len(x) % step
    return functional.pad(x, (0, 0, 0, more)) if more else x


def _stored_once(weight: Tensor) -> tuple[ExpandedWeight | PackedWeight | None, StoredWeight]:
    """Return a weight for oneDNN, if it can be used, and for compiled loops. They share memory."""
    if compact := StoredWeight.compact(weight):
        return ExpandedWeight.of(compact, weight), compact
    if packed := PackedWeight.of(weight):
        return packed, StoredWeight(packed.blocks, weight.shape)
    return None, StoredWeight.of(weight)


def uses_packed_layout(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether linear layers of this device and dtype are `PackedLinear`."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def linear_op(weight: Tensor, bias: Tensor | None = None) -> LinearOp:
    """Return the fastest available linear layer for a weight ``[out, in]`` and a bias ``[out]``."""
    if uses_packed_layout(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return partial(functional.linear, weight=weight, bias=bias)


SharedOps = dict[tuple[int, ...], LinearOp]
"""Linear layers, keyed by the ``id()`` of the tensors they stack, which must be kept alive."""


class NormAfterV:
    """RMSNorm of the residual stream that the ranks divide, applied to the outputs of V.

    Args:
        weight: weight of the norm, ``[hidden]``.

    Attributes:
        part: the rank's part of the residual stream.
    """

    def __init__(self, weight: Tensor, eps: float, part: ResidualPart) -> None:
        self._weight = part.own(weight)
        self._eps = eps
        self.part = part

    def __call__(self, first: LinearOp, x: Tensor) -> Tensor:
        """Return the output of the whole stacked V for the normed residual stream.

        Args:
            first: multiplication with the rank's columns of the stacked V.
            x: the rank's part of the residual stream, ``[n, height]``.
        """
        part = self.part
        return part.group.sum_normed(first(x * self._weight), x, part.size, self._eps)


class Projection:
    """Several linear layers over one input, in few matmuls: ``[n, in]`` to ``[n, sum(out)]``.

    The first matmul multiplies the input by the stacked V of factor pairs and W of dense layers.
    The U of each factor pair then multiplies its slice of the result. The factor pairs may have
    different ranks. Of `Latents`, the slice is the output.

    The ranks of a worker hold parts of the weights, see `runtime.checkpoint.slices`, and exchange
    the output of the first matmul: of linears that write the residual stream, each computes an
    addend; of other factor pairs, each computes some rows of the stacked V. If the ranks divide the
    residual stream, the output is the rank's part ``[n, height]`` of it, or the input is.

    Args:
        shared: first matmuls of earlier projections. One with the same weights is reused; a new one
            is added.
        group: the ranks of the worker.
        writes_residual: see `runtime.checkpoint.family.LinearTensor`.
        residual: the rank's part of the residual stream, if the linears write it and the ranks
            divide it.
        norm: norm of the residual stream, if the ranks divide it and the linears read it. The input
            is then the rank's part before the norm. All linears are factor pairs.
    """

    def __init__(
        self,
        linears: Sequence[Linear],
        shared: SharedOps | None = None,
        group: RankGroup = ONE_RANK,
        *,
        writes_residual: bool = False,
        residual: ResidualPart | None = None,
        norm: "NormAfterV | None" = None,
    ) -> None:
        pairs = [linear for linear in linears if isinstance(linear, FactorPair)]
        dense = [linear for linear in linears if isinstance(linear, Dense)]
        self._group = group
        self._adds = writes_residual
        self._residual = residual
        self._norm = norm
        self._low: LowRankRows | None = None
        if pairs and group.size > 1 and not writes_residual and norm is None:
            self._low = LowRankRows.of([pair.rank for pair in pairs], group.rank, group.size)
        shared = {} if shared is None else shared
        self._first = _first_matmul(pairs, dense, self._low, shared, norm.part if norm else None)
        ranks = [pair.rank for pair in pairs]
        pair_starts = iter(accumulate(ranks, initial=0) if self._low is None else self._low.offsets)
        width = sum(ranks) if self._low is None else self._low.height * group.size
        dense_starts = accumulate((len(each.weight) for each in dense), initial=width)
        # First column in the exchanged output, number of columns, and U, of each linear.
        self._parts: list[tuple[int, int, LinearOp | None]] = []
        for linear in linears:
            if isinstance(linear, FactorPair):
                up = None if isinstance(linear, Latents) else _up(linear, residual)
                self._parts.append((next(pair_starts), linear.rank, up))
            else:
                self._parts.append((next(dense_starts), len(linear.weight), None))
        self._is_dense = not pairs

    def __call__(self, x: Tensor) -> Tensor:
        inner = self._norm(self._first, x) if self._norm else self._exchange(self._first(x))
        if self._is_dense:
            return inner if self._residual is None else self._residual.own(inner)
        slices = ((inner[:, start : start + size], up) for start, size, up in self._parts)
        parts = [part if up is None else up(part) for part, up in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _exchange(self, inner: Tensor) -> Tensor:
        """Return the output of the first matmul, of the whole weights where ranks divide them."""
        if self._adds:
            return self._group.all_reduce(inner)
        if self._low is None:
            return inner
        low = self._group.all_gather(inner[:, : self._low.height].contiguous())
        return torch.cat([low, inner[:, self._low.height :]], dim=1)


def _first_matmul(
    pairs: Sequence[FactorPair],
    dense: Sequence[Dense],
    low: LowRankRows | None,
    shared: SharedOps,
    part: ResidualPart | None,
) -> LinearOp:
    """Return the matmul with the stacked V of ``pairs`` and W of ``dense``.

    Args:
        low: rows of the rank, if the ranks of a worker divide those of the V.
        part: columns of the rank, if the ranks of a worker divide those of the V.
    """
    inner = [pair.v for pair in pairs] + [linear.weight for linear in dense]
    biases = [None] * len(pairs) + [linear.bias for linear in dense]
    key = tuple(id(part) for part in (*inner, *biases) if part is not None)
    if key not in shared:
        sizes = [len(weight) for weight in inner]
        if low is not None:
            inner = [_placed(inner[: len(pairs)], low), *inner[len(pairs) :]]
            sizes, biases = [low.height, *sizes[len(pairs) :]], [None, *biases[len(pairs) :]]
        stack = torch.cat(inner)
        stack = stack if part is None else part.padded(stack)
        shared[key] = linear_op(stack, _stack(biases, sizes))
    return shared[key]


def _up(pair: FactorPair, residual: ResidualPart | None) -> LinearOp:
    """Return the multiplication with a U, whose rows the ranks may divide."""
    if residual is None:
        return linear_op(pair.u, pair.bias)
    bias = None if pair.bias is None else residual.padded(pair.bias)
    return linear_op(residual.padded(pair.u.t()).t().contiguous(), bias)


def _placed(rows: Sequence[Tensor], low: LowRankRows) -> Tensor:
    """Return a rank's part of the stacked V, in which the rows that it holds have their places."""
    stack = rows[0].new_zeros(low.height, rows[0].shape[1])
    for part, place in zip(rows, low.places, strict=True):
        stack[place : place + len(part)] = part
    return stack


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
