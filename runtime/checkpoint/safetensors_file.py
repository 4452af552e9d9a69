"""Read safetensors files, single or sharded, and JSON objects."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def is_pickle(path: Path) -> bool:
    return path.suffix.lower() in _PICKLES


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``. Raises `CheckpointError` if it has none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


class SafetensorsDirectory:
    """A `TensorSource` over ``model.safetensors``, or over the shards that the index lists.

    Raises:
        CheckpointError: the directory has neither file, or has only pickled weights.
    """

    def __init__(self, directory: Path) -> None:
        self.files = _weight_files(directory)
        self._opened: dict[str, Any] = {}
        for path in self.files:
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
            for name in file.offset_keys():
                if name in self._opened:
                    raise CheckpointError(f"{name} is in more than one file of {directory}")
                self._opened[name] = file

    def names(self) -> frozenset[str]:
        return frozenset(self._opened)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[name].get_tensor(name)
        return tensor


def _weight_files(directory: Path) -> tuple[Path, ...]:
    index = directory / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        return tuple(_shard(directory, name) for name in sorted(set(map(str, weight_map.values()))))
    if (directory / SINGLE).is_file():
        return (directory / SINGLE,)
    pickled = sorted(path.name for path in directory.iterdir() if is_pickle(path))
    if pickled:
        raise CheckpointError(
            f"{directory} has pickled weights only ({pickled[0]}), which are never read: "
            "save the model as safetensors"
        )
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}")


def _shard(directory: Path, name: str) -> Path:
    path = directory / name
    if path.parent != directory or not path.is_file():
        raise CheckpointError(f"{INDEX} lists the shard {name!r}, which is not in {directory}")
    return path
