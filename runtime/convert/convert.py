"""From another code's checkpoint to a canonical one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.assemble import Biases, assemble
from runtime.checkpoint.canonical import FACTS, canonical_hash
from runtime.checkpoint.hashing import hash_tensors
from runtime.checkpoint.huggingface import CONFIG, read_generation
from runtime.checkpoint.huggingface_config import ARCHITECTURES, parse_config
from runtime.checkpoint.load import load_checkpoint
from runtime.checkpoint.safetensors_file import (
    INDEX,
    SINGLE,
    SafetensorsDirectory,
    is_pickle,
    read_json,
)
from runtime.checkpoint.sharing import Groups, with_shared_bases
from runtime.checkpoint.weights import Checkpoint, parameters_kept
from runtime.convert.families import Family, to_canonical
from runtime.convert.pickled import read_pickled
from runtime.convert.stubs import Stub, tensors_of
from runtime.errors import CheckpointError

_PREFIXES = ("ASVD", "Share")
"""What the codes put before the name of the architecture that they change."""


@dataclass(frozen=True)
class Source:
    """What was found: the family, and the type that its weights are stored in."""

    family: Family
    dtype: torch.dtype


def convert(path: Path, dtype: torch.dtype | None = None) -> tuple[Checkpoint, Source]:
    """Read a factorized or dense checkpoint of any supported family.

    Args:
        path: a pickled model of SVD-LLM or Dobi-SVD; a directory of SVD-LLM v2, ASVD, Basis Sharing
            or Hugging Face, as safetensors or pickled; a GGUF file.
        dtype: of the result; None keeps the one the weights are stored in.

    Nothing that a pickle names is imported or run. Raises `CheckpointError`.
    """
    if not path.is_dir() and not is_pickle(path):
        found = load_checkpoint(path, dtype or torch.float32)
        return found, Source(Family.DENSE, torch.float32)
    if (path / FACTS).is_file():
        raise CheckpointError(f"{path} is a canonical checkpoint already")
    try:
        return _convert(path, dtype)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {type(error).__name__}") from error
    except RuntimeError as error:  # torch's, and a recursion without end
        raise CheckpointError(f"{path} is malformed: {type(error).__name__}") from error


def _convert(path: Path, dtype: torch.dtype | None) -> tuple[Checkpoint, Source]:
    facts, generation, tensors = _read_directory(path) if path.is_dir() else _read_model(path)
    named = to_canonical(tensors)
    stored = _stored_dtype(named.tensors)
    config = parse_config(_understood(facts), generation)
    if named.head_was_factorized:
        config = replace(config, tied_embeddings=False)
    biases = Biases.present(named.tensors)
    made = assemble(config, _Tensors(named.tensors), biases, "", dtype or stored, "cpu")
    made = with_shared_bases(made, _groups(named.tensors, named.family))
    made = replace(made, keep=round(parameters_kept(made), 4))
    return replace(made, model_hash=canonical_hash(made)), Source(named.family, stored)


@dataclass(frozen=True)
class _Tensors:
    """Tensors in memory, as `assemble` reads them."""

    tensors: Mapping[str, Tensor]

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def _groups(tensors: Mapping[str, Tensor], family: Family) -> Groups:
    """The projections whose V are the same tensor; of Basis Sharing, also copies of one."""
    owners: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if name.endswith(".v.weight"):
            key: object = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if family is Family.BASIS_SHARING:
                key = hash_tensors("", [("", tensor)])
            owners.setdefault(key, []).append(name.removesuffix(".v.weight"))
    return tuple(tuple(names) for names in owners.values() if len(names) > 1)


Content = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Tensor]]
"""A model's config, what it says about generation, and its tensors."""


def _read_model(path: Path) -> Content:
    """A pickled ``{"model": …, "tokenizer": …}``."""
    content = read_pickled(path)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, Stub):
        raise CheckpointError(f"{path} is no pickled model: it has no module under 'model'")
    config = model.state.get("config")
    if not isinstance(config, Stub):
        raise CheckpointError(f"the model in {path} has no config")
    facts = _plain_facts(config)
    if not facts.get("architectures"):
        family = type(config).__name__.removesuffix("Config")
        facts["architectures"] = [f"{family}ForCausalLM"]
    generation = model.state.get("generation_config")
    said = _plain_facts(generation) if isinstance(generation, Stub) else {}
    return facts, said, tensors_of(model)


def _plain_facts(config: Stub) -> dict[str, Any]:
    """What a pickled config says in JSON's types."""
    plain = (str, int, float, list, dict, type(None))
    return {key: value for key, value in config.state.items() if isinstance(value, plain)}


def _read_directory(directory: Path) -> Content:
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}: it is no model directory")
    facts, generation = read_json(directory / CONFIG), read_generation(directory)
    pickles = _pickles(directory)
    if not pickles:
        source = SafetensorsDirectory(directory)
        return facts, generation, {name: source.read(name) for name in sorted(source.names())}
    tensors: dict[str, Tensor] = {}
    for path in pickles:
        for name, tensor in tensors_of(read_pickled(path)).items():
            if name in tensors:
                raise CheckpointError(f"{name} is in more than one file of {directory}")
            tensors[name] = tensor
    return facts, generation, tensors


def _pickles(directory: Path) -> list[Path]:
    """The weights of a directory without a model in safetensors: one file, or its shards."""
    if (directory / SINGLE).is_file() or (directory / INDEX).is_file():
        return []
    index = directory / "pytorch_model.bin.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index} names files outside of {directory}")
        return [directory / name for name in names]
    return sorted(directory.glob("pytorch_model*.bin"))


def _understood(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose architecture is Hugging Face's own name for it."""
    named = facts.get("architectures")
    if not isinstance(named, list):
        return dict(facts)
    return {**facts, "architectures": [_without_prefix(str(name)) for name in named]}


def _without_prefix(architecture: str) -> str:
    for prefix in _PREFIXES:
        if architecture.startswith(prefix) and architecture[len(prefix) :] in ARCHITECTURES:
            return architecture[len(prefix) :]
    return architecture


def _stored_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The one type of all weights, or fp32 if they have several, or one that is not served."""
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if any(kind.itemsize == 1 for kind in kinds):
        raise CheckpointError("quantized weights are not read")
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    return kind if kind in (torch.float16, torch.bfloat16) else torch.float32
