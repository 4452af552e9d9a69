"""Division of a model among the ranks of a worker.

Ranks divide query heads, features of the MLP and rows of the vocabulary. KV heads are divided as
well; if there are more ranks than KV heads, several ranks hold the same KV head and divide its
query heads. Parts differ in size where a number of ranks does not divide a number of heads:
checkpoints are not padded. Norms and, with `Scheme.LOW_RANK`, the U of factor pairs that write the
residual stream are on every rank. With `Scheme.EVEN`, the ranks divide the residual stream as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, Self

from runtime.config import ModelConfig
from runtime.kernels.alignment import round_up

MAX_RANKS = 64
"""Maximum number of ranks of a worker; also bounds the lists that an untrusted peer sends."""
_UNITS = (64, 8, 1)
"""Numbers of features or vocabulary rows that are not divided, where they divide the whole: GPU
kernels need multiples of 8, and tiles have 64 rows."""


class Scheme(StrEnum):
    """Division of linear layers among ranks.

    Attributes:
        LOW_RANK: dense matrices as in Megatron-LM: rows of those that read the residual stream,
            columns of those that write it, whose outputs are added. Factor pairs as in DeInfer:
            the ranks divide the rows of V and gather its output, and divide the rows of U; or they
            divide the columns of V and add its outputs, and each has the whole U.
        EVEN: the ranks divide the residual stream by hidden dimension, and only norms are on every
            rank. Of factor pairs that read the residual stream, the ranks divide the columns of V;
            they add its outputs and the sums of squares of the RMSNorm in one message, and scale
            the result, because V is linear. Of pairs that write it, they divide the columns of V,
            add its outputs, and divide the rows of U. If a dense matrix, or a norm other than
            RMSNorm, is among those that read the same input, the ranks gather the residual stream
            and then do as LOW_RANK does. They add the whole outputs of dense matrices that write
            it. A model without factor pairs is divided as LOW_RANK does.
        BASE: DeInfer's baseline. The ranks divide the inner dimension of every linear and add its
            whole outputs. Each rank has all heads.
    """

    LOW_RANK = "low-rank"
    EVEN = "even"
    BASE = "base"


Divided = Literal["heads", "kv_heads", "features"]
"""Name of the attribute of `Partition` that says how ranks divide a linear."""


@dataclass(frozen=True)
class Partition:
    """The part of one rank.

    Attributes:
        rank: number of the rank, from 0.
        size: number of ranks of the worker.
        heads, kv_heads: query heads and KV heads.
        features: features of the MLP.
        vocabulary: for each rank, the rows of the embedding and of the LM head that it holds. A
            rank has the logits and the sampling tables of these tokens only.
    """

    rank: int
    size: int
    scheme: Scheme
    heads: range
    kv_heads: range
    features: range
    vocabulary: tuple[range, ...]

    @classmethod
    def of(
        cls, config: ModelConfig, rank: int, size: int, scheme: Scheme = Scheme.LOW_RANK
    ) -> Self:
        """Return the part of a rank of a model.

        Args:
            config: shape of the whole model.

        Raises:
            ValueError: the model has fewer heads, features or vocabulary rows than ranks.
        """
        for name, count in (
            ("query heads", config.num_heads),
            ("features of the MLP", config.intermediate_size),
            ("vocabulary rows", config.vocab_size),
        ):
            if size > count:
                raise ValueError(f"{size} ranks, but the model has only {count} {name}")
        heads, kv_heads = range(config.num_heads), range(config.num_kv_heads)
        features = range(config.intermediate_size)
        if scheme is not Scheme.BASE:
            heads, kv_heads = _heads(config.num_heads, config.num_kv_heads, rank, size)
            features = _part(config.intermediate_size, rank, size)
        vocabulary = tuple(_part(config.vocab_size, each, size) for each in range(size))
        return cls(rank, size, scheme, heads, kv_heads, features, vocabulary)

    @property
    def tokens(self) -> range:
        """Token ids whose rows of the embedding and of the LM head the rank holds."""
        return self.vocabulary[self.rank]

    @property
    def token_rows(self) -> slice:
        """The rows of `tokens`."""
        return slice(self.tokens.start, self.tokens.stop)

    def config_of(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of the rank's part of a model with shape ``config``."""
        return replace(
            config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.features),
            first_kv_head=self.kv_heads.start,
            whole=config,
        )

    def residual_rows(self, hidden_size: int) -> "EvenRows | None":
        """Return the rank's elements of the residual stream; None if it has all of them."""
        if self.scheme is not Scheme.EVEN or self.size == 1:
            return None
        return EvenRows.of(hidden_size, self.rank, self.size)

    def rows(self, divided: Divided, head_dim: int) -> range:
        """Return the rank's rows (or columns) of a matrix with one row for each divided element.

        Args:
            divided: what the ranks divide. A head has ``head_dim`` rows, a feature one.
        """
        part: range = getattr(self, divided)
        width = 1 if divided == "features" else head_dim
        return range(part.start * width, part.stop * width)


