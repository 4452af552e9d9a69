"""The tree hash of models: its definition, what it depends on, and files that change."""

import hashlib
import os
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import hashing
from runtime.checkpoint.hashing import hash_files, hash_tensors
from runtime.errors import CheckpointError

BLOCK = 1 << 12
Parts = list[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(hashing, "_READ_BYTES", 1000)  # not a divisor of the block


def defined_hash(text: str, parts: Parts) -> str:
    """Return the hash as the module's docstring defines it, computed serially."""
    root = hashlib.sha256(b"\1" + len(text).to_bytes(8, "little") + text.encode())
    for label, content in parts:
        root.update(len(label.encode()).to_bytes(8, "little") + label.encode())
        root.update(len(content).to_bytes(8, "little"))
        for start in range(0, len(content), BLOCK):
            root.update(hashlib.sha256(b"\0" + content[start : start + BLOCK]).digest())
    return root.hexdigest()


def files(folder: Path, parts: Parts) -> list[Path]:
    for name, content in parts:
        (folder / name).write_bytes(content)
    return [folder / name for name, _ in parts]


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 400 * BLOCK + 7])
def test_hash_of_files_follows_its_definition(size: int, tmp_path: Path) -> None:
    parts = [("config.json", b"{}"), ("é.safetensors", os.urandom(size))]
    assert hash_files(files(tmp_path, parts)) == defined_hash("", parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hash_of_tensors_follows_its_definition(dtype: torch.dtype) -> None:
    tensors = [(f"t{n}", torch.randn(n * 700, 3).to(dtype)) for n in range(4)]
    parts = [
        (f"{name} {dtype} {list(tensor.shape)}", tensor.view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors
    ]
    assert hash_tensors("config", tensors) == defined_hash("config", parts)
    strided = [(name, tensor.t().contiguous().t()) for name, tensor in tensors]
    assert hash_tensors("config", strided) == hash_tensors("config", tensors)


def test_one_changed_byte_changes_the_hash(tmp_path: Path) -> None:
    content = bytearray(5 * BLOCK)
    hashes = {hash_files(files(tmp_path, [("a", bytes(content))]))}
    for at in (0, BLOCK - 1, BLOCK, 5 * BLOCK - 1):
        content[at] ^= 1
        hashes.add(hash_files(files(tmp_path, [("a", bytes(content))])))
        content[at] ^= 1
    assert len(hashes) == 5


def test_content_moved_between_blocks_files_or_names_changes_the_hash(tmp_path: Path) -> None:
    first, second = b"x" * BLOCK, b"y" * BLOCK
    variants: list[Parts] = [
        [("a", first + second)],
        [("a", second + first)],
        [("a", first), ("b", second)],
        [("b", first), ("a", second)],
        [("a", first + second), ("b", b"")],
        [("a", b""), ("b", first + second)],
        [("ab", first + second)],
    ]
    assert len({hash_files(files(tmp_path, parts)) for parts in variants}) == len(variants)


def test_a_file_of_block_digests_does_not_have_the_hash_of_the_blocks(tmp_path: Path) -> None:
    content = os.urandom(2 * BLOCK)
    blocks = (content[:BLOCK], content[BLOCK:])
    digests = b"".join(hashlib.sha256(b"\0" + block).digest() for block in blocks)
    original = hash_files(files(tmp_path, [("a", content)]))
    assert hash_files(files(tmp_path, [("a", digests)])) != original


def test_file_that_becomes_shorter_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = files(tmp_path, [("weights", bytes(3 * BLOCK))])
    digest_of = hashing._file_digest

    def truncating(path: Path, start: int, count: int) -> bytes:
        os.truncate(path, BLOCK)
        return digest_of(path, start, count)

    monkeypatch.setattr(hashing, "_file_digest", truncating)
    with pytest.raises(CheckpointError, match="weights became shorter"):
        hash_files([path])
