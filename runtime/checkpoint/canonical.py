"""The canonical factorized checkpoint: a directory of ``model.safetensors`` and ``headrace.json``.

The JSON holds the config in Hugging Face's words, the rank of each factorized projection (those it
does not name are dense), ``keep``, the model hash, how the factorization was made, and which
projections share a V, which the file then has under the first one's name. Tensors have Hugging
Face's names; a factor pair is ``….u.weight`` ``[out, r]`` and ``….v.weight`` ``[r, in]``.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.checkpoint.assemble import (
    PROJECTIONS,
    Biases,
    assemble,
    layer_prefix,
    named_tensors,
)
from runtime.checkpoint.hashing import hash_tensors
from runtime.checkpoint.huggingface_config import parse_config, to_huggingface
from runtime.checkpoint.safetensors_file import SINGLE, SafetensorsDirectory, read_json
from runtime.checkpoint.sharing import Aliased, Groups, basis_groups, with_shared_bases
from runtime.checkpoint.weights import Checkpoint, Factorization, FactorPair
from runtime.config import ModelConfig
from runtime.errors import CheckpointError

FACTS = "headrace.json"
FORMAT = 1


def canonical_hash(checkpoint: Checkpoint) -> str:
    """sha256 over config and tensors: what ``model_hash`` is for a canonical checkpoint."""
    tensors = sorted(named_tensors(checkpoint), key=lambda item: item[0])
    return hash_tensors(_config_text(checkpoint.config), tensors)


def write_checkpoint(checkpoint: Checkpoint, directory: Path) -> None:
    """Write ``checkpoint`` as ``directory``, in the dtypes its tensors have.

    The directory appears complete or not at all: it is written under a temporary name beside and
    renamed. A canonical checkpoint that is already there, by this process or another, stays.

    Raises `CheckpointError` if ``directory`` exists and holds anything else.
    """
    checkpoint = replace(checkpoint, model_hash=canonical_hash(checkpoint))
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        groups = basis_groups(checkpoint)
        again = {f"{name}.v.weight" for _, *others in groups for name in others}
        tensors: dict[str, Tensor] = {}
        stored: set[int] = set()
        for name, tensor in named_tensors(checkpoint):
            if name not in again:
                whole = tensor.contiguous()
                shared = whole.untyped_storage().data_ptr() in stored  # which the file cannot say
                tensors[name] = whole.clone() if shared else whole
                stored.add(whole.untyped_storage().data_ptr())
        save_file(tensors, scratch / SINGLE)
        (scratch / FACTS).write_text(json.dumps(_facts(checkpoint), indent=1), encoding="utf-8")
        scratch.chmod(0o755)
        _publish(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_canonical(directory: Path, dtype: torch.dtype, device: torch.device | str) -> Checkpoint:
    """Read what `write_checkpoint` wrote, and verify its ranks and its hash.

    Raises `CheckpointError` if the files are of another format, do not fit, or were altered.
    """
    facts = read_json(directory / FACTS)
    if facts.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory / FACTS} has format {facts.get('format')!r}, this version reads {FORMAT}"
        )
    config = parse_config(_object(facts, "config"), {})
    groups = _groups(facts)
    source = Aliased.of(SafetensorsDirectory(directory), groups)
    stored_hash = hash_tensors(
        _config_text(config), ((name, source.read(name)) for name in sorted(source.names()))
    )
    if stored_hash != facts.get("model_hash"):
        raise CheckpointError(f"{directory} was altered: its content does not have its model_hash")
    biases = Biases.present(source.names())
    checkpoint = assemble(config, source, biases, stored_hash, dtype, device)
    checkpoint = with_shared_bases(checkpoint, groups)
    if _ranks(checkpoint) != facts.get("ranks"):
        raise CheckpointError(f"{directory / FACTS} gives ranks that its tensors do not have")
    return replace(
        checkpoint, keep=float(facts.get("keep", 1.0)), factorization=_factorization(facts)
    )


def _publish(scratch: Path, directory: Path) -> None:
    try:
        scratch.rename(directory)
    except OSError as error:
        if not (directory / FACTS).is_file():
            raise CheckpointError(f"{directory} cannot be written: {error}") from error


def _config_text(config: ModelConfig) -> str:
    return json.dumps(to_huggingface(config), sort_keys=True)


def _ranks(checkpoint: Checkpoint) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for index, layer in enumerate(checkpoint.layers):
        for projection, name in PROJECTIONS.items():
            linear = getattr(layer, projection)
            if isinstance(linear, FactorPair):
                ranks[layer_prefix(index) + name] = linear.rank
    return ranks


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    factorization = checkpoint.factorization
    return {
        "format": FORMAT,
        "model_hash": checkpoint.model_hash,
        "keep": checkpoint.keep,
        "factorization": None if factorization is None else asdict(factorization),
        "config": to_huggingface(checkpoint.config),
        "ranks": _ranks(checkpoint),
        "shared_bases": basis_groups(checkpoint),
    }


def _groups(facts: Mapping[str, Any]) -> Groups:
    value = facts.get("shared_bases", [])
    if isinstance(value, list) and all(
        isinstance(group, list) and len(group) > 1 and all(isinstance(n, str) for n in group)
        for group in value
    ):
        return tuple(map(tuple, value))
    raise CheckpointError(f"{FACTS} has malformed shared_bases")


def _object(facts: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = facts.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{FACTS} has no object {key!r}")
    return value


def _factorization(facts: Mapping[str, Any]) -> Factorization | None:
    if facts.get("factorization") is None:
        return None
    try:
        return Factorization(**_object(facts, "factorization"))
    except TypeError as error:
        raise CheckpointError(f"{FACTS} has a malformed factorization: {error}") from error
