"""Hashes that identify a model. Workers that exchange KV must have the same model hash.

Contents are hashed as a tree of two levels, so that several cores can work on one file:

- The content of a file or tensor is divided into blocks of `BLOCK_BYTES`; the last one may be
  shorter. The digest of a block is ``SHA-256(0x00 || block)``.
- The hash is ``SHA-256(0x01 || first || part || part || …)``. ``first`` is a text in UTF-8 (empty
  for files). Each part is the label of a file or tensor, its number of bytes as 8 bytes in
  little-endian order, and the digests of its blocks. Texts are preceded by their length, in 8 bytes
  as well.

As with a plain SHA-256, contents with equal hashes cannot be constructed: the prefixes distinguish
blocks from the root, and the lengths determine where each label and each digest begins.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runtime.errors import CheckpointError

BLOCK_BYTES = 16 << 20
"""Bytes of a block. The hash depends on it."""
_READ_BYTES = 1 << 20
_MAX_THREADS = 32
_LEAF, _ROOT = b"\0", b"\1"

_Digest = Callable[[], bytes]
_Part = tuple[str, int, Iterable[_Digest]]
"""Label, number of bytes, and a function for each block that returns its digest."""


def hash_files(paths: Iterable[Path]) -> str:
    """Return the hash of the names and contents of files, in the given order.

    Raises:
        CheckpointError: a file became shorter while it was read.
    """
    return _tree_hash("", (_file_part(path) for path in paths))


def hash_tensors(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the hash of a text and of tensors: their names, dtypes, shapes and bytes, in order.

    Tensors in memory and the same tensors read back from a file have the same hash. Tensors that
    are on the CPU and contiguous, such as memory-mapped ones, are not copied; of others, only the
    few whose blocks are being hashed are in memory at the same time.
    """
    return _tree_hash(text, (_tensor_part(name, tensor) for name, tensor in tensors))


def _tree_hash(text: str, parts: Iterable[_Part]) -> str:
    """Return the hash of a text and of parts, whose blocks are hashed in a pool of threads."""
    root = hashlib.sha256(_ROOT + _with_length(text))
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    pending: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(threads, "hash") as pool:
        for item in _items(parts):
            pending.append(pool.submit(item))
            if len(pending) > 2 * threads:
                root.update(pending.popleft().result())
        for found in pending:
            root.update(found.result())
    return root.hexdigest()


def _items(parts: Iterable[_Part]) -> Iterator[_Digest]:
    """Yield functions that return the input of the root: headers of parts and digests of blocks."""
    for label, size, blocks in parts:
        yield partial(bytes, _with_length(label) + _number(size))
        yield from blocks


def _file_part(path: Path) -> _Part:
    size = path.stat().st_size
    starts = range(0, size, BLOCK_BYTES)
    blocks = (partial(_file_digest, path, at, min(BLOCK_BYTES, size - at)) for at in starts)
    return path.name, size, blocks


def _file_digest(path: Path, start: int, count: int) -> bytes:
    """Return the digest of ``count`` bytes of a file. It needs memory for one read only."""
    leaf = hashlib.sha256(_LEAF)
    buffer = memoryview(bytearray(min(_READ_BYTES, count)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while count:
            read = file.readinto(buffer[:count])
            if not read:
                raise CheckpointError(f"{path} became shorter while it was read")
            leaf.update(buffer[:read])
            count -= read
    return leaf.digest()


def _tensor_part(name: str, tensor: Tensor) -> _Part:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    starts = range(0, len(data), BLOCK_BYTES)
    blocks = (partial(_memory_digest, data[start:][:BLOCK_BYTES]) for start in starts)
    return f"{name} {tensor.dtype} {list(tensor.shape)}", len(data), blocks


def _memory_digest(block: memoryview) -> bytes:
    leaf = hashlib.sha256(_LEAF)
    leaf.update(block)
    return leaf.digest()


def _with_length(text: str) -> bytes:
    encoded = text.encode()
    return _number(len(encoded)) + encoded


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
