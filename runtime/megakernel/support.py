"""Models that the megakernel supports."""

from runtime.gemm.weights import PackedWeights
from runtime.megakernel.kernels import layouts

_MAX_GROUP = layouts.ROWS.value
"""Maximum query heads per KV head: the rows of an attention tile."""


def unsupported(weights: PackedWeights) -> str | None:
    """Return why the megakernel does not support a model, or None if it supports it.

    Only shapes are read. `runtime.gemm.weights.unsupported` rejects models that cannot be packed,
    such as those with factor pairs of rank 0.
    """
    config = weights.config
    if weights.head_norms:
        return "the megakernel does not normalize query and key heads"
    if config.head_dim > layouts.MAX_DIM.value:
        return f"heads of {config.head_dim}: the megakernel's limit is {layouts.MAX_DIM.value}"
    if config.num_heads > _MAX_GROUP * config.num_kv_heads:
        return (
            f"{config.num_heads} query heads for {config.num_kv_heads} KV heads: the megakernel's "
            f"limit is {_MAX_GROUP} for each"
        )
    return None
