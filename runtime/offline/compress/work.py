"""Finished layers of a compression on disk, from which an interrupted one continues."""

import fcntl
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.errors import CompressionError
from runtime.offline.compress.decompose import Decomposition

_STATE, _LOCK = "state.json", "lock"
_OWN_FILES = (f"{_STATE}*", "layers-*", "carry-*")
"""Deleted in this order: without a state, a later call does not trust the remaining files."""
_LAYERS = re.compile(r"layers-(\d+)\.safetensors")


class WorkFolder:
    """A folder with the decompositions of finished layers.

    A file gets its name when it is complete and flushed to disk. Files for another ``key`` are
    deleted.

    Args:
        folder: created if it does not exist.
        key: identifies the model, the calibration and the options, see `factorize.artifact_key`.

    Raises:
        CompressionError: another process uses the folder.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise CompressionError(f"another process uses {folder}") from error
        if self._stored_key() != key:
            for pattern in _OWN_FILES:
                for path in folder.glob(pattern):
                    path.unlink()
            draft = folder / f"{_STATE}.draft"
            draft.write_text(json.dumps({"key": key}), encoding="utf-8")
            draft.replace(folder / _STATE)

    def finished(self) -> list[int]:
        """Return the first layer of each finished block, in ascending order."""
        matches = (_LAYERS.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def save(self, first: int, decompositions: Sequence[Decomposition], carry: Tensor) -> None:
        """Write the decompositions of the block that starts with layer ``first``.

        Args:
            carry: activations from which the next block is calibrated; those of other blocks are
                deleted.
        """
        # The layers are complete only if the carry is: write it first.
        self._write(self._carry_file(first), {"carry": carry})
        tensors = {
            f"{number}.{name}": tensor
            for number, one in enumerate(decompositions)
            for name, tensor in vars(one).items()
        }
        self._write(self._layers_file(first), tensors)
        for path in self._folder.glob("carry-*"):
            if path != self._carry_file(first):
                path.unlink()

    def load(self, first: int) -> list[Decomposition]:
        """Return the decompositions that `save` wrote, memory-mapped."""
        tensors = _read(self._layers_file(first))
        count = len({name.partition(".")[0] for name in tensors})
        return [
            Decomposition(tensors[f"{n}.u"], tensors[f"{n}.v"], tensors[f"{n}.loss"])
            for n in range(count)
        ]

    def carry(self, first: int) -> Tensor:
        """Return a copy of the ``carry`` of the block that was saved last."""
        return _read(self._carry_file(first))["carry"].clone()

    def remove(self) -> None:
        """Delete the files, and the folder if it is then empty. Tensors of `load` stay valid."""
        for pattern in (*_OWN_FILES, _LOCK):
            for path in self._folder.glob(pattern):
                path.unlink()
        if not any(self._folder.iterdir()):
            self._folder.rmdir()

    def close(self) -> None:
        """Release the lock, so that other processes can use the folder."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored_key(self) -> str | None:
        try:
            content = json.loads((self._folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return str(content.get("key")) if isinstance(content, dict) else None

    def _layers_file(self, first: int) -> Path:
        return self._folder / f"layers-{first:05}.safetensors"

    def _carry_file(self, first: int) -> Path:
        return self._folder / f"carry-{first:05}.safetensors"

    @staticmethod
    def _write(path: Path, tensors: dict[str, Tensor]) -> None:
        draft = path.with_suffix(".draft")
        try:
            save_file(tensors, draft)
        except SafetensorError as error:  # an OSError in safetensors, such as a full disk
            raise CompressionError(f"{path} cannot be written: {error}") from error
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        raise CompressionError(
            f"{path} is damaged: delete {path.parent} to start again ({error})"
        ) from error
