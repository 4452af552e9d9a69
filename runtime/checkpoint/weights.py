"""The weights of a model in canonical form, independent of the file format.

A linear layer is `Dense` (``y = W x + b``) or a `FactorPair` (``y = U (V x) + b``). Any linear of
any layer may be either, with any rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.hashed_files import FileIdentity, HashedFiles
from runtime.config import ModelConfig
from runtime.parallel.partition import Partition


@dataclass(frozen=True)
class Dense:
    """``y = W x + b``: weight ``[out, in]``, bias ``[out]`` or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class FactorPair:
    """``y = U (V x) + b``: u ``[out, r]``, v ``[r, in]``, bias ``[out]`` or None."""

    u: Tensor
    v: Tensor
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.u.shape[1]


@dataclass(frozen=True)
class Latents(FactorPair):
    """A factor pair whose projection is ``V x`` alone: attention applies U and the bias."""


Linear = Dense | FactorPair


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer with separate q, k, v and o projections and a gated MLP.

    This is the layer of the Llama family, and the only one that `runtime.gemm` packs. Other
    families define their own dataclass (`runtime.checkpoint.family.CheckpointFamily.layer_type`).

    Attributes:
        input_norm, post_norm: norm weights before attention and before the MLP, ``[hidden]``.
        q_norm, k_norm: norm weights of query and key heads (Qwen3), ``[head_dim]``, or None.
    """

    input_norm: Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    post_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class Factorization:
    """Provenance of a factorized checkpoint.

    Attributes:
        method: name and version of the method.
        source_hash: ``model_hash`` of the dense model.
        calibration_hash: sha256 of the calibration token ids.
        calibration_tokens: number of calibration tokens.
    """

    method: str
    source_hash: str
    calibration_hash: str
    calibration_tokens: int


class LayersOnDemand(Sequence[Any]):
    """Layers that are read when they are accessed.

    Only the last one read stays in memory, until the next one is read.

    Attributes:
        read: reads a layer, which is not kept.
        shapes: the layers with tensors on the meta device, which have shapes but no content. A V
            that layers share is one tensor object here; see `runtime.checkpoint.sharing`.
    """

    def __init__(self, read: Callable[[int], Any], shapes: Sequence[Any]) -> None:
        self.read = read
        self.shapes = shapes
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return tuple(map(self.read, numbers))
        if self._last is None or self._last[0] != numbers:
            self._last = None  # frees the layer before the next one is read
            self._last = numbers, self.read(numbers)
        return self._last[1]

    def __iter__(self) -> Iterator[Any]:
        # The iterator of `Sequence` keeps a layer while it reads the next one.
        return map(self.__getitem__, range(len(self)))


@dataclass(frozen=True)
class Checkpoint:
    """A whole model. Rows of q and k are in Hugging Face's rotate-half order.

    Attributes:
        config: shape of the model.
        embedding: token embedding ``[vocab, hidden]``.
        layers: one instance of the family's ``layer_type`` per layer, see also `LayersOnDemand`.
        final_norm: weight of the norm before the LM head, ``[hidden]``; empty for an encoder.
        lm_head: ``[vocab, hidden]``; the same tensor as ``embedding`` if embeddings are tied, and
            if the model has none.
        model_hash: hash of config and weights, see `runtime.checkpoint.hashing`. Workers that
            exchange KV must have the same one.
        keep: fraction of the linears' parameters that factorization kept; 1.0 if dense.
        factorization: provenance of a factorization; None if dense or converted.
        partition: the part of the model that this is, see `runtime.checkpoint.slices`; None for a
            whole model.
        files: the files that were hashed; empty if the checkpoint was not read from files.
        positions: learned position embeddings ``[context_length, hidden]``, or None.
        final_norm_bias: bias of the norm before the LM head, ``[hidden]``, or None.
        more: other tensors outside the layers by name, see `CheckpointFamily.more_tensors`.
        has_lm_head: False for a decoder whose files are known to lack one: it only embeds.
    """

    config: ModelConfig
    embedding: Tensor
    layers: Sequence[Any]
    final_norm: Tensor
    lm_head: Tensor
    model_hash: str
    keep: float = 1.0
    factorization: Factorization | None = None
    partition: Partition | None = None
    files: tuple[FileIdentity, ...] = ()
    positions: Tensor | None = None
    final_norm_bias: Tensor | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)
    has_lm_head: bool = True

    @property
    def hashed(self) -> HashedFiles:
        """The files and their hash, for other processes that load them (`load_checkpoint`)."""
        return HashedFiles(self.model_hash, self.files)


def linears_of(layer: Any) -> Iterator[tuple[str, Linear]]:
    """Yield the linears of a layer with their field names, in the order of the fields."""
    for each in fields(layer):
        value = getattr(layer, each.name)
        if isinstance(value, Dense | FactorPair):
            yield each.name, value


def layer_shapes(checkpoint: Checkpoint) -> Sequence[Any]:
    """Return layers whose tensors have the shapes of the checkpoint's, without reading them."""
    layers = checkpoint.layers
    return layers.shapes if isinstance(layers, LayersOnDemand) else layers


def moved(value: Any, device: torch.device, dtype: torch.dtype, placed: dict[int, Tensor]) -> Any:
    """Return ``value`` with all tensors on ``device`` as ``dtype``, copied only where necessary.

    The dtype is converted on the target device.

    Args:
        value: a tensor, or nested tuples and dataclasses with tensors.
        placed: results by the id of the original tensor, so that a tensor that is used twice is
            copied once.
    """
    return mapped(value, lambda tensor: placed.setdefault(id(tensor), tensor.to(device).to(dtype)))


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``function`` applied to all tensors.

    Args:
        value: a tensor, or nested tuples and dataclasses with tensors.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(mapped(item, function) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    values = {each.name: getattr(value, each.name) for each in fields(value)}
    return replace(value, **{name: mapped(item, function) for name, item in values.items()})


def shapes_of(layers: Sequence[Any]) -> tuple[Any, ...]:
    """Return copies of layers on the meta device. Tensors that layers share remain shared."""
    made: dict[int, Tensor] = {}
    shapes: tuple[Any, ...] = mapped(
        tuple(layers), lambda tensor: made.setdefault(id(tensor), tensor.to("meta"))
    )
    return shapes


def parameters_kept(checkpoint: Checkpoint) -> float:
    """Return the fraction of the dense model's parameters of linears that a checkpoint has.

    A V shared by several linears is counted once. Biases are not counted.
    """
    kept = total = 0
    counted: set[int] = set()
    for layer in checkpoint.layers:
        for _, linear in linears_of(layer):
            if isinstance(linear, Dense):
                kept += linear.weight.numel()
                total += linear.weight.numel()
                continue
            kept += linear.u.numel()
            total += linear.u.shape[0] * linear.v.shape[1]
            if id(linear.v) not in counted:
                counted.add(id(linear.v))
                kept += linear.v.numel()
    return kept / total
