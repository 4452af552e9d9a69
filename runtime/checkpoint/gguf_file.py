"""Read GGUF files."""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor, dequantize
from torch import Tensor

from runtime.checkpoint.assemble import ALL, RowsOf, assemble_on_demand, optional_tensors_of
from runtime.checkpoint.family import CheckpointFamily, GGUFFormat
from runtime.checkpoint.gguf_config import (
    EMBEDDING_NAME,
    OUTPUT_NAME,
    ROPE_DIVISORS,
    read_config,
    read_family,
)
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.hashing import hash_files
from runtime.checkpoint.weights import Checkpoint
from runtime.config import ModelConfig
from runtime.errors import CheckpointError

MAGIC = b"GGUF"
_JOINED_ROWS = 16
_FINAL_NORM_NAME = "output_norm.weight"


def load_gguf(path: Path, known: HashedFiles | None, vocabulary: RowsOf) -> Checkpoint:
    """Read a GGUF file, with q and k rows in rotate-half order.

    Layers are dequantized to fp32 each time they are accessed. For the arguments, see
    `runtime.checkpoint.load.load_checkpoint`.

    Raises:
        CheckpointError: the file is malformed, or no model family supports its architecture.
    """
    try:
        file = _HeaderReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
    tensors = {tensor.name: tensor for tensor in file.tensors}
    family = read_family(file)
    assert family.gguf is not None  # `read_family` finds only families with a GGUF format
    config = read_config(file, tensors, family.gguf)
    source = _GGUFTensors(tensors, config, family, family.gguf)
    optional = optional_tensors_of(config, source)
    rows = vocabulary(config)
    hashed = HashedFiles.of([path], lambda: hash_files([path]), known)
    return assemble_on_demand(config, source, optional, hashed, rows)


class _HeaderReader(GGUFReader):  # type: ignore[misc]
    """A `GGUFReader` that skips long arrays.

    Parsing a vocabulary of 150k entries takes 2 s, and the loader does not need it.
    """

    _LONG = 1024

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type == GGUFValueType.ARRAY:
            item, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if count > self._LONG and self.byte_order == "I":
                types = [GGUFValueType.ARRAY, GGUFValueType(item)]
                return self._array_bytes(orig_offs, item, count), [], [], types
        parts: tuple[int, list[Any], list[int], list[GGUFValueType]]
        parts = super()._get_field_parts(orig_offs, raw_type)
        return parts

    def _array_bytes(self, start: int, item: int, count: int) -> int:
        """Return the length of an array in bytes, including its 12-byte header."""
        scalar = self.gguf_scalar_to_np.get(GGUFValueType(item))
        if scalar is not None:
            return 12 + count * int(scalar().itemsize)
        if item != GGUFValueType.STRING:
            raise ValueError(f"arrays of {GGUFValueType(item).name} are not supported")
        length_at = struct.Struct("<Q").unpack_from
        offset = start + 12
        for _ in range(count):
            offset += 8 + length_at(self.data, offset)[0]
        return offset - start


class _GGUFTensors:
    """A `TensorSource` over a GGUF file, with the family's tensor names."""

    def __init__(
        self,
        tensors: Mapping[str, ReaderTensor],
        config: ModelConfig,
        family: CheckpointFamily,
        file_format: GGUFFormat,
    ) -> None:
        self._tensors = tensors
        names = family.tensor_names
        self._names = {
            names.embedding: EMBEDDING_NAME,
            names.final_norm: _FINAL_NORM_NAME,
            names.lm_head: OUTPUT_NAME,
        }
        self._heads: dict[str, int] = {}
        layout = family.layout(config)
        for index in range(config.num_layers):
            prefix = names.layer_prefix(index)
            own = f"blk.{index}."
            for field, name in file_format.layer_names.items():
                if field in layout.vectors:
                    self._names[prefix + layout.vectors[field].name] = own + name
                    continue
                for kind in (".weight", ".bias"):
                    self._names[prefix + layout.linears[field].name + kind] = own + name + kind
                    if field in file_format.interleaved:
                        heads = getattr(config, file_format.interleaved[field])
                        self._heads[own + name + kind] = heads
        self._names = {name: own for name, own in self._names.items() if own in tensors}
        known = {*self._names.values(), ROPE_DIVISORS}
        unknown = {name: name for name in tensors if name not in known}
        if repeated := sorted(unknown.keys() & self._names.keys()):
            raise CheckpointError(
                f"the file has both {repeated[0]} and {self._names[repeated[0]]}, which are the "
                "same tensor"
            )
        self._names |= unknown

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        # GGUF lists the innermost dimension first.
        return tuple(int(size) for size in reversed(self._tensors[self._names[name]].shape))

    def read(self, name: str) -> Tensor:
        own = self._names[name]
        heads = self._heads.get(own)
        weight = self.read_rows(name, ALL)
        return weight if heads is None else _rotate_half_order(weight, heads)

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Read some rows of a tensor, in the order of the file."""
        own = self._names[name]
        tensor = self._tensors[own]
        try:
            values = _dequantize(tensor, rows)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{own} is stored as {tensor.tensor_type.name}: {error}"
            ) from error
        # For fp32 tensors, `dequantize` returns a view of the read-only file.
        return torch.from_numpy(values if values.flags.writeable else values.copy())


def _dequantize(tensor: ReaderTensor, rows: slice) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the values of some rows of a tensor, in the shape of the file.

    `gguf.dequantize` converts 16 rows at a time. Blocks of values are independent of each other, so
    that several rows are passed as one, which takes a fourth of the time for short rows.
    """
    data = np.asarray(tensor.data)[rows]  # not a memmap, whose views are slow to create
    if data.ndim > 1:
        data = data.reshape(len(data) // math.gcd(len(data), _JOINED_ROWS), -1)
    values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(data, tensor.tensor_type)
    return values.reshape(-1, *(int(size) for size in reversed(tensor.shape[:-1])))


def _rotate_half_order(weight: Tensor, heads: int) -> Tensor:
    """Convert rows from interleaved to rotate-half RoPE.

    The order (head, pair, half) becomes (head, half, pair).
    """
    pairs = weight.reshape(heads, len(weight) // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
