"""Read Hugging Face directories: config.json and safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.assemble import assemble
from runtime.checkpoint.hashing import hash_files
from runtime.checkpoint.huggingface_config import family_of_config, parse_config
from runtime.checkpoint.safetensors_file import SafetensorsDirectory, read_json
from runtime.checkpoint.weights import Checkpoint

CONFIG = "config.json"
_GENERATION = "generation_config.json"


def load_huggingface(
    directory: Path, dtype: torch.dtype | None, device: torch.device | str
) -> Checkpoint:
    """Read a directory with ``config.json`` and safetensors weights.

    Raises:
        CheckpointError: the architecture is not supported, tensors are missing or misshapen, or
            weights are pickled.
    """
    hf_config = read_json(directory / CONFIG)
    config = parse_config(hf_config, read_generation(directory))
    optional = family_of_config(hf_config).optional_tensors(hf_config)
    source = SafetensorsDirectory(directory)
    model_hash = hash_files([directory / CONFIG, *source.files])
    return assemble(config, source, optional, model_hash, dtype, device)


def read_generation(directory: Path) -> Mapping[str, Any]:
    """Return the content of ``generation_config.json``, empty if there is no such file."""
    path = directory / _GENERATION
    return read_json(path) if path.is_file() else {}
