"""Bases of `palu` from second moments of k before RoPE and v."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.kv.calibration import Artifact, KVMoments, RankChoice, truncated_basis
from runtime.kv.calibration.bases import RANK_MULTIPLE

NAME, VERSION = "palu", 1


@dataclass(frozen=True)
class PaluOptions:
    """Options of the calibration.

    Attributes:
        removal_rate: bound on the sum of dropped singular values, as a fraction of all; the same
            for K and V of all layers. A layer has one rank for K and one for V.
        rank: rank per head of K and V; replaces ``removal_rate``. A group of g heads has K latents
            of g times this rank. The rank is rounded up to a multiple of 16.
        group_heads: maximum number of KV heads with common K latents. Groups have the largest size
            up to this that divides the number of KV heads.
    """

    removal_rate: float = 0.2
    rank: int | None = None
    group_heads: int = 4


def calibrate(layers: Iterable[KVMoments], options: PaluOptions, model_hash: str) -> Artifact:
    """Compute bases.

    Args:
        layers: moments of each layer, in order.
        model_hash: hash of the model that the moments were measured on.

    Returns:
        Artifact with the tensors ``k_basis.<layer>``, fp32 ``[groups, g * dim, g * k_width]`` for
        groups of g heads, and ``v_basis.<layer>``, fp32 ``[kv_heads, dim, v_width]``.

    Raises:
        KVFormatError: an option is out of range.
    """
    if options.group_heads < 1:
        raise KVFormatError(f"groups of {options.group_heads} heads are not possible")
    tensors: dict[str, Tensor] = {}
    for index, moments in enumerate(layers):
        kv_heads, dim, _ = moments.values.shape
        size = max(g for g in range(1, options.group_heads + 1) if kv_heads % g == 0)
        count, width = kv_heads // size, size * dim
        blocks = moments.unrotated_keys.view(count, width, count, width)
        groups = torch.stack([blocks[i, :, i] for i in range(count)])
        of_group = None if options.rank is None else options.rank * size
        for name, second, rank, multiple in (
            ("k", groups, of_group, size * RANK_MULTIPLE),
            ("v", moments.values, options.rank, RANK_MULTIPLE),
        ):
            choice = RankChoice(options.removal_rate, rank)
            tensors[f"{name}_basis.{index}"], _ = truncated_basis(second, choice, multiple)
    return Artifact(NAME, VERSION, model_hash, asdict(options), tensors)
