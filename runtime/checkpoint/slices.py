"""The part of a checkpoint that one rank of a worker holds.

Slices are views of the tensors of the whole checkpoint. Of memory-mapped tensors, a rank holds no
more than its slices in memory. The operating system reads whole pages: all of a matrix, if the rank
has some of its columns. They are in the page cache, which the ranks of a host share. Layers on
demand are sliced one after another, and one whole layer is in memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from runtime.checkpoint.family import LayerLayout, LinearTensor, family_of
from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    FactorPair,
    LayersOnDemand,
    Linear,
    layer_shapes,
    linears_of,
    mapped,
)
from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.parallel.partition import EvenRows, LowRankRows, Partition, Scheme, even_part


def rank_checkpoint(checkpoint: Checkpoint, partition: Partition) -> Checkpoint:
    """Return the rank's part of a whole checkpoint.

    Raises:
        CheckpointError: the model family does not say how ranks divide its linears.
    """
    require_divisible(checkpoint.config)
    rows = partition.token_rows
    embedding = checkpoint.embedding[rows]
    tied = checkpoint.lm_head is checkpoint.embedding
    return replace(
        with_rank_layers(checkpoint, partition),
        embedding=embedding,
        lm_head=embedding if tied else checkpoint.lm_head[rows],
    )


def norm_after_v(entry: LinearTensor, linears: Iterable[Linear]) -> str:
    """Return the field of the norm that ranks with `Scheme.EVEN` apply after V; empty for none.

    They do so if all linears that read the same normed residual stream are factor pairs.

    Args:
        entry: one of these linears.
        linears: all of them, of the whole model or of a rank.
    """
    pairs = all(isinstance(linear, FactorPair) for linear in linears)
    return entry.rms_norm if pairs else ""


def _has_pairs(layers: Sequence[Any]) -> bool:
    return any(
        isinstance(linear, FactorPair) for layer in layers for _, linear in linears_of(layer)
    )


def require_divisible(config: ModelConfig) -> None:
    """Check that ranks can divide models of this shape.

    Raises:
        CheckpointError: the model family does not say how ranks divide its linears.
    """
    family = family_of(config.architecture)
    if any(linear.divided is None for linear in family.layout(config).linears.values()):
        raise CheckpointError(f"models of the {family.name} family cannot be divided among ranks")


def with_rank_layers(checkpoint: Checkpoint, partition: Partition) -> Checkpoint:
    """Return a checkpoint with the rank's part of the layers.

    The embedding and LM head of the checkpoint must already be limited to the rank's rows, and
    `require_divisible` must have accepted its shape. Slices of layers on demand are copies, so that
    the whole layers do not stay in memory.
    """
    config = checkpoint.config
    layout = family_of(config.architecture).layout(config)
    whole = checkpoint.layers
    if partition.scheme is Scheme.EVEN and not _has_pairs(layer_shapes(checkpoint)):
        partition = replace(partition, scheme=Scheme.LOW_RANK)
    layers: Sequence[Any]
    slicer = partial(_Slicer, partition, layout, config.head_dim)
    if isinstance(whole, LayersOnDemand):
        layers = LayersOnDemand(
            lambda index: mapped(slicer().layer(whole.read(index)), Tensor.clone),
            tuple(map(slicer().layer, whole.shapes)),
        )
    else:
        layers = tuple(map(slicer().layer, whole))
    return replace(
        checkpoint, config=partition.config_of(config), layers=layers, partition=partition
    )


@dataclass(frozen=True)
class _Slicer:
    """Slices layers, all of whose tensors must stay in memory as long as the slicer is used.

    Attributes:
        shared: cached slices of V, by the id of the tensor, the rows and the columns. Layers that
            share a basis thus share its slice.
    """

    partition: Partition
    layout: LayerLayout
    head_dim: int
    shared: dict[tuple[int, range, range], Tensor] = field(default_factory=dict)

    def layer(self, weights: Any) -> Any:
        own = self._summed if self.partition.scheme is Scheme.BASE else self._divided
        return replace(weights, **own(dict(linears_of(weights))))

    def _summed(self, linears: Mapping[str, Linear]) -> dict[str, Linear]:
        return {name: self._inner_part(linear) for name, linear in linears.items()}

    def _inner_part(self, linear: Linear) -> Linear:
        bias = linear.bias if self.partition.rank == 0 else None
        width = linear.rank if isinstance(linear, FactorPair) else linear.weight.shape[1]
        part = even_part(width, self.partition.rank, self.partition.size)
        if isinstance(linear, Dense):
            return Dense(_columns(linear.weight, part), bias)
        return FactorPair(_columns(linear.u, part), self._v(linear.v, rows=part), bias)

    def _divided(self, linears: Mapping[str, Linear]) -> dict[str, Linear]:
        parts: dict[str, Linear] = {}
        even = self.partition.scheme is Scheme.EVEN
        for names in self.layout.groups():
            group = {name: linears[name] for name in names}
            entry = self.layout.linears[names[0]]
            if even and norm_after_v(entry, group.values()):
                parts |= {name: self._residual_part(name, pair) for name, pair in group.items()}
            elif entry.writes_residual:
                parts |= {name: self._input_part(name, linear) for name, linear in group.items()}
            else:
                parts |= self._output_parts(group)
        return parts

    def _residual_part(self, name: str, pair: Linear) -> Linear:
        """Return a pair with the columns of V that read the rank's part of the residual stream."""
        assert isinstance(pair, FactorPair)
        own, rows = self._even(pair.v.shape[1]), self._own(name)
        bias = None if pair.bias is None else pair.bias[rows.start : rows.stop]
        return FactorPair(_rows(pair.u, rows), self._v(pair.v, columns=own), bias)

    def _even(self, count: int) -> range:
        return EvenRows.of(count, self.partition.rank, self.partition.size).rows

    def _input_part(self, name: str, linear: Linear) -> Linear:
        columns = self._own(name)
        if isinstance(linear, FactorPair):
            pair = replace(linear, v=self._v(linear.v, columns=columns))
            return self._even_rows(pair) if self.partition.scheme is Scheme.EVEN else pair
        # The biases of dense linears are added before the sum over ranks.
        bias = linear.bias if self.partition.rank == 0 else None
        return Dense(_columns(linear.weight, columns), bias)

    def _even_rows(self, pair: FactorPair) -> FactorPair:
        """Return a pair with the rank's rows of U and of the bias."""
        own = self._even(len(pair.u))
        bias = None if pair.bias is None else pair.bias[own.start : own.stop]
        return FactorPair(_rows(pair.u, own), pair.v, bias)

    def _output_parts(self, group: Mapping[str, Linear]) -> dict[str, Linear]:
        pairs = {name: pair for name, pair in group.items() if isinstance(pair, FactorPair)}
        ranks = [pair.rank for pair in pairs.values()]
        low = LowRankRows.of(ranks, self.partition.rank, self.partition.size)
        low_rows = dict(zip(pairs, low.rows, strict=True))
        parts: dict[str, Linear] = {}
        for name, linear in group.items():
            rows = self._own(name)
            bias = None if linear.bias is None else linear.bias[rows.start : rows.stop]
            if isinstance(linear, FactorPair):
                v = self._v(linear.v, rows=low_rows[name])
                parts[name] = FactorPair(_rows(linear.u, rows), v, bias)
            else:
                parts[name] = Dense(_rows(linear.weight, rows), bias)
        return parts

    def _own(self, name: str) -> range:
        divided = self.layout.linears[name].divided
        assert divided is not None  # `require_divisible` has checked it
        return self.partition.rows(divided, self.head_dim)

    def _v(self, v: Tensor, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Return the given rows or columns of a V, None for all. Equal slices are one tensor."""
        rows = range(len(v)) if rows is None else rows
        columns = range(v.shape[1]) if columns is None else columns
        return self.shared.setdefault((id(v), rows, columns), _columns(_rows(v, rows), columns))


def _rows(matrix: Tensor, rows: range) -> Tensor:
    return matrix[rows.start : rows.stop]


def _columns(matrix: Tensor, columns: range) -> Tensor:
    return matrix[:, columns.start : columns.stop]
