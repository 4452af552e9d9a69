"""Embedding and LM head of a worker whose ranks divide the rows of the vocabulary."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runtime.layers.linear import LinearOp
from runtime.parallel.group import RankGroup
from runtime.parallel.partition import Partition

Embedding = Callable[[Tensor], Tensor]
"""Function from token ids, int64 `[n]`, to their rows of the embedding, `[n, hidden]`."""


def over_ranks(
    embed: Embedding, lm_head: LinearOp, partition: Partition | None, group: RankGroup
) -> tuple[Embedding, LinearOp]:
    """Return embedding and LM head of the whole vocabulary, from the rows that this rank holds.

    Args:
        partition: part of the rank; None if it holds all rows.
    """
    if partition is None or partition.size == 1:
        return embed, lm_head
    own = partition.tokens
    widths = [len(tokens) for tokens in partition.vocabulary]
    width = max(widths)

    def look_up(ids: Tensor) -> Tensor:
        is_own = (ids >= own.start) & (ids < own.stop)
        rows = embed((ids - own.start).where(is_own, 0))
        return group.all_reduce(rows.where(is_own[:, None], 0))

    def logits(x: Tensor) -> Tensor:
        part = functional.pad(lm_head(x), (0, width - len(own)))
        gathered = group.all_gather(part.contiguous())
        if min(widths) == width:
            return gathered
        parts = torch.split(gathered, width, dim=1)
        return torch.cat([part[:, :size] for part, size in zip(parts, widths, strict=True)], dim=1)

    return look_up, logits
