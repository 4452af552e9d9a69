"""Decoder layers whose projections `runtime.gemm` computes over packed weights."""

from torch import Tensor

from runtime.attention.gpu import TritonAttention
from runtime.gemm.epilogues import Epilogue
from runtime.gemm.plan import KernelPlan
from runtime.gemm.projections import FactoredAttention, NormedAppend, PackedProjection
from runtime.gemm.weights import PROJECTION_GROUPS, PackedLayer, PackedWeights
from runtime.layers.gpu import TritonRmsNorm
from runtime.models.llama import LlamaParts

_EPILOGUES = (Epilogue.PLAIN, Epilogue.RESIDUAL, Epilogue.GATED, Epilogue.RESIDUAL)
"""The epilogue of each of `PROJECTION_GROUPS`."""


def packed_norm(weights: PackedWeights, offset: int) -> TritonRmsNorm:
    """RMSNorm of the residual stream with the weights at ``offset`` of the packed vectors."""
    values: Tensor = weights.vectors[offset : offset + weights.config.hidden_size]
    return TritonRmsNorm(values, weights.config.rms_norm_eps)


def packed_parts(
    weights: PackedWeights, layer: PackedLayer, plan: KernelPlan, attention: TritonAttention
) -> LlamaParts:
    """Build the parts of one layer over packed weights.

    Args:
        attention: attention over KV format `dense`, with heads in the order of `by_halves`.
    """
    qkv, o, gated, down = (
        PackedProjection(weights, layer, names, epilogue, plan)
        for names, epilogue in zip(PROJECTION_GROUPS, _EPILOGUES, strict=True)
    )
    dim = weights.config.head_dim
    head_norms = layer.q_norm >= 0
    factored = plan.forced and layer.outer["q"].inner_column == 0 and not dim & (dim - 1)
    return LlamaParts(
        input_norm=packed_norm(weights, layer.input_norm),
        post_norm=packed_norm(weights, layer.post_norm),
        qkv=qkv,
        o=o,
        gated=gated,
        down=down,
        append=NormedAppend(weights, layer, attention) if head_norms else None,
        prefill=FactoredAttention(weights, layer, attention, plan)
        if factored and not head_norms
        else None,
    )
