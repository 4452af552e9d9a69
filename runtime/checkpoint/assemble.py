"""Build a `Checkpoint` from named tensors, and list the tensors of a checkpoint.

A file must contain exactly the tensors that the family's layout names, with their shapes. Readers
present a file as a `TensorSource` with the names of Hugging Face's checkpoints. A factorized linear
has ``….u.weight`` ``[out, r]`` and ``….v.weight`` ``[r, in]`` instead of ``….weight``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.checkpoint.family import CheckpointFamily, LinearTensor, TensorNames, family_of
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    FactorPair,
    LayersOnDemand,
    Linear,
    layer_shapes,
    linears_of,
)
from runtime.config import ModelConfig
from runtime.errors import CheckpointError

ALL = slice(None)
"""All rows of a matrix."""
RowsOf = Callable[[ModelConfig], slice]
"""Function from the shape of a model to the rows of its embedding and LM head that are read.

Loaders call it before they hash the files, because it raises for a model that cannot be divided.
"""


class TensorSource(Protocol):
    """The tensors of a file, read on demand."""

    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> Tensor: ...


class CostlySource(TensorSource, Protocol):
    """A `TensorSource` that converts tensors when it reads them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        ...

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Read some rows of a matrix."""
        ...


def assemble(
    config: ModelConfig,
    source: TensorSource,
    optional: frozenset[str],
    hashed: HashedFiles,
    vocabulary: slice = ALL,
) -> Checkpoint:
    """Read and check all tensors of a model.

    The tensors are those of the source, with their dtypes: memory-mapped ones stay so. They
    determine ``tied_embeddings`` of the returned config, see `_Reader`.

    Args:
        optional: biases and optional vectors that each layer must have, by name within the layer.
            For formats whose config does not list them, use `optional_tensors_of`.
        vocabulary: rows of the embedding and of the LM head to return.

    Raises:
        CheckpointError: tensors are missing, misshapen, quantized or unexpected.
    """
    family = family_of(config.architecture)
    names = family.tensor_names
    reader = _Reader(source, optional)
    whole, head = reader.embedding_and_head(names, config)
    embedding = whole[vocabulary]
    _refuse_not_finite(names.embedding, embedding)
    lm_head = embedding if head is whole else head[vocabulary]
    layers = tuple(reader.layer(family, config, index) for index in range(config.num_layers))
    ends: dict[str, Any] = {
        field: reader.tensor(name, shape) for field, (name, shape) in _ends(names, config).items()
    }
    ends.setdefault("final_norm", embedding.new_empty(0))
    more = {name: reader.tensor(name, shape) for name, shape in family.more_tensors(config).items()}
    reader.refuse_unread(names.ignored)
    return Checkpoint(
        config=replace(config, tied_embeddings=lm_head is embedding),
        embedding=embedding,
        layers=layers,
        lm_head=lm_head,
        model_hash=hashed.model_hash,
        files=hashed.files,
        more=more,
        **ends,
    )


def _ends(names: TensorNames, config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the name and shape of each tensor outside the layers that every rank holds whole.

    Keys are fields of `Checkpoint`. Tensors that the model family does not have are left out.
    """
    width = config.hidden_size
    ends = {
        "positions": (names.positions, (config.context_length, width)),
        "final_norm": (names.final_norm, (width,)),
        "final_norm_bias": (names.final_norm_bias, (width,)),
    }
    return {field: entry for field, entry in ends.items() if entry[0]}


def assemble_on_demand(
    config: ModelConfig,
    source: CostlySource,
    optional: frozenset[str],
    hashed: HashedFiles,
    vocabulary: slice = ALL,
) -> Checkpoint:
    """Check all tensors of a model, and read its layers whenever they are accessed.

    Arguments and errors are those of `assemble`.
    """
    shapes = assemble(config, _Shapes(source), optional, hashed)
    family = family_of(config.architecture)
    names = family.tensor_names

    def read_layer(index: int) -> Any:
        return _Reader(source, optional).layer(family, config, index)

    embedding = source.read_rows(names.embedding, vocabulary)
    _refuse_not_finite(names.embedding, embedding)
    tied = config.tied_embeddings
    ends: dict[str, Any] = {
        field: source.read(name) for field, (name, _) in _ends(names, config).items()
    }
    more = {name: source.read(name) for name in family.more_tensors(config)}
    return replace(
        shapes,
        embedding=embedding,
        layers=LayersOnDemand(read_layer, shapes.layers),
        lm_head=embedding if tied else source.read_rows(names.lm_head, vocabulary),
        more=more,
        **ends,
    )


def optional_tensors_of(config: ModelConfig, source: TensorSource) -> frozenset[str]:
    """Return the optional tensors that the first layer of a file has, by name within the layer."""
    family = family_of(config.architecture)
    return family.layout(config).present(source.names(), family.tensor_names.layer_prefix(0))


def named_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a checkpoint, with the name under which `assemble` reads it."""
    config = checkpoint.config
    family = family_of(config.architecture)
    names = family.tensor_names
    layout = family.layout(config)
    yield names.embedding, checkpoint.embedding
    if checkpoint.positions is not None:
        yield names.positions, checkpoint.positions
    for index, layer in enumerate(checkpoint.layers):
        prefix = names.layer_prefix(index)
        for field, vector in layout.vectors.items():
            weight = getattr(layer, field)
            if weight is not None:
                yield prefix + vector.name, weight
        for field, tensor in layout.linears.items():
            name = prefix + tensor.name
            linear = getattr(layer, field)
            if isinstance(linear, Dense):
                yield f"{name}.weight", linear.weight
            else:
                yield f"{name}.u.weight", linear.u
                yield f"{name}.v.weight", linear.v
            if linear.bias is not None:
                yield f"{name}.bias", linear.bias
    yield from checkpoint.more.items()
    if names.final_norm:
        yield names.final_norm, checkpoint.final_norm
    if checkpoint.final_norm_bias is not None:
        yield names.final_norm_bias, checkpoint.final_norm_bias
    if not config.tied_embeddings:
        yield names.lm_head, checkpoint.lm_head


def nbytes(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of all tensors; a tensor that is used more than once counts once.

    Layers on demand are not read.

    Args:
        dtype: dtype in which the tensors are counted; None for their own.
    """
    shapes = replace(checkpoint, layers=layer_shapes(checkpoint))
    tensors = {id(tensor): tensor for _, tensor in named_tensors(shapes)}
    return sum(tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in tensors.values())


