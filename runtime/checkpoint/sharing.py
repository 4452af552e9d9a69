"""Bases (V of factor pairs) shared by several layers, in memory and in files.

Linears share a basis if their V is the same tensor object. For layers on demand, this is the V in
`LayersOnDemand.shapes`, because every read creates new tensors.

A group is a tuple with the names of all linears that have the same V. An example of a name is
``model.layers.0.self_attn.q_proj``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from runtime.checkpoint.assemble import TensorSource, factor_pairs
from runtime.checkpoint.weights import Checkpoint, FactorPair, layer_shapes, linears_of
from runtime.errors import CheckpointError

Groups = tuple[tuple[str, ...], ...]


def basis_groups(checkpoint: Checkpoint) -> Groups:
    """Return the groups of linears that share a V, in the order of layers.

    Layers on demand are not read.
    """
    shapes = replace(checkpoint, layers=layer_shapes(checkpoint))
    owners: dict[int, list[str]] = {}
    for name, pair in factor_pairs(shapes).items():
        owners.setdefault(id(pair.v), []).append(name)
    return tuple(tuple(names) for names in owners.values() if len(names) > 1)


def layers_with_bases(checkpoint: Checkpoint) -> Iterator[tuple[Any, frozenset[int]]]:
    """Yield each layer with the ``id()`` of every V read so far that a later layer shares.

    All linears of a group get the same V tensor object, also in layers on demand. A V stays in
    memory until the last layer of its group has been used. Python may then reuse its id. A consumer
    that caches results by the id of a V must therefore drop, after each layer, the results whose
    ids are not among the yielded ones.
    """
    bases = [_bases_of(layer) for layer in layer_shapes(checkpoint)]
    last = {basis: index for index, own in enumerate(bases) for basis in own.values()}
    held: dict[int, Tensor] = {}
    for index, own in enumerate(bases):
        layer = _with_bases(checkpoint.layers[index], own, held)
        held = {basis: v for basis, v in held.items() if last[basis] > index}
        yield layer, frozenset(map(id, held.values()))
        del layer  # freed before the next one is read


def _bases_of(shapes: Any) -> dict[str, int]:
    """Return the basis number of each factor pair of a layer, by field.

    Linears that share a V have the same number.
    """
    return {name: id(pair.v) for name, pair in linears_of(shapes) if isinstance(pair, FactorPair)}


def _with_bases(layer: Any, bases: Mapping[str, int], held: dict[int, Tensor]) -> Any:
    """Return a layer whose V are those in ``held``, by basis number. Add missing V to ``held``."""
    pairs: dict[str, FactorPair] = {name: getattr(layer, name) for name in bases}
    first = {name: held.setdefault(bases[name], pair.v) for name, pair in pairs.items()}
    changed = {n: replace(pair, v=first[n]) for n, pair in pairs.items() if pair.v is not first[n]}
    return replace(layer, **changed) if changed else layer


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
