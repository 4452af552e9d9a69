"""`headrace convert`: convert a checkpoint of another project to Headrace's format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from runtime.checkpoint.canonical import METADATA
from runtime.checkpoint.safetensors_file import is_pickle, read_json
from runtime.config import EncoderConfig
from runtime.offline.convert import Source
from runtime.offline.convert import convert as read
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.common.terminal import diagnostics, results
from services.offline.output import has_modules, refuse_existing, write_encoder, write_model
from services.tokenizer.huggingface import has_tokenizer
from services.tokenizer.loading import load_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def convert(model: str, out: Path, tokenizer: str | None, dtype: str) -> None:
    """Convert a checkpoint of any supported family and write it to ``out`` with its tokenizer.

    Tensors are read, converted and written one after another. The other files of the folder are
    copied for encoders, and for decoders with the ``modules.json`` of sentence-transformers.

    Args:
        model: file or folder of the checkpoint.
        out: folder to write; it must not exist.
        tokenizer: name or path of the model that has the tokenizer; None for the same model.
        dtype: float32, bfloat16, float16, or auto, which keeps the stored dtype.

    Raises:
        SettingsError: if ``out`` exists, or if the checkpoint has no tokenizer and none is named.
        CheckpointError: if the checkpoint cannot be read or written.
        TokenizerError: if the tokenizer cannot be read.
    """
    refuse_existing(out)
    source = resolve_model(model)
    original_model = resolve_model(tokenizer) if tokenizer else _own(source)
    with diagnostics().status(f"reading {source.name}"):
        converted, original = read(source)
    written = _DTYPES.get(dtype, original.dtype)
    folders = [original_model, source] if source.is_dir() else [original_model]
    if isinstance(converted.config, EncoderConfig) or any(map(has_modules, folders)):
        if not has_tokenizer(original_model):
            raise SettingsError(f"{original_model} has no tokenizer.json")
        write_encoder(converted, folders, out, written)
    else:
        write_model(converted, load_tokenizer(original_model), out, written)
    _print_report(read_json(out / METADATA), original)


def _own(source: Path) -> Path:
    """Return the file or folder with the tokenizer of a checkpoint.

    Raises:
        SettingsError: if the checkpoint has none.
    """
    folder = source.parent if is_pickle(source) else source
    if folder.is_dir() and not has_tokenizer(folder):
        raise SettingsError(
            f"{folder} has no tokenizer.json: add --tokenizer MODEL, where MODEL is the original "
            "model of this checkpoint"
        )
    return folder


def _print_report(metadata: Mapping[str, Any], original: Source) -> None:
    ranks = metadata["ranks"].values()
    table = Table("family", "stored in", "parameters kept", "factor pairs", "ranks", "shared bases")
    table.add_row(
        original.format,
        str(original.dtype).removeprefix("torch."),
        f"{metadata['keep']:.3f}",
        str(len(ranks)),
        f"{min(ranks)} to {max(ranks)}" if ranks else "-",
        str(len(metadata["shared_bases"])),
    )
    results().print(table)
