"""Reads Hugging Face directories: config.json and safetensors of the Llama family."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.assemble import Biases, assemble
from runtime.checkpoint.hashing import hash_files
from runtime.checkpoint.huggingface_config import parse_biases, parse_config
from runtime.checkpoint.safetensors_file import SafetensorsDirectory, read_json
from runtime.checkpoint.weights import Checkpoint

CONFIG = "config.json"
_GENERATION = "generation_config.json"


def load_huggingface(directory: Path, dtype: torch.dtype, device: torch.device | str) -> Checkpoint:
    """Read a directory with ``config.json`` and safetensors weights.

    End-of-sequence tokens are those of ``generation_config.json`` and of ``config.json`` together:
    chat models name the end of a turn only in the former.

    Raises `CheckpointError` for unsupported architectures, missing or misshapen tensors and
    pickled weights.
    """
    facts = read_json(directory / CONFIG)
    config = parse_config(facts, read_generation(directory))
    biases: Biases = parse_biases(facts)
    source = SafetensorsDirectory(directory)
    model_hash = hash_files([directory / CONFIG, *source.files])
    return assemble(config, source, biases, model_hash, dtype, device)


def read_generation(directory: Path) -> Mapping[str, Any]:
    """``generation_config.json``, empty if there is none."""
    path = directory / _GENERATION
    return read_json(path) if path.is_file() else {}
