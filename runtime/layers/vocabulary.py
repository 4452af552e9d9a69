"""The vocabulary of a worker whose ranks divide the rows of the embedding and of the LM head.

In shapes, ``own`` is the number of token ids of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import Partition

Embedding = Callable[[Tensor], Tensor]
"""Function from token ids, int64 `[n]`, to their rows of the embedding, `[n, hidden]`."""


@dataclass(frozen=True)
class Vocabulary:
    """Division of token ids among the ranks of a worker, each of which has the logits of its own.

    Attributes:
        parts: consecutive token ids of each rank.
        group: the ranks of the worker.
    """

    parts: tuple[range, ...]
    group: RankGroup = ONE_RANK

    @classmethod
    def of(cls, size: int, partition: Partition | None = None, group: RankGroup = ONE_RANK) -> Self:
        """Return a vocabulary of ``size`` ids. Without a partition, one rank has all of them."""
        return cls((range(size),) if partition is None else partition.vocabulary, group)

    @property
    def size(self) -> int:
        """Number of token ids of all ranks."""
        return self.parts[-1].stop

    @property
    def own(self) -> range:
        """Token ids of this rank."""
        return self.parts[self.group.rank]

    @property
    def widest(self) -> int:
        """Maximum number of token ids of a rank."""
        return max(map(len, self.parts))

    @property
    def divided(self) -> bool:
        """Whether there are several ranks."""
        return len(self.parts) > 1

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each id within `own`, and whether the id is one of them.

        The index of another rank's id is 0. Both results have the shape of ``ids``.
        """
        own = self.own
        is_own = (ids >= own.start) & (ids < own.stop)
        return (ids - own.start).where(is_own, 0), is_own

    def embedding(self, embed: Embedding) -> Embedding:
        """Return an embedding of all ids, given that of this rank's ids. All ranks must call it."""
        if not self.divided:
            return embed

        def look_up(ids: Tensor) -> Tensor:
            places, is_own = self.places(ids)
            return self.group.all_reduce(embed(places).where(is_own[:, None], 0))

        return look_up

    def whole(self, logits: Tensor) -> Tensor:
        """Gather the logits of all ids, `[m, size]`, from those of each rank, `[m, own]`.

        All ranks must call it.
        """
        if not self.divided:
            return logits
        width = self.widest
        part = functional.pad(logits, (0, width - len(self.own)))
        parts = torch.split(self.group.all_gather(part.contiguous()), width, dim=1)
        sizes = map(len, self.parts)
        return torch.cat([each[:, :size] for each, size in zip(parts, sizes, strict=True)], dim=1)
