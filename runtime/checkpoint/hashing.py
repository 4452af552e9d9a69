"""Hashes that identify a model. Workers that exchange KV must have the same model hash."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


def hash_files(paths: Iterable[Path]) -> str:
    """Return the sha256 of the names and contents of files, in the given order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
        digest.update(path.name.encode() + b"\0" + content.digest())
    return digest.hexdigest()


def hash_tensors(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the sha256 of a text, followed by name, dtype, shape and bytes of each tensor in
    order.

    Tensors in memory and the same tensors read back from a file have the same hash.
    """
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors:
        digest.update(f"\0{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
