"""Which packed models the megakernel supports."""

from runtime.gemm.weights import PackedWeights
from runtime.megakernel.kernels import layouts

_MAX_GROUP = layouts.ROWS.value
"""Query heads of a KV head: the rows of an attention tile."""


def unsupported(weights: PackedWeights) -> str | None:
    """Return why a decode step of a model cannot be one launch, None if it can.

    Reads shapes only. Models that cannot be packed, such as those with factor pairs of rank 0, are
    rejected by `runtime.gemm.weights.unsupported`.
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
