"""Bases that several layers share: one V in memory and in the file, under each layer's name.

A group is the names of projections (``model.layers.0.self_attn.q_proj``) that have the same V.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from runtime.checkpoint.assemble import PROJECTIONS, TensorSource, layer_prefix
from runtime.checkpoint.weights import Checkpoint, FactorPair
from runtime.errors import CheckpointError

Groups = tuple[tuple[str, ...], ...]


def basis_groups(checkpoint: Checkpoint) -> Groups:
    """The projections whose V are one tensor, in the order of layers."""
    owners: dict[int, list[str]] = {}
    for name, pair in _pairs(checkpoint):
        owners.setdefault(id(pair.v), []).append(name)
    return tuple(tuple(names) for names in owners.values() if len(names) > 1)


def with_shared_bases(checkpoint: Checkpoint, groups: Iterable[Sequence[str]]) -> Checkpoint:
    """The same checkpoint, each group's V once. Raises `CheckpointError` if they differ."""
    pairs, first_of = dict(_pairs(checkpoint)), {}
    for first, *others in groups:
        for name in others:
            if first not in pairs or name not in pairs or not pairs[name].v.equal(pairs[first].v):
                raise CheckpointError(f"{name} and {first} do not have the same basis")
            first_of[name] = pairs[first].v
    layers = []
    for index, layer in enumerate(checkpoint.layers):
        changed = {}
        for projection, name in PROJECTIONS.items():
            linear, basis = getattr(layer, projection), first_of.get(layer_prefix(index) + name)
            if basis is not None:
                changed[projection] = replace(linear, v=basis)
        layers.append(replace(layer, **changed))
    return replace(checkpoint, layers=tuple(layers))


@dataclass(frozen=True)
class Aliased:
    """A source that has some tensors under several names, of which it stores one."""

    source: TensorSource
    stored: Mapping[str, str]

    @classmethod
    def of(cls, source: TensorSource, groups: Iterable[Sequence[str]]) -> "Aliased":
        pairs = ((name, first) for first, *others in groups for name in others)
        return cls(source, {f"{name}.v.weight": f"{first}.v.weight" for name, first in pairs})

    def names(self) -> frozenset[str]:
        return self.source.names() | self.stored.keys()

    def read(self, name: str) -> Tensor:
        return self.source.read(self.stored.get(name, name))


def _pairs(checkpoint: Checkpoint) -> Iterable[tuple[str, FactorPair]]:
    for index, layer in enumerate(checkpoint.layers):
        for projection, name in PROJECTIONS.items():
            linear = getattr(layer, projection)
            if isinstance(linear, FactorPair):
                yield layer_prefix(index) + name, linear
