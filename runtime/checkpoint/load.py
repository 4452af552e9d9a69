"""One entrance for every file a model can come in."""

from pathlib import Path

import torch

from runtime.checkpoint.gguf_file import MAGIC, load_gguf
from runtime.checkpoint.weights import Checkpoint
from runtime.errors import CheckpointError


def load_checkpoint(
    path: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Checkpoint:
    """Read a model as ``dtype`` on ``device``; the content of ``path`` decides the reader.

    - a GGUF file of the Llama architecture.

    Raises `CheckpointError` naming what is missing, misshapen or unsupported. Nothing is ever
    unpickled.
    """
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
        if magic == MAGIC:
            return load_gguf(path, dtype, device)
    raise CheckpointError(f"{path} is no GGUF file")