def step_weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes of the weights that a decode step reads.

    These are all layers, the final norm and the LM head, without the token and position
    embeddings. A shared V counts once for each of its linears. Layers on demand are not read.

    Args:
        dtype: dtype in which the tensors are counted.
    """
    shapes = replace(checkpoint, layers=layer_shapes(checkpoint))
    names = family_of(checkpoint.config.architecture).tensor_names
    embeddings = {names.positions}
    if not checkpoint.config.tied_embeddings:
        embeddings.add(names.embedding)
    read = [tensor for name, tensor in named_tensors(shapes) if name not in embeddings]
    return sum(tensor.numel() for tensor in read) * dtype.itemsize


def factor_pairs(checkpoint: Checkpoint) -> dict[str, FactorPair]:
    """Return all factor pairs by their names, such as ``model.layers.0.self_attn.q_proj``."""
    family = family_of(checkpoint.config.architecture)
    layout = family.layout(checkpoint.config)
    return {
        family.tensor_names.layer_prefix(index) + layout.linears[field].name: linear
        for index, layer in enumerate(checkpoint.layers)
        for field, linear in linears_of(layer)
        if isinstance(linear, FactorPair)
    }


@dataclass(frozen=True)
class _Shapes:
    """A `TensorSource` of tensors without content."""

    source: CostlySource

    def names(self) -> frozenset[str]:
        return self.source.names()

    def read(self, name: str) -> Tensor:
        return torch.empty(self.source.shape(name), device="meta")


class _Reader:
    """Reads tensors, each at most once, and records which ones have not been read."""

    def __init__(self, source: TensorSource, optional: frozenset[str]) -> None:
        self._source = source
        self._optional = optional
        self._unread = set(source.names())

    def tensor(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """Read one tensor; a None in ``shape`` matches any size above 0."""
        if name not in self._unread:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        self._unread.remove(name)
        tensor = self._source.read(name)
        fits = len(tensor.shape) == len(shape) and all(
            size == expected if expected is not None else size > 0
            for size, expected in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            expected_text = ", ".join("*" if size is None else str(size) for size in shape)
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, expected [{expected_text}]"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{name} is {tensor.dtype}: quantized weights are not supported")
        return tensor

    def embedding_and_head(self, names: TensorNames, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """Return the embedding and the LM head, which are one tensor if they are tied.

        As in transformers, ``tied_embeddings`` of the config determines only where to find a matrix
        that is not stored. If both are stored, they are tied if they are equal.
        """
        shape = (config.vocab_size, config.hidden_size)
        if not config.tied_embeddings:
            return self.tensor(names.embedding, shape), self.tensor(names.lm_head, shape)
        stored = [name for name in (names.embedding, names.lm_head) if name in self._unread]
        embedding, *others = [self.tensor(name, shape) for name in stored or (names.embedding,)]
        untied = [head for head in others if not torch.equal(head, embedding)]
        return embedding, untied[0] if untied else embedding

    def linear(self, prefix: str, entry: LinearTensor) -> Linear:
        """Read a linear, dense or factorized, and its bias if it has one."""
        name, bias_name = prefix + entry.name, f"{entry.name}.bias"
        bias = None
        if bias_name in self._optional:
            bias = self.tensor(prefix + bias_name, (entry.out,))
        if f"{name}.u.weight" not in self._unread:
            return Dense(self.tensor(f"{name}.weight", (entry.out, entry.inner)), bias)
        u = self.tensor(f"{name}.u.weight", (entry.out, None))
        return FactorPair(u, self.tensor(f"{name}.v.weight", (u.shape[1], entry.inner)), bias)

    def layer(self, family: CheckpointFamily, config: ModelConfig, index: int) -> Any:
        """Read one layer as the family's ``layer_type``."""
        prefix, layout = family.tensor_names.layer_prefix(index), family.layout(config)
        parts: dict[str, Any] = {
            field: self.linear(prefix, linear) for field, linear in layout.linears.items()
        }
        for field, vector in layout.vectors.items():
            if not vector.optional or vector.name in self._optional:
                parts[field] = self.tensor(prefix + vector.name, (vector.size,))
        return family.layer_type(**parts)

    def refuse_unread(self, ignored: Sequence[str]) -> None:
        """Raise if the file has unread tensors whose names match none of the patterns."""
        unexpected = sorted(
            name
            for name in self._unread
            if not any(fnmatchcase(name, pattern) for pattern in ignored)
        )
        if unexpected:
            shown = ", ".join(unexpected[:4]) + (" …" if len(unexpected) > 4 else "")
            raise CheckpointError(
                f"{len(unexpected)} tensors are not part of this architecture: {shown}"
            )


def _refuse_not_finite(name: str, embedding: Tensor) -> None:
    """Check the embedding of every token, because a request uses only those of its tokens.

    All other weights are used by every request, so any prompt shows whether they are finite.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    if not embedding.is_meta and not all(map(isfinite, torch.stack(embedding.aminmax()).tolist())):
        raise CheckpointError(f"{name} has values that are NaN or infinite: the file is damaged")
