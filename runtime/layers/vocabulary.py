"""The vocabulary of a worker whose ranks divide the rows of the embedding and of the LM head."""

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
    """The token ids of a model. Each rank of a worker has the logits of its own ids only.

    Attributes:
        parts: consecutive ids of each rank.
        group: the ranks of the worker.
    """

    parts: tuple[range, ...]
    group: RankGroup = ONE_RANK

    @classmethod
    def of(cls, size: int, partition: Partition | None = None, group: RankGroup = ONE_RANK) -> Self:
        """Return a vocabulary of ``size`` ids; without a partition, of one rank."""
        return cls((range(size),) if partition is None else partition.vocabulary, group)

    @property
    def size(self) -> int:
        """Number of all ids."""
        return self.parts[-1].stop

    @property
    def own(self) -> range:
        """Ids of this rank."""
        return self.parts[self.group.rank]

    @property
    def widest(self) -> int:
        """Largest number of ids of a rank."""
        return max(map(len, self.parts))

    @property
    def divided(self) -> bool:
        """Whether there are several ranks."""
        return len(self.parts) > 1

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of ids among `own`, 0 for those of other ranks, and which are own."""
        own = self.own
        is_own = (ids >= own.start) & (ids < own.stop)
        return (ids - own.start).where(is_own, 0), is_own

    def embedding(self, embed: Embedding) -> Embedding:
        """Return the embedding of all ids, from that of this rank's rows."""
        if not self.divided:
            return embed

        def look_up(ids: Tensor) -> Tensor:
            places, is_own = self.places(ids)
            return self.group.all_reduce(embed(places).where(is_own[:, None], 0))

        return look_up

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of all ids, `[m, size]`, from those of each rank, `[m, own]`.

        Every rank must call it.
        """
        if not self.divided:
            return logits
        width = self.widest
        part = functional.pad(logits, (0, width - len(self.own)))
        parts = torch.split(self.group.all_gather(part.contiguous()), width, dim=1)
        sizes = map(len, self.parts)
        return torch.cat([each[:, :size] for each, size in zip(parts, sizes, strict=True)], dim=1)
