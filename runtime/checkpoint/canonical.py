"""The canonical factorized checkpoint: a directory of safetensors files and ``headrace.json``.

The tensors are in ``model.safetensors``, or in several shards with an index. The JSON has the
config in Hugging Face's format, the rank of each factorized linear (others are dense), the fraction
of parameters kept (``keep``), whether the model has an LM head (``has_lm_head``; true if absent),
the model hash, the provenance of the factorization, and which linears share a V. A shared V is
stored once, under the first linear's name. Tensors have Hugging Face's names; a factor pair is
``….u.weight`` ``[out, r]`` and ``….v.weight`` ``[r, in]``.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.assemble import (
    RowsOf,
    TensorSource,
    assemble,
    factor_pairs,
    named_tensors,
    optional_tensors_of,
)
from runtime.checkpoint.config_values import number
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.hashing import hash_tensors
from runtime.checkpoint.huggingface_config import parse_config, to_huggingface
from runtime.checkpoint.safetensors_file import SafetensorsDirectory, ShardWriter, read_json
from runtime.checkpoint.sharing import AliasedSource, Groups, basis_groups
from runtime.checkpoint.weights import Checkpoint, Factorization
from runtime.config import ModelConfig
from runtime.errors import CheckpointError

METADATA = "headrace.json"
FORMAT = 2
"""Format version. Since 2, ``model_hash`` is a tree hash; see `runtime.checkpoint.hashing`."""


def canonical_hash(checkpoint: Checkpoint) -> str:
    """Return the hash of config and tensors: the ``model_hash`` of a canonical checkpoint."""
    tensors = sorted(named_tensors(checkpoint), key=lambda item: item[0])
    return hash_tensors(_config_text(checkpoint.config), tensors)


def write_checkpoint(
    checkpoint: Checkpoint,
    directory: Path,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Write ``checkpoint`` to ``directory``, one tensor after another.

    The write is atomic: files are written to a temporary directory beside the target, which is then
    renamed. If the target is already a canonical checkpoint, it is kept and nothing is written.

    Host memory is needed for one shard (`ShardWriter`), in addition to the tensors of the
    checkpoint, which may be memory-mapped.

    Args:
        dtype: dtype to write; None keeps the dtype of each tensor.
        progress: called with the number of bytes of each tensor when it is written.

    Raises:
        CheckpointError: ``directory`` exists and is not a canonical checkpoint.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        pairs = factor_pairs(checkpoint)
        groups = basis_groups(checkpoint)
        repeated = {f"{name}.v.weight" for _, *others in groups for name in others}
        with ShardWriter(scratch) as writer:
            for name, tensor in named_tensors(checkpoint):
                if name not in repeated:
                    stored_tensor = tensor.to(dtype or tensor.dtype)
                    writer.add(name, stored_tensor)
                    progress(stored_tensor.nbytes)
        stored = AliasedSource.of(SafetensorsDirectory(scratch), groups)
        ranks = {name: pair.rank for name, pair in pairs.items()}
        model_hash = _hash_of(checkpoint.config, stored)
        text = json.dumps(_metadata(checkpoint, model_hash, ranks, groups), indent=1)
        (scratch / METADATA).write_text(text, encoding="utf-8")
        scratch.chmod(0o755)
        _publish(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_canonical(directory: Path, known: HashedFiles | None, vocabulary: RowsOf) -> Checkpoint:
    """Read a directory that `write_checkpoint` wrote, and verify its ranks and its hash.

    Tensors are memory-mapped; linears that share a V have the same tensor object. For the
    arguments, see `runtime.checkpoint.load.load_checkpoint`.

    Raises:
        CheckpointError: the format version is not supported, or the files are inconsistent or
            altered.
    """
    metadata = read_json(directory / METADATA)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory / METADATA} has format {metadata.get('format')!r}, expected {FORMAT}: "
            "create the checkpoint again with `headrace compress` or `headrace convert`"
        )
    config = parse_config(_object(metadata, "config"), {})
    groups = _groups(metadata)
    files = SafetensorsDirectory(directory)
    source = AliasedSource.of(files, groups)
    if missing := sorted(set(source.stored.values()) - files.names()):
        raise CheckpointError(f"{METADATA} has shared_bases without a tensor {missing[0]}")
    rows = vocabulary(config)
    paths = [directory / METADATA, *files.files]
    hashed = HashedFiles.of(paths, lambda: _hash_of(config, source), known)
    if hashed.model_hash != metadata.get("model_hash"):
        raise CheckpointError(f"{directory} was altered: its content does not match its model_hash")
    optional = optional_tensors_of(config, source)
    checkpoint = assemble(config, source, optional, hashed, rows)
    ranks = {name: pair.rank for name, pair in factor_pairs(checkpoint).items()}
    if ranks != metadata.get("ranks"):
        raise CheckpointError(f"the ranks in {directory / METADATA} do not match the tensors")
    keep = number(metadata, "keep", 1.0)
    return replace(
        checkpoint,
        keep=keep,
        factorization=_factorization(metadata),
        has_lm_head=_has_lm_head(metadata),
    )


def _hash_of(config: ModelConfig, source: TensorSource) -> str:
    """Return the `canonical_hash` of a checkpoint with these tensors."""
    tensors = ((name, source.read(name)) for name in sorted(source.names()))
    return hash_tensors(_config_text(config), tensors)


def _publish(scratch: Path, directory: Path) -> None:
    try:
        scratch.rename(directory)
    except OSError as error:
        if not (directory / METADATA).is_file():
            raise CheckpointError(f"{directory} cannot be written: {error}") from error


def _config_text(config: ModelConfig) -> str:
    return json.dumps(to_huggingface(config), sort_keys=True)


def _metadata(
    checkpoint: Checkpoint, model_hash: str, ranks: Mapping[str, int], groups: Groups
) -> dict[str, Any]:
    factorization = checkpoint.factorization
    return {
        "format": FORMAT,
        "model_hash": model_hash,
        "keep": checkpoint.keep,
        "has_lm_head": checkpoint.has_lm_head,
        "factorization": None if factorization is None else asdict(factorization),
        "config": to_huggingface(checkpoint.config),
        "ranks": ranks,
        "shared_bases": groups,
    }


def _has_lm_head(metadata: Mapping[str, Any]) -> bool:
    value = metadata.get("has_lm_head", True)
    if not isinstance(value, bool):
        raise CheckpointError(f"{METADATA} has a malformed has_lm_head")
    return value


def _groups(metadata: Mapping[str, Any]) -> Groups:
    value = metadata.get("shared_bases", [])
    if isinstance(value, list) and all(
        isinstance(group, list) and len(group) > 1 and all(isinstance(n, str) for n in group)
        for group in value
    ):
        return tuple(map(tuple, value))
    raise CheckpointError(f"{METADATA} has malformed shared_bases")


def _object(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = metadata.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{METADATA} has no object {key!r}")
    return value


def _factorization(metadata: Mapping[str, Any]) -> Factorization | None:
    if metadata.get("factorization") is None:
        return None
    try:
        return Factorization(**_object(metadata, "factorization"))
    except TypeError as error:
        raise CheckpointError(f"{METADATA} has a malformed factorization: {error}") from error
