"""Bases (V of factor pairs) shared by several layers, in memory and in files.

A group is a tuple with the names of all linears that have the same V. An example of a name is
``model.layers.0.self_attn.q_proj``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from runtime.checkpoint.assemble import TensorSource, factor_pairs
from runtime.checkpoint.weights import Checkpoint, FactorPair, LayersOnDemand, linears_of
from runtime.errors import CheckpointError

Groups = tuple[tuple[str, ...], ...]


def basis_groups(checkpoint: Checkpoint) -> Groups:
    """Return the groups of linears whose V is the same tensor object, in the order of layers.

    Layers that are read on demand (`LayersOnDemand`) share no tensors: there is no group, and the
    layers are not read.
    """
    if isinstance(checkpoint.layers, LayersOnDemand):
        return ()
    return groups_of(factor_pairs(checkpoint))


def groups_of(pairs: Mapping[str, FactorPair]) -> Groups:
    """Return the groups of names whose factor pairs have the same V tensor object."""
    owners: dict[int, list[str]] = {}
    for name, pair in pairs.items():
        owners.setdefault(id(pair.v), []).append(name)
    return tuple(tuple(names) for names in owners.values() if len(names) > 1)


def with_shared_bases(checkpoint: Checkpoint, groups: Iterable[Sequence[str]]) -> Checkpoint:
    """Return the checkpoint with a single V tensor per group.

    Raises:
        CheckpointError: the linears of a group have different V.
    """
    if not (shared := tuple(groups)):
        return checkpoint
    pairs = factor_pairs(checkpoint)
    basis_of: dict[int, Tensor] = {}
    for first, *others in shared:
        for name in others:
            if first not in pairs or name not in pairs or not pairs[name].v.equal(pairs[first].v):
                raise CheckpointError(f"{name} and {first} do not have the same basis")
            basis_of[id(pairs[name])] = pairs[first].v
    layers = []
    for layer in checkpoint.layers:
        changed = {
            field: replace(linear, v=basis_of[id(linear)])
            for field, linear in linears_of(layer)
            if isinstance(linear, FactorPair) and id(linear) in basis_of
        }
        layers.append(replace(layer, **changed))
    return replace(checkpoint, layers=tuple(layers))


@dataclass(frozen=True)
class AliasedSource:
    """A `TensorSource` in which several names refer to one tensor object.

    Attributes:
        stored: stored name of each shared tensor, by each of its names.
    """

    source: TensorSource
    stored: Mapping[str, str]
    _shared: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, source: TensorSource, groups: Iterable[Sequence[str]]) -> "AliasedSource":
        """Alias the V of every linear in a group to the V of its first linear."""
        pairs = ((name, group[0]) for group in groups for name in group)
        return cls(source, {f"{name}.v.weight": f"{first}.v.weight" for name, first in pairs})

    def names(self) -> frozenset[str]:
        return self.source.names() | self.stored.keys()

    def read(self, name: str) -> Tensor:
        stored = self.stored.get(name)
        if stored is None:
            return self.source.read(name)
        if stored not in self._shared:
            self._shared[stored] = self.source.read(stored)
        return self._shared[stored]
