"""Hashes that identify a model: two workers that exchange KV must have the same one."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


def hash_files(paths: Iterable[Path]) -> str:
    """sha256 over the names and contents of files, in the given order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
        digest.update(path.name.encode() + b"\0" + content.digest())
    return digest.hexdigest()


def hash_tensors(facts: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over a text and over names, dtypes, shapes and bytes of tensors, in the given order.

    Gives the same for tensors in memory and for those read back from a file.
    """
    digest = hashlib.sha256(facts.encode())
    for name, tensor in tensors:
        digest.update(f"\0{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
