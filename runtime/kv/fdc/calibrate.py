"""Bases and ranks of format `fdc` from second moments of q, k and v.

The FDC paper is "FDC: Fast KV Dimensionality Compression for Efficient LLM Inference".
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.kv.calibration import Artifact, KVMoments, RankChoice, truncated_basis

NAME, VERSION = "fdc", 3


@dataclass(frozen=True)
class FdcOptions:
    """Options of the calibration.

    Attributes:
        removal_rate: maximum sum of the dropped singular values, as a fraction of the sum of all;
            the same for K and V of all heads and layers (FDC paper, section 5.2).
        rank: rank of K and V of all heads; replaces ``removal_rate``. It is rounded up to a
            multiple of 16.
        adaptive: whether each head has its own rank. Otherwise a layer has one rank for K and one
            for V, from the sums of its heads' singular values.
        share_r: whether the basis of K is computed from queries, too. Otherwise it is the best
            basis of K alone (ablation).
        prc: whether K is projected after RoPE. Otherwise K is projected before RoPE to the best
            basis of K, and attention restores it (ablation "FDC/PRC" of the paper, section 6.6).
        compressed_prefill: whether prompts attend with projected queries and keys, too, but with
            values that are not projected. It needs ``prc``.
    """

    removal_rate: float = 0.2
    rank: int | None = None
    adaptive: bool = True
    share_r: bool = True
    prc: bool = True
    compressed_prefill: bool = False

    def __post_init__(self) -> None:
        if self.compressed_prefill and not self.prc:
            raise KVFormatError("prompts attend with keys that are projected after RoPE: set prc")


def calibrate(layers: Iterable[KVMoments], options: FdcOptions, model_hash: str) -> Artifact:
    """Compute bases and ranks.

    Args:
        layers: moments of each layer, in order.
        model_hash: hash of the model that the moments were measured on.

    Returns:
        Artifact with the tensors ``k_basis.<layer>`` and ``v_basis.<layer>``, fp32 ``[kv_heads,
        dim, width]``, and ``k_ranks`` and ``v_ranks``, int64 ``[layers, kv_heads]``. The width is
        the largest rank of the layer; columns beyond a head's rank are 0.

    Raises:
        KVFormatError: an option is out of range.
    """
    choice = RankChoice(options.removal_rate, options.rank, options.adaptive)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, list[list[int]]] = {"k_ranks": [], "v_ranks": []}
    for index, moments in enumerate(layers):
        for plane, second in (("k", _of_keys(moments, options)), ("v", moments.values)):
            basis, kept = truncated_basis(second, choice)
            tensors[f"{plane}_basis.{index}"] = basis
            ranks[f"{plane}_ranks"].append(kept)
    tensors |= {name: torch.tensor(rows) for name, rows in ranks.items()}
    return Artifact(NAME, VERSION, model_hash, asdict(options), tensors)


def _of_keys(moments: KVMoments, options: FdcOptions) -> Tensor:
    """Return the second moments that determine the basis of K, fp64 ``[kv_heads, dim, dim]``."""
    if options.prc:
        return moments.keys + moments.queries if options.share_r else moments.keys
    kv_heads, dim, _ = moments.keys.shape
    blocks = moments.unrotated_keys.view(kv_heads, dim, kv_heads, dim)
    return torch.stack([blocks[head, :, head] for head in range(kv_heads)])
