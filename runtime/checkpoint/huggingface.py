"""Read Hugging Face directories: config.json and safetensors.

Decoders that were trained to embed, such as Qwen3-Embedding, have no LM head. Their config names
the model without head (``Qwen3Model``), or the files are a folder of sentence-transformers that
lacks the tensor, whatever ``tie_word_embeddings`` says.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.checkpoint.assemble import RowsOf, assemble
from runtime.checkpoint.family import TensorNames, architectures
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.hashing import hash_files
from runtime.checkpoint.huggingface_config import architecture_of, family_of_config, parse_config
from runtime.checkpoint.safetensors_file import SafetensorsDirectory, pickles, read_json
from runtime.checkpoint.source_format import SourceFormat, conversion, format_of
from runtime.checkpoint.stored_names import full_names, in_parts
from runtime.checkpoint.weights import Checkpoint
from runtime.errors import CheckpointError

CONFIG = "config.json"
_GENERATION = "generation_config.json"
_ADAPTER = "adapter_config.json"
_MODULES = "modules.json"
_WITHOUT_HEAD, _WITH_HEAD = "Model", "ForCausalLM"


def load_huggingface(directory: Path, known: HashedFiles | None, vocabulary: RowsOf) -> Checkpoint:
    """Read a directory with ``config.json`` and safetensors weights, which are memory-mapped.

    For the arguments, see `runtime.checkpoint.load.load_checkpoint`.

    Raises:
        CheckpointError: the architecture is not supported, tensors are missing or misshapen, or
            weights are pickled.
    """
    stored_config, generation = read_configs(directory)
    hf_config = with_head(stored_config)
    source = SafetensorsDirectory(directory)
    if (written_by := format_of(source.names())) is not SourceFormat.DENSE:
        raise CheckpointError(
            f"{directory} has factors as in {written_by} checkpoints: {conversion(directory)}"
        )
    config = parse_config(hf_config, generation)
    rows = vocabulary(config)
    family = family_of_config(hf_config)
    optional = family.optional_tensors(hf_config)
    names = full_names(family.tensor_names, source.names())
    has_head = not lacks_head(directory, stored_config, family.tensor_names, names)
    if not has_head:
        config = replace(config, tied_embeddings=True)
    tensors = in_parts(source, names, family.stored_parts(config))
    hashed_paths = [directory / CONFIG, *source.files]
    paths = [*hashed_paths, directory / _GENERATION] if generation else hashed_paths
    hashed = HashedFiles.of(paths, lambda: hash_files(hashed_paths), known)
    checkpoint = assemble(config, tensors, optional, hashed, rows)
    return checkpoint if has_head else replace(checkpoint, has_lm_head=False)


def with_head(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the architecture with an LM head instead of the one without.

    The config itself is returned if its architecture is supported, or has no such counterpart.
    """
    name = architecture_of(hf_config) or ""
    known = architectures()
    headed = name.removesuffix(_WITHOUT_HEAD) + _WITH_HEAD
    if name in known or not name.endswith(_WITHOUT_HEAD) or headed not in known:
        return hf_config
    return {**hf_config, "architectures": [headed]}


def lacks_head(
    path: Path, hf_config: Mapping[str, Any], names: TensorNames, stored: Collection[str]
) -> bool:
    """Return whether a checkpoint is an embedder without LM head.

    Args:
        path: its directory, or its file.
        hf_config: the stored config, before `with_head`.
        names: tensor names of its family.
        stored: full names of its tensors.
    """
    if with_head(hf_config) is not hf_config:
        return True
    return (path / _MODULES).is_file() and bool(names.lm_head) and names.lm_head not in stored


def read_configs(directory: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the contents of ``config.json`` and ``generation_config.json``, which may be missing.

    Raises:
        CheckpointError: a file is malformed, or the directory has an adapter.
    """
    if not (directory / CONFIG).is_file():
        found = pickles(directory)
        hint = f"; if {found[0].name} is a model, {conversion(found[0])}" if found else ""
        raise CheckpointError(f"{directory} is not a model directory: no {CONFIG}{hint}")
    if (directory / _ADAPTER).is_file():
        raise CheckpointError(
            f"{directory} has {_ADAPTER}, and adapters are not supported: merge the adapter into "
            f"the model, or remove the file to use the model without it"
        )
    generation = directory / _GENERATION
    return read_json(directory / CONFIG), read_json(generation) if generation.is_file() else {}
