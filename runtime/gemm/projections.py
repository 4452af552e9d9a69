"""Projections, KV append and prefill attention over packed weights, for any number of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.attention.gpu import HeadNorms, TritonAttention
from runtime.gemm.epilogues import Epilogue
from runtime.gemm.ops import GroupedGemm
from runtime.gemm.plan import KernelPlan
from runtime.gemm.weights import (
    PROJECTION_GROUPS,
    PackedLayer,
    PackedMatrix,
    PackedWeights,
    by_halves,
)
from runtime.layers.residual import ResidualPart
from runtime.parallel.group import ONE_RANK, RankGroup


class PackedProjection:
    """The projections of one group: `[n, in]` to the output of a `GroupedGemm`.

    The elements of each q, k and v head are in the order of `by_halves`. The output of `Latents` is
    part of the output of V.

    Args:
        names: the projections, one entry of `PROJECTION_GROUPS`.
        group: the ranks of the worker, which exchange the output of V as those of
            `runtime.layers.linear.Projection` do. With RESIDUAL, they add the whole output of a
            dense matrix, and the residual stream is added after that.
        residual: the rank's part of the residual stream; None if each rank has all of it.
    """

    def __init__(
        self,
        weights: PackedWeights,
        layer: PackedLayer,
        names: Sequence[str],
        epilogue: Epilogue,
        plan: KernelPlan,
        group: RankGroup = ONE_RANK,
        residual: ResidualPart | None = None,
    ) -> None:
        base = weights.lm_head.weight
        inner = layer.inner.get(names[0])
        self._norm_after_v = names[0] in layer.norm_after_v
        self._size_and_eps = weights.config.hidden_size, weights.config.rms_norm_eps
        self._latents = [layer.latents[name] for name in names if name in layer.latents]
        names = [name for name in names if name in layer.outer]
        outer = [layer.outer[name] for name in names]
        biases = _biases(weights, layer, names)
        whole = layer.stacked.get(names[0])
        if whole is not None and epilogue is Epilogue.PLAIN:
            outer = [PackedMatrix(whole)]
        self._group = group
        self._adds = epilogue is Epilogue.RESIDUAL
        self._adds_output = self._adds and inner is None and group.size > 1
        self._residual = residual
        # Collectives need contiguous tensors.
        padded = group.size == 1
        self._inner = None if inner is None else GroupedGemm(base, [inner], plan, pad_output=padded)
        if self._adds_output:
            epilogue = Epilogue.PLAIN
        self._outer = GroupedGemm(base, outer, plan, epilogue, biases, whole)

    @property
    def gemms(self) -> list[GroupedGemm]:
        """The GEMMs in the order in which they run."""
        return [self._outer] if self._inner is None else [self._inner, self._outer]

    def __call__(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Project ``x`` `[n, in]`; with RESIDUAL, add the output to ``hidden`` in place."""
        if self._adds_output and hidden is not None:
            addend = self._outer(x, x)
            if self._residual is None:
                return self._group.add_sum(hidden, addend)
            return hidden.add_(self._residual.own(self._group.all_reduce(addend)))
        inner = x if self._inner is None else self._exchange(self._inner(x, x), x)
        y = self._outer(x, inner, hidden)
        if not self._latents:
            return y
        return torch.cat([y, *(inner[:, part.start : part.stop] for part in self._latents)], dim=1)

    def _exchange(self, inner: Tensor, x: Tensor) -> Tensor:
        """Return the output of the whole V.

        Args:
            inner: output of the rank's part of V for its input ``x``.
        """
        if self._norm_after_v:
            return self._group.sum_normed(inner, x, *self._size_and_eps)
        return self._group.all_reduce(inner) if self._adds else self._group.all_gather(inner)


class FactoredAttention:
    """Prefill attention that computes queries from their factors inside the attention kernel.

    Queries are never written to memory. It requires a factor pair for q, and no head norms.
    """

    def __init__(
        self,
        weights: PackedWeights,
        layer: PackedLayer,
        attention: TritonAttention,
        plan: KernelPlan,
    ) -> None:
        names, base = PROJECTION_GROUPS[0], weights.lm_head.weight
        biases = _biases(weights, layer, names)
        self._attention = attention
        self._query = layer.outer["q"]
        self._inner = GroupedGemm(base, [layer.inner["q"]], plan, pad_output=True)
        rows = len(self._query.weight)
        self._biases = None if biases is None else biases[:rows]
        kv_biases = None if biases is None else biases[rows:]
        self._kv = GroupedGemm(base, [layer.outer[n] for n in names[1:]], plan, biases=kv_biases)

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        """Write K and V of the batch into ``planes`` and return its attention.

        Args:
            x: bf16 `[n, in]`, the input of the q, k and v projections.
            rope: cosines and sines, fp32 `[context, dim / 2]` each.
            planes: K and V of the layer, bf16 `[page, kv_head, slot, dim]` each.

        Returns:
            bf16 `[n, heads * dim]`.
        """
        k_pages, v_pages = planes
        inner = self._inner(x, x)  # [n, sum of padded ranks]
        self._attention.write_kv(self._kv(x, inner), rope, k_pages, v_pages, batch)
        return self._attention.attend_factored(
            inner, self._query.weight, self._biases, rope, k_pages, v_pages, batch
        )


class NormedAppend:
    """KV append of a layer with head norms: RMSNorm, RoPE and page write in one launch.

    Replaces `KVFormat.append` for KV format `dense`.
    """

    def __init__(
        self, weights: PackedWeights, layer: PackedLayer, attention: TritonAttention
    ) -> None:
        dim = weights.config.head_dim
        q, k = (weights.vectors[at : at + dim] for at in (layer.q_norm, layer.k_norm))
        self._attention = attention
        self._norms = HeadNorms(q, k, weights.config.rms_norm_eps)

    def __call__(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        """Write k and v of ``qkv`` into ``planes`` and return q.

        Args:
            qkv: `[n, (heads + 2 kv_heads) * dim]`, in the order of `by_halves`.
            rope: cosines and sines, fp32 `[context, dim / 2]` each.
            planes: K and V of the layer, bf16 `[page, kv_head, slot, dim]` each.

        Returns:
            `[n, heads, dim]`.
        """
        k_pages, v_pages = planes
        return self._attention.write(qkv, rope, k_pages, v_pages, batch, self._norms)


def _biases(weights: PackedWeights, layer: PackedLayer, names: Sequence[str]) -> Tensor | None:
    """Return the concatenated biases of a group: fp32 `[sum of rows]`, 0 where there is none.

    Return None if no projection has a bias.
    """
    outer = [layer.outer[name] for name in names]
    if all(matrix.bias < 0 for matrix in outer):
        return None
    found = []
    for name, matrix in zip(names, outer, strict=True):
        rows = len(matrix.weight)
        bias = weights.vectors.new_zeros(rows)
        if matrix.bias >= 0:
            bias = weights.vectors[matrix.bias : matrix.bias + rows]
        is_head = name in PROJECTION_GROUPS[0]
        found.append(by_halves(bias, weights.config.head_dim) if is_head else bias)
    return torch.cat(found)
