"""Decoder layers of the Llama family over the packed weights of `runtime.gemm`."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from runtime.attention.gpu import TritonAttention
from runtime.gemm.epilogues import Epilogue
from runtime.gemm.plan import KernelPlan
from runtime.gemm.projections import FactoredAttention, NormedAppend, PackedProjection
from runtime.gemm.weights import PROJECTION_GROUPS, PackedLayer, PackedWeights, by_halves
from runtime.layers.gpu import triton_rms_norm
from runtime.layers.residual import ResidualPart
from runtime.models.llama import LlamaParts
from runtime.parallel.group import ONE_RANK, RankGroup

_EPILOGUES = (Epilogue.PLAIN, Epilogue.RESIDUAL, Epilogue.GATED, Epilogue.RESIDUAL)
"""Epilogue of each group of `PROJECTION_GROUPS`."""
HeadNorm = Callable[[Tensor], Tensor]


def packed_norm(weights: PackedWeights, offset: int) -> Callable[[Tensor], Tensor]:
    """Return the RMSNorm of the residual stream whose weights are at ``offset`` of the vectors."""
    values: Tensor = weights.vectors[offset : offset + weights.config.hidden_size]
    return partial(triton_rms_norm, weight=values, eps=weights.config.rms_norm_eps)


def packed_parts(
    weights: PackedWeights,
    layer: PackedLayer,
    plan: KernelPlan,
    attention: TritonAttention | None,
    group: RankGroup = ONE_RANK,
    residual: ResidualPart | None = None,
) -> LlamaParts:
    """Build the parts of one layer over packed weights.

    Args:
        attention: attention over KV format `dense`, with heads in the order of `by_halves`; None
            for other formats, whose head norms and prefill attention are not fused.
        group: the ranks of the worker.
        residual: the rank's part of the residual stream; None if each rank has all of it.
    """
    qkv, o, gated, down = (
        PackedProjection(weights, layer, names, epilogue, plan, group, residual)
        for names, epilogue in zip(PROJECTION_GROUPS, _EPILOGUES, strict=True)
    )
    dim = weights.config.head_dim
    fused_norms = attention is not None and layer.q_norm >= 0
    pair = layer.outer["q"].inner_column == 0 and group.size == 1
    factored = plan.forced and pair and not dim & (dim - 1)
    return LlamaParts(
        input_norm=_norm_before("q", layer.input_norm, weights, layer, residual),
        post_norm=_norm_before("gate", layer.post_norm, weights, layer, residual),
        qkv=qkv,
        o=o,
        gated=gated,
        down=down,
        head_norms=None if fused_norms or layer.q_norm < 0 else _head_norms(weights, layer),
        append=NormedAppend(weights, layer, attention) if attention and fused_norms else None,
        prefill=FactoredAttention(weights, layer, attention, plan)
        if attention and factored and layer.q_norm < 0
        else None,
    )


def _norm_before(
    first: str,
    offset: int,
    weights: PackedWeights,
    layer: PackedLayer,
    residual: ResidualPart | None,
) -> Callable[[Tensor], Tensor]:
    """Return what computes the input of the group whose first projection is ``first``."""
    norm = packed_norm(weights, offset)
    if residual is None:
        return norm
    if first in layer.norm_after_v:
        return lambda part: part
    return lambda part: norm(residual.whole(part))


def _head_norms(weights: PackedWeights, layer: PackedLayer) -> tuple[HeadNorm, HeadNorm]:
    """Return the norms of query and key heads, with elements in the order of `by_halves`."""
    config, dim = weights.config, weights.config.head_dim

    def head_norm(offset: int) -> HeadNorm:
        weight = by_halves(weights.vectors[offset : offset + dim], dim)
        eps = config.rms_norm_eps
        return lambda x: triton_rms_norm(x.flatten(0, 1), weight, eps).view_as(x)  # [n, heads, dim]

    return head_norm(layer.q_norm), head_norm(layer.k_norm)
