"""Checkpoints that one process hashes for others: equal files are accepted, all others refused."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.checkpoint import huggingface as huggingface_module
from runtime.checkpoint import load_checkpoint, write_checkpoint
from runtime.checkpoint.hashing import hash_files
from runtime.errors import CheckpointError
from tests.runtime.checkpoint.gguf_samples import tiny_model, write_gguf
from tests.runtime.checkpoint.samples import change_config, save_random
from tests.runtime.tiny import tiny_checkpoint


def canonical(path: Path) -> None:
    write_checkpoint(tiny_checkpoint(ranks=(4,) * 7), path)


def huggingface(path: Path) -> None:
    save_random("llama", path, max_shard_size="40KB")


def gguf(path: Path) -> None:
    write_gguf(tiny_model(tied=True), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    huggingface(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("write", [canonical, huggingface, gguf])
def test_files_that_another_process_hashed_are_not_hashed_again(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    write(path)
    first = load_checkpoint(path, dtype=None)
    known = pickle.loads(pickle.dumps(first.hashed))
    for module in ("canonical", "huggingface", "gguf_file"):
        for function in ("hash_files", "hash_tensors"):
            monkeypatch.setattr(f"runtime.checkpoint.{module}.{function}", None, raising=False)
    again = load_checkpoint(path, dtype=None, known=known)
    assert again.model_hash == first.model_hash != ""
    assert again.hashed == first.hashed


@pytest.mark.parametrize("write", [canonical, huggingface, gguf])
def test_a_copy_of_the_files_is_refused(write: Callable[[Path], None], tmp_path: Path) -> None:
    path, copy = tmp_path / "one" / "model", tmp_path / "two" / "model"
    path.parent.mkdir()
    copy.parent.mkdir()
    write(path)
    known = load_checkpoint(path, dtype=None).hashed
    if path.is_dir():
        shutil.copytree(path, copy)
    else:
        shutil.copy2(path, copy)
    with pytest.raises(CheckpointError, match=f"different files: {copy}.* read as {path}"):
        load_checkpoint(copy, dtype=None, known=known)
    if path.is_dir():
        shutil.rmtree(copy)
        copy.symlink_to(path)
        assert load_checkpoint(copy, dtype=None, known=known).model_hash == known.model_hash


def touch(folder: Path) -> None:
    os.utime(folder / "config.json", ns=(0, 1))


def change(folder: Path) -> None:
    change_config(folder, rms_norm_eps=1e-3)


def replace_shard(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    shutil.copy2(shard, folder / "copy")
    (folder / "copy").replace(shard)


def add_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')


@pytest.mark.parametrize(
    ("alter", "name"),
    [
        (touch, "config.json"),
        (change, "config.json"),
        (replace_shard, "model-00001-of"),
        (add_file, "only one of two ranks.*generation_config.json"),
    ],
)
def test_files_that_changed_since_they_were_hashed_are_refused(
    alter: Callable[[Path], None], name: str, folder: Path
) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    known = load_checkpoint(folder, dtype=None).hashed
    alter(folder)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder, dtype=None, known=known)


def test_files_that_change_while_they_are_hashed_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hash_and_write(paths: list[Path]) -> str:
        found = hash_files(paths)
        replace_shard(folder)
        return found

    monkeypatch.setattr(huggingface_module, "hash_files", hash_and_write)
    with pytest.raises(CheckpointError, match=r"00001-of.*safetensors changed while it was read"):
        load_checkpoint(folder, dtype=None)
