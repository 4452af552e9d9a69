"""Read Hugging Face directories: config.json and safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.checkpoint.assemble import RowsOf, assemble
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.hashing import hash_files
from runtime.checkpoint.huggingface_config import family_of_config, parse_config
from runtime.checkpoint.safetensors_file import SafetensorsDirectory, pickles, read_json
from runtime.checkpoint.source_format import SourceFormat, conversion, format_of
from runtime.checkpoint.stored_names import full_names, in_parts
from runtime.checkpoint.weights import Checkpoint
from runtime.errors import CheckpointError

CONFIG = "config.json"
_GENERATION = "generation_config.json"
_ADAPTER = "adapter_config.json"


def load_huggingface(directory: Path, known: HashedFiles | None, vocabulary: RowsOf) -> Checkpoint:
    """Read a directory with ``config.json`` and safetensors weights, which are memory-mapped.

    For the arguments, see `runtime.checkpoint.load.load_checkpoint`.

    Raises:
        CheckpointError: the architecture is not supported, tensors are missing or misshapen, or
            weights are pickled.
    """
    hf_config, generation = read_configs(directory)
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
    tensors = in_parts(source, names, family.stored_parts(config))
    hashed_paths = [directory / CONFIG, *source.files]
    paths = [*hashed_paths, directory / _GENERATION] if generation else hashed_paths
    hashed = HashedFiles.of(paths, lambda: hash_files(hashed_paths), known)
    return assemble(config, tensors, optional, hashed, rows)


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
