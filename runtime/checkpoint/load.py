"""Load a model from any supported file format."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint.assemble import ALL, RowsOf
from runtime.checkpoint.canonical import METADATA, load_canonical
from runtime.checkpoint.gguf_file import MAGIC, load_gguf
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.huggingface import load_huggingface
from runtime.checkpoint.safetensors_file import is_pickle
from runtime.checkpoint.sharing import layers_with_bases
from runtime.checkpoint.slices import require_divisible, with_rank_layers
from runtime.checkpoint.source_format import conversion
from runtime.checkpoint.weights import Checkpoint, moved
from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.parallel.partition import Partition


def load_checkpoint(
    path: Path,
    dtype: torch.dtype | None = torch.float32,
    *,
    part: Callable[[ModelConfig], Partition] | None = None,
    prepare: Callable[[Checkpoint], Checkpoint] = lambda whole: whole,
    known: HashedFiles | None = None,
) -> Checkpoint:
    """Read a model as ``dtype`` on the CPU. Pickles are never read.

    Args:
        path: a GGUF file, a canonical checkpoint (a directory with ``headrace.json``), or a Hugging
            Face directory with ``config.json`` and safetensors. The format is detected from the
            content.
        dtype: dtype of all tensors. None keeps the dtype in which each is stored, and does not
            read the whole model into memory: safetensors are memory-mapped, and layers of
            GGUF files are dequantized to fp32 each time they are accessed.
        part: returns the part to read of a model of this shape; None reads the whole model.
        prepare: changes the layers of the model before a part of them is taken.
        known: `Checkpoint.hashed` of another process that loaded the same files, which are then
            not hashed again.

    Raises:
        CheckpointError: a file or tensor is missing, malformed or not supported, the files are not
            those of ``known``, or the model family cannot be divided.
        ValueError: ``part`` cannot divide the model.
    """
    if part is None:
        checkpoint = prepare(_load(path, known, lambda _: ALL))
    else:
        whole = _load(path, known, partial(_token_rows, part))
        checkpoint = with_rank_layers(prepare(whole), part(whole.config))
    return checkpoint if dtype is None else converted(checkpoint, dtype)


def converted(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    """Return a checkpoint with all tensors in host memory as ``dtype``.

    Tensors that have the dtype are not copied, and remain memory-mapped if they are.
    """
    to = partial(moved, device=torch.device("cpu"), dtype=dtype)
    layers = []
    placed: dict[int, Tensor] = {}
    for layer, shared in layers_with_bases(checkpoint):
        layers.append(to(layer, placed=placed))
        del layer  # freed before the next one is read
        placed = {key: tensor for key, tensor in placed.items() if key in shared}
    ends: dict[int, Tensor] = {}
    return replace(
        checkpoint,
        embedding=to(checkpoint.embedding, placed=ends),
        layers=tuple(layers),
        final_norm=to(checkpoint.final_norm, placed=ends),
        lm_head=to(checkpoint.lm_head, placed=ends),
        positions=to(checkpoint.positions, placed=ends),
        final_norm_bias=to(checkpoint.final_norm_bias, placed=ends),
        more={name: to(tensor, placed=ends) for name, tensor in checkpoint.more.items()},
    )


def _token_rows(part: Callable[[ModelConfig], Partition], config: ModelConfig) -> slice:
    require_divisible(config)
    return part(config).token_rows


def _load(path: Path, known: HashedFiles | None, vocabulary: RowsOf) -> Checkpoint:
    if path.is_dir():
        if (path / METADATA).is_file():
            return load_canonical(path, known, vocabulary)
        return load_huggingface(path, known, vocabulary)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if _starts_with(path, MAGIC):
        return load_gguf(path, known, vocabulary)
    if is_pickle(path):
        raise CheckpointError(f"{path} is pickled, which servers never read: {conversion(path)}")
    raise CheckpointError(f"{path} is neither a GGUF file nor a model directory")


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