@dataclass(frozen=True)
class LowRankRows:
    """Division of the stacked V of factor pairs that read the same input.

    The V are stacked, each padded with zeros by `round_up`, because GPU kernels read inner
    activations in these units. Every rank holds the same number of consecutive rows. The gathered
    outputs of all ranks are therefore the outputs of the stacked V, followed by padding.

    Attributes:
        height: rows of each rank.
        offsets: for each pair, the first row of its V in the stack.
        rows: for each pair, the rows of its V that the rank holds, which may be none.
        places: for each pair, the first of these rows within the rank's part of the stack.
    """

    height: int
    offsets: tuple[int, ...]
    rows: tuple[range, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Sequence[int], rank: int, size: int) -> Self:
        """Return the rows of a rank of the worker.

        Args:
            ranks: number of rows of the V of each pair.
            rank, size: number of the worker's rank, and of its ranks.
        """
        offsets, total = [], 0
        for rows in ranks:
            offsets.append(total)
            total += round_up(rows)
        height = round_up(-(-total // size))
        first, end = rank * height, (rank + 1) * height
        parts, places = [], []
        for rows, offset in zip(ranks, offsets, strict=True):
            start = min(max(first - offset, 0), rows)
            part = range(start, max(min(end - offset, rows), start))
            parts.append(part)
            places.append(max(offset + start - first, 0))
        return cls(height, tuple(offsets), tuple(parts), tuple(places))


@dataclass(frozen=True)
class EvenRows:
    """Division of the elements of the residual stream; the last ranks have fewer, or none.

    A rank pads its elements to ``height`` with zeros, because collectives need parts of the same
    size. The gathered elements of all ranks are therefore the residual stream, followed by padding.

    Attributes:
        height: elements of each rank, with padding.
        rows: elements that the rank holds, and rows of a U that computes them.
    """

    height: int
    rows: range

    @classmethod
    def of(cls, count: int, rank: int, size: int) -> Self:
        """Return the part of a rank of the worker, of ``count`` elements."""
        height = round_up(-(-count // size))
        return cls(height, range(min(rank * height, count), min((rank + 1) * height, count)))


def _heads(heads: int, kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """Return the query heads and the KV heads of a rank."""
    group = heads // kv_heads
    if size <= kv_heads:
        own = even_part(kv_heads, rank, size)
        return range(own.start * group, own.stop * group), own
    head = rank * kv_heads // size
    sharing = [each for each in range(size) if each * kv_heads // size == head]
    queries = even_part(group, rank - sharing[0], len(sharing))
    first = head * group
    return range(first + queries.start, first + queries.stop), range(head, head + 1)


def _part(count: int, rank: int, size: int) -> range:
    """Return a rank's part of ``count`` elements, in the largest possible units."""
    unit = next(unit for unit in _UNITS if count % unit == 0 and count // unit >= size)
    units = even_part(count // unit, rank, size)
    return range(units.start * unit, units.stop * unit)


def even_part(count: int, rank: int, size: int) -> range:
    """Return a rank's part of ``count`` elements; parts differ by at most one element."""
    return range(count * rank // size, count * (rank + 1) // size)
