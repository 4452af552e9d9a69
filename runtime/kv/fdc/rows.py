"""Placement of latents in compressed pages of `fdc`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_rows(latents: Tensor, ranks: Sequence[int]) -> Tensor:
    """Place the rows of each head one after another, without padding between them.

    Args:
        latents: ``[p, kv_heads, n, width]``; columns beyond a head's rank are dropped.
        ranks: rank of each head, at most ``width``.

    Returns:
        ``[p, kv_heads, n, width]``: the first ``n * rank`` elements of a head are its rows, and the
        others are 0.
    """
    packed = torch.zeros_like(latents).flatten(2)
    for head, rank in enumerate(ranks):
        rows = latents[:, head, :, :rank].flatten(1)
        packed[:, head, : rows.shape[1]] = rows
    return packed.view_as(latents)


def unpack_rows(packed: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return the latents that `pack_rows` placed, with 0 in columns beyond a head's rank."""
    count, _, n, _ = packed.shape
    latents = torch.zeros_like(packed)
    flat = packed.flatten(2)
    for head, rank in enumerate(ranks):
        latents[:, head, :, :rank] = flat[:, head, : n * rank].view(count, n, rank)
    return latents
