"""Atomic output of offline commands: a file or folder appears complete or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import FileSizeColumn, Progress, SpinnerColumn, TextColumn

from runtime.checkpoint import Checkpoint, write_checkpoint
from runtime.checkpoint.canonical import METADATA
from services.common.errors import SettingsError
from services.common.file_errors import naming
from services.tokenizer.huggingface import is_tokenizer_file
from services.tokenizer.tokenizer import Tokenizer

_COPIED = (".json", ".txt", ".model")
"""Suffixes of the files of a tokenizer and of sentence-transformers."""
_INDEX = ".index.json"
"""End of the names of indices of weight files."""


@contextmanager
def atomic_file(out: Path) -> Iterator[Path]:
    """Yield the path of a draft beside ``out``, which replaces ``out`` if the block succeeds.

    The draft's name has the process id, so that processes with the same output do not share it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft_of(out)
    try:
        with naming(out):
            yield draft
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)


def refuse_existing(out: Path) -> None:
    """Check before a long computation that ``out`` does not exist.

    Raises:
        SettingsError: if ``out`` exists.
    """
    if out.exists():
        raise SettingsError(f"{out} already exists: remove it, or choose another --out")


def write_model(
    checkpoint: Checkpoint, tokenizer: Tokenizer, out: Path, dtype: torch.dtype | None = None
) -> None:
    """Write a checkpoint and its tokenizer to the folder ``out``, and show the bytes written.

    Args:
        dtype: dtype to write; None keeps the dtype of each tensor.

    Raises:
        CheckpointError, OSError: if they cannot be written, or if ``out`` exists and is not an
            empty folder.
    """
    _write(checkpoint, out, dtype, tokenizer.save)


def write_encoder(
    checkpoint: Checkpoint, sources: Sequence[Path], out: Path, dtype: torch.dtype | None = None
) -> None:
    """Write an encoder to the folder ``out``, with the files beside the weights in ``sources``.

    Files of the tokenizer are read from the first folder only. Of other files with the same name,
    such as those of sentence-transformers, that of the last folder is written. Other arguments and
    errors are those of `write_model`.
    """
    _write(checkpoint, out, dtype, partial(_copy_beside, sources))


def has_modules(folder: Path) -> bool:
    """Return whether a folder names the modules of sentence-transformers."""
    return (folder / "modules.json").is_file()


def _copy_beside(sources: Sequence[Path], folder: Path) -> None:
    """Copy the files of models that are not weights, and the folders of their modules."""
    for path in chain.from_iterable(source.iterdir() for source in sources):
        if is_tokenizer_file(path) and path.parent != sources[0]:
            continue
        if path.is_file() and path.suffix in _COPIED:
            if path.name != METADATA and not path.name.endswith(_INDEX):
                shutil.copyfile(path, folder / path.name)
        elif path.is_dir() and (path / "config.json").is_file():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)


def _write(
    checkpoint: Checkpoint,
    out: Path,
    dtype: torch.dtype | None,
    write_others: Callable[[Path], None],
) -> None:
    draft = _draft_of(out)
    columns = SpinnerColumn(), TextColumn("{task.description}"), FileSizeColumn()
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(f"writing {out}", total=None)
            write_checkpoint(checkpoint, draft, dtype, partial(progress.advance, task))
        write_others(draft)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _draft_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.draft-{os.getpid()}")
