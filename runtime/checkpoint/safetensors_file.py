"""Read and write safetensors files, single or sharded, and read JSON objects."""

import json
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.checkpoint.source_format import conversion
from runtime.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
"""Size at which `ShardWriter` starts a new file."""
_STATE_DICTS = "pytorch_model*.bin"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def is_pickle(path: Path) -> bool:
    return path.suffix.lower() in _PICKLES


def pickles(directory: Path) -> list[Path]:
    """Return the pickled files of a directory, sorted by name."""
    return sorted(path for path in directory.iterdir() if is_pickle(path))


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
        self.files = _safetensors_files(directory)
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


class ShardWriter:
    """Writes tensors to ``model.safetensors``, or to several shards and an index.

    At most one shard is held in memory. Use it as a context manager: on success, leaving it writes
    the last shard and the index. The tensors must not change before that.
    """

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._shards: dict[str, list[str]] = {}
        self._pending: dict[str, Tensor] = {}
        self._storages: set[int] = set()
        self._bytes = self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of any layout, on any device."""
        if self._pending and self._bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        whole = tensor.cpu().contiguous()
        # safetensors rejects tensors that share memory.
        if whole.untyped_storage().data_ptr() in self._storages:
            whole = whole.clone()
        self._storages.add(whole.untyped_storage().data_ptr())
        self._pending[name] = whole
        self._bytes += whole.nbytes
        self._total_bytes += whole.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self._flush()
        if len(self._shards) == 1:
            (self._directory / next(iter(self._shards))).rename(self._directory / SINGLE)
            return
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": {name: shard for shard, names in self._shards.items() for name in names},
        }
        (self._directory / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def _flush(self) -> None:
        shard = f"model-{len(self._shards) + 1:05}.safetensors"
        try:
            save_file(self._pending, self._directory / shard)
        except SafetensorError as error:  # an OSError in safetensors, such as a full disk
            raise CheckpointError(f"{self._directory} cannot be written: {error}") from error
        (self._directory / shard).chmod(0o644)  # safetensors creates files that only we can read
        self._shards[shard] = list(self._pending)
        self._pending = {}
        self._storages = set()
        self._bytes = 0


def weight_files(directory: Path, single: str, index: str) -> tuple[Path, ...]:
    """Return the file ``single``, else the shards that ``index`` lists, else nothing.

    As in transformers, an index beside a single file is ignored: it is left from an earlier save.

    Raises:
        CheckpointError: the index is malformed, or a shard is missing.
    """
    if (directory / single).is_file():
        return (directory / single,)
    if not (directory / index).is_file():
        return ()
    weight_map = read_json(directory / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / index} has no weight_map")
    paths = tuple(directory / name for name in sorted(set(map(str, weight_map.values()))))
    for path in paths:
        if path.parent != directory or not path.is_file():
            raise CheckpointError(
                f"{index} lists the shard {path.name!r}, which is not in {directory}"
            )
    return paths


def _safetensors_files(directory: Path) -> tuple[Path, ...]:
    if files := weight_files(directory, SINGLE, INDEX):
        return files
    if found := pickles(directory):
        model = directory if found[0].match(_STATE_DICTS) else found[0]
        raise CheckpointError(
            f"{directory} has pickled weights only ({found[0].name}), which servers never read: "
            f"{conversion(model)}"
        )
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}")
