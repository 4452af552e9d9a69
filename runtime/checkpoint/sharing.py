"""Bases shared by several layers: one V in memory and in the file, under each linear's name.

A group is the names of linears (``model.layers.0.self_attn.q_proj``) that have the same V.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from runtime.checkpoint.assemble import TensorSource, named_linears
from runtime.checkpoint.weights import Checkpoint, FactorPair, linears_of
from runtime.errors import CheckpointError

Groups = tuple[tuple[str, ...], ...]


def basis_groups(checkpoint: Checkpoint) -> Groups:
    """Return the groups of linears whose V is one tensor, in the order of layers."""
    owners: dict[int, list[str]] = {}
    for name, linear in named_linears(checkpoint):
        if isinstance(linear, FactorPair):
            owners.setdefault(id(linear.v), []).append(name)
    return tuple(tuple(names) for names in owners.values() if len(names) > 1)


def with_shared_bases(checkpoint: Checkpoint, groups: Iterable[Sequence[str]]) -> Checkpoint:
    """Return the checkpoint with one V tensor per group.

    Raises:
        CheckpointError: the V of a group's linears differ.
    """
    pairs = {n: one for n, one in named_linears(checkpoint) if isinstance(one, FactorPair)}
    basis_of: dict[int, Tensor] = {}
    for first, *others in groups:
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
    """A `TensorSource` in which several names refer to one stored tensor.

    Attributes:
        stored: the stored name of each alias.
    """

    source: TensorSource
    stored: Mapping[str, str]

    @classmethod
    def of(cls, source: TensorSource, groups: Iterable[Sequence[str]]) -> "AliasedSource":
        """Give every linear of a group the V that ``source`` has under the first one's name."""
        pairs = ((name, first) for first, *others in groups for name in others)
        return cls(source, {f"{name}.v.weight": f"{first}.v.weight" for name, first in pairs})

    def names(self) -> frozenset[str]:
        return self.source.names() | self.stored.keys()

    def read(self, name: str) -> Tensor:
        return self.source.read(self.stored.get(name, name))
