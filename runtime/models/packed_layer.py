"""Decoder layers whose projections are computed by `runtime.gemm` over packed weights."""

from runtime.attention.gpu import TritonAttention
from runtime.gemm.epilogues import Kind
from runtime.gemm.ops import Norm
from runtime.gemm.plan import KernelPlan
from runtime.gemm.projections import FactoredAttention, StepProjection
from runtime.gemm.weights import GROUPS, LayerMatrices, StepWeights
from runtime.models.decoder import LayerParts

_KINDS = (Kind.PLAIN, Kind.RESIDUAL, Kind.GATED, Kind.RESIDUAL)
"""The epilogue of each of `GROUPS`."""


def parts_of(
    weights: StepWeights, layer: LayerMatrices, plan: KernelPlan, attention: TritonAttention | None
) -> LayerParts:
    """A layer of a model over a step's weights; without ``attention`` prefill is not fused."""

    def norm(first: int) -> Norm:
        values = weights.vectors[first : first + weights.config.hidden_size]
        return Norm(values, weights.config.rms_norm_eps)

    qkv, o, gated, down = (
        StepProjection(weights, layer, names, kind, plan)
        for names, kind in zip(GROUPS, _KINDS, strict=True)
    )
    dim = weights.config.head_dim
    factored = plan.forced and layer.outer["q"].first == 0 and not dim & (dim - 1)
    return LayerParts(
        input_norm=norm(layer.input_norm),
        post_norm=norm(layer.post_norm),
        qkv=qkv,
        o=o,
        gated=gated,
        down=down,
        factorized=bool(layer.inner),
        prefill=FactoredAttention(weights, layer, attention, plan)
        if attention and factored
        else None,
    )
