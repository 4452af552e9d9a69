"""Convert another project's checkpoint to a canonical one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.assemble import assemble, optional_tensors_of
from runtime.checkpoint.canonical import METADATA
from runtime.checkpoint.family import architectures
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.hashing import hash_tensors
from runtime.checkpoint.huggingface import CONFIG, lacks_head, read_configs, with_head
from runtime.checkpoint.huggingface_config import family_of_config, parse_config
from runtime.checkpoint.load import load_checkpoint
from runtime.checkpoint.safetensors_file import (
    INDEX,
    SINGLE,
    SafetensorsDirectory,
    is_pickle,
    weight_files,
)
from runtime.checkpoint.sharing import Groups, with_shared_bases
from runtime.checkpoint.source_format import SourceFormat
from runtime.checkpoint.stored_names import full_names, in_parts
from runtime.checkpoint.weights import Checkpoint, parameters_kept
from runtime.errors import CheckpointError
from runtime.offline.convert.formats import to_canonical
from runtime.offline.convert.pickled import read_pickled
from runtime.offline.convert.stubs import Stub, is_module, tensors_of, unwrapped

_PICKLED = "pytorch_model.bin"
_PREFIXES = ("ASVD", "Share")
"""Prefixes that ASVD and Basis Sharing add to architecture names."""


@dataclass(frozen=True)
class Source:
    """The detected format of a checkpoint, and the dtype in which to write its weights.

    Attributes:
        dtype: dtype of all weights; fp32 if they are stored in several dtypes.
    """

    format: SourceFormat
    dtype: torch.dtype


def convert(path: Path) -> tuple[Checkpoint, Source]:
    """Read a factorized or dense checkpoint of any supported format.

    Classes and functions named in a pickle are never imported or called. Tensors keep the dtype in
    which they are stored (fp32 for GGUF files) and are memory-mapped or read on demand, so the
    model is not held in memory. The model hash is empty; `write_checkpoint` computes it.

    Args:
        path: a pickled model of SVD-LLM or Dobi-SVD; a directory of SVD-LLM v2, ASVD, Basis Sharing
            or Hugging Face with safetensors or pickled weights; or a GGUF file.

    Raises:
        CheckpointError: the checkpoint is malformed, already canonical, or not supported.
    """
    if not path.is_dir() and not is_pickle(path):
        found = load_checkpoint(path, dtype=None)
        return replace(found, model_hash=""), Source(SourceFormat.DENSE, torch.float32)
    if (path / METADATA).is_file():
        raise CheckpointError(f"{path} is already a canonical checkpoint")
    try:
        return _convert(path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {type(error).__name__}") from error
    except RuntimeError as error:  # includes torch's errors and RecursionError
        raise CheckpointError(f"{path} is malformed: {type(error).__name__}") from error


def _convert(path: Path) -> tuple[Checkpoint, Source]:
    stored, generation, tensors = _read_directory(path) if path.is_dir() else _read_model(path)
    stored = _with_known_architecture(stored)
    hf_config = with_head(stored)
    family = family_of_config(hf_config)
    full = full_names(family.tensor_names, tensors)
    named = to_canonical({name: tensors[key] for name, key in full.items()})
    stored_dtype = _stored_dtype(named.tensors)
    config = parse_config(hf_config, generation)
    if named.head_was_factorized:
        config = replace(config, tied_embeddings=False)
    has_head = not lacks_head(path, stored, family.tensor_names, named.tensors)
    if not has_head:
        config = replace(config, tied_embeddings=True)
    names = {name: name for name in named.tensors}
    source = in_parts(_TensorsInMemory(named.tensors), names, family.stored_parts(config))
    if named.format is SourceFormat.DENSE:
        optional = family.optional_tensors(hf_config)
    else:  # factorized modules may have biases that the config does not declare
        optional = optional_tensors_of(config, source)
    made = assemble(config, source, optional, HashedFiles("", ()))
    made = with_shared_bases(made, _basis_groups(named.tensors, named.format))
    made = replace(made, keep=round(parameters_kept(made), 4), has_lm_head=has_head)
    return made, Source(named.format, stored_dtype)


@dataclass(frozen=True)
class _TensorsInMemory:
    """A `TensorSource` over tensors in memory."""

    tensors: Mapping[str, Tensor]

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def _basis_groups(tensors: Mapping[str, Tensor], source_format: SourceFormat) -> Groups:
    """Return the groups of linears that share a V.

    Linears share V if their V tensors use the same memory. In Basis Sharing checkpoints, linears
    with equal copies of V also share it.
    """
    owners: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if name.endswith(".v.weight"):
            key: object = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if source_format is SourceFormat.BASIS_SHARING:
                key = hash_tensors("", [("", tensor)])
            owners.setdefault(key, []).append(name.removesuffix(".v.weight"))
    return tuple(tuple(names) for names in owners.values() if len(names) > 1)


Content = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Tensor]]
"""The contents of config.json and generation_config.json, and the tensors."""


def _read_model(path: Path) -> Content:
    """Read a pickled module, such as the one in ``{"model": …, "tokenizer": …}``."""
    model = unwrapped(read_pickled(path))
    if not is_module(model):
        raise CheckpointError(
            f"{path} has no module and therefore no config: name it {_PICKLED} and pass a folder "
            f"with it, {CONFIG} and the tokenizer"
        )
    config = model.state.get("config")
    if not isinstance(config, Stub):
        raise CheckpointError(f"the model in {path} has no config")
    hf_config = _json_values(config)
    if not hf_config.get("architectures"):
        model_type = type(config).__name__.removesuffix("Config")
        hf_config["architectures"] = [f"{model_type}ForCausalLM"]
    pickled = model.state.get("generation_config")
    generation = _json_values(pickled) if isinstance(pickled, Stub) else {}
    return hf_config, generation, tensors_of(model)


def _json_values(config: Stub) -> dict[str, Any]:
    """Return the attributes of a pickled config that JSON can represent."""
    plain = (str, int, float, list, dict, type(None))
    return {key: value for key, value in config.state.items() if isinstance(value, plain)}


def _read_directory(directory: Path) -> Content:
    hf_config, generation = read_configs(directory)
    pickles = _pickles(directory)
    if not pickles:
        source = SafetensorsDirectory(directory)
        return hf_config, generation, {name: source.read(name) for name in sorted(source.names())}
    tensors: dict[str, Tensor] = {}
    for path in pickles:
        for name, tensor in tensors_of(read_pickled(path)).items():
            if name in tensors:
                raise CheckpointError(f"{name} is in more than one file of {directory}")
            tensors[name] = tensor
    return hf_config, generation, tensors


def _pickles(directory: Path) -> Sequence[Path]:
    """Return the pickled weight files of a directory, or none if it has safetensors.

    Raises:
        CheckpointError: the directory has pickles under other names only.
    """
    if weight_files(directory, SINGLE, INDEX):
        return ()
    indexed = weight_files(directory, _PICKLED, f"{_PICKLED}.index.json")
    found = indexed or sorted(directory.glob("pytorch_model*.bin"))
    others = sorted(path.name for path in directory.iterdir() if is_pickle(path))
    if others and not found:
        raise CheckpointError(
            f"{directory} has neither safetensors nor {_PICKLED}: to convert {others[0]}, pass "
            "that file, or rename it if it holds a state dict"
        )
    return found


def _with_known_architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the prefixes of `_PREFIXES` removed from architecture names.

    The ``model_type`` of such an architecture differs from that of the original, and is removed
    too.
    """
    names = hf_config.get("architectures")
    if not isinstance(names, list):
        return dict(hf_config)
    known = [_without_prefix(str(name)) for name in names]
    kept = {key: value for key, value in hf_config.items() if key != "model_type" or known == names}
    return {**kept, "architectures": known}


def _without_prefix(architecture: str) -> str:
    for prefix in _PREFIXES:
        if architecture.startswith(prefix) and architecture[len(prefix) :] in architectures():
            return architecture[len(prefix) :]
    return architecture


def _stored_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the common dtype of all weights.

    Return fp32 if weights have different dtypes, or if their dtype is neither fp16 nor bf16.
    """
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if any(kind.itemsize == 1 for kind in kinds):
        raise CheckpointError("quantized weights are not supported")
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    return kind if kind in (torch.float16, torch.bfloat16) else torch.float32
