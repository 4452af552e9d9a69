"""Reads GGUF files of the Llama architecture."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor, dequantize
from torch import Tensor

from runtime.checkpoint.assemble import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    NORMS,
    PROJECTIONS,
    Biases,
    assemble,
    layer_prefix,
)
from runtime.checkpoint.gguf_config import EMBEDDING_NAME, OUTPUT_NAME, ROPE_DIVISORS, read_config
from runtime.checkpoint.hashing import hash_files
from runtime.checkpoint.weights import Checkpoint
from runtime.config import ModelConfig
from runtime.errors import CheckpointError

MAGIC = b"GGUF"

_MODEL_NAMES = {
    EMBEDDING: EMBEDDING_NAME,
    FINAL_NORM: "output_norm.weight",
    LM_HEAD: OUTPUT_NAME,
}
_NORM_NAMES = {"input_norm": "attn_norm.weight", "post_norm": "ffn_norm.weight"}
_PROJECTION_NAMES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def load_gguf(path: Path, dtype: torch.dtype, device: torch.device | str) -> Checkpoint:
    """Read a GGUF file, dequantized to ``dtype``, q and k rows in rotate-half order.

    Raises `CheckpointError` for malformed files and other architectures.
    """
    try:
        file = _HeaderReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
    tensors = {tensor.name: tensor for tensor in file.tensors}
    config = read_config(file, tensors)
    source = _GGUFTensors(tensors, config)
    biases = Biases.present(source.names())
    return assemble(config, source, biases, hash_files([path]), dtype, device)


class _HeaderReader(GGUFReader):  # type: ignore[misc]
    """Steps over long arrays: the vocabulary's 150k entries cost 2 s and are not needed here."""

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
        """Length of an array in bytes, its 12-byte header included."""
        scalar = self.gguf_scalar_to_np.get(GGUFValueType(item))
        if scalar is not None:
            return 12 + count * int(scalar().itemsize)
        if item != GGUFValueType.STRING:
            raise ValueError(f"an array of {GGUFValueType(item).name} is not understood")
        length_at = struct.Struct("<Q").unpack_from
        offset = start + 12
        for _ in range(count):
            offset += 8 + length_at(self.data, offset)[0]
        return offset - start


class _GGUFTensors:
    """The file's tensors under Hugging Face's names."""

    def __init__(self, tensors: Mapping[str, ReaderTensor], config: ModelConfig) -> None:
        self._tensors = tensors
        self._config = config
        self._names = dict(_MODEL_NAMES)
        self._heads: dict[str, int] = {}
        for index in range(config.num_layers):
            self._name_layer(index)
        self._names = {name: own for name, own in self._names.items() if own in tensors}
        known = {*self._names.values(), ROPE_DIVISORS}
        self._names |= {name: name for name in tensors if name not in known}

    def _name_layer(self, index: int) -> None:
        prefix, own = layer_prefix(index), f"blk.{index}."
        for norm, name in _NORM_NAMES.items():
            self._names[prefix + NORMS[norm]] = own + name
        for projection, name in _PROJECTION_NAMES.items():
            for kind in (".weight", ".bias"):
                self._names[prefix + PROJECTIONS[projection] + kind] = own + name + kind
        for kind in (".weight", ".bias"):
            self._heads[f"{own}attn_q{kind}"] = self._config.num_heads
            self._heads[f"{own}attn_k{kind}"] = self._config.num_kv_heads

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def read(self, name: str) -> Tensor:
        own = self._names[name]
        tensor = self._tensors[own]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{own} is stored as {tensor.tensor_type.name}: {error}"
            ) from error
        # Plain fp32 comes back as a view of the read-only file.
        weight = torch.from_numpy(values if values.flags.writeable else values.copy())
        heads = self._heads.get(own)
        if heads is None:
            return weight
        return _rotate_half_order(weight, heads, own)


def _rotate_half_order(weight: Tensor, heads: int, name: str) -> Tensor:
    """Undo GGUF's order for interleaved RoPE: rows (head, pair, half) become (head, half, pair)."""
    rows = weight.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{name} has {rows} rows, which {heads} heads cannot share")
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
