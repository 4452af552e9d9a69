"""A checkpoint and its tokenizer in one folder, which appears complete or not at all."""

import os
import shutil
from pathlib import Path

from runtime.checkpoint import Checkpoint, write_checkpoint
from services.common.errors import SettingsError
from services.common.tokenizer import Tokenizer


def refuse_existing(out: Path) -> None:
    """Raises SettingsError if there is something at ``out``: it would be for nothing."""
    if out.exists():
        raise SettingsError(f"{out} exists already")


def write_model(checkpoint: Checkpoint, tokenizer: Tokenizer, out: Path) -> None:
    """Writes both to ``out``.

    Raises:
        CheckpointError, OSError: it cannot be written, or something is there already.
    """
    draft = out.with_name(f"{out.name}.draft-{os.getpid()}")
    try:
        write_checkpoint(checkpoint, draft)
        tokenizer.save(draft)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
