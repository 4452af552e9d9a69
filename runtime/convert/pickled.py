"""Reads pickled PyTorch files without running anything that they name.

A pickle is a program that calls what it likes. This reader knows the few names that tensors are
made of; any other name becomes a `Stub`, a record of what the file says of it, and is never
imported. So a whole pickled model can be read, whatever classes it was made of.
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from runtime.errors import CheckpointError

_STORAGES: dict[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64)
}
_CONTAINERS = {"dict": dict, "list": list, "set": set, "tuple": tuple}


class Stub:
    """An object of a class that is not imported: its state, its items, its elements."""

    state: dict[str, Any]
    items: dict[Any, Any]
    elements: list[Any]

    def __new__(cls, *_arguments: Any, **_named: Any) -> "Stub":
        made = super().__new__(cls)
        made.state, made.items, made.elements = {}, {}, []
        return made

    def __init__(self, *_arguments: Any, **_named: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.state.update(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, element: Any) -> None:
        self.elements.append(element)

    def extend(self, elements: Any) -> None:
        self.elements.extend(elements)

    def add(self, element: Any) -> None:
        self.elements.append(element)


def read_pickled(path: Path) -> Any:
    """What `torch.save` wrote to ``path``, tensors on the CPU, objects as `Stub`.

    Tensors that shared memory share it again. Raises `CheckpointError` if it is no zip file as
    `torch.save` writes it since torch 1.6, or is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            root = _root(archive, path)
            with archive.open(f"{root}/data.pkl") as file:
                return _Reader(file, archive, root).load()
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is no zip file: files of torch before 1.6 are not read, save it anew"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle fails anywhere in what it calls
        raise CheckpointError(f"{path} cannot be unpickled: {error!r}") from error


def tensors_of(value: Any) -> dict[str, Tensor]:
    """The tensors of a state dict, or of a pickled module, by their dotted names.

    Raises `CheckpointError` if ``value`` is neither.
    """
    if isinstance(value, dict):
        tensors = {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
        if tensors and all(isinstance(name, str) for name in value):
            return tensors
    elif isinstance(value, Stub) and "_modules" in value.state:
        return dict(_parameters(value, ""))
    raise CheckpointError("the pickle holds neither a state dict nor a module")


def _parameters(module: Stub, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, as `state_dict` would give them."""
    state = module.state
    for kind in ("_parameters", "_buffers"):
        passing = state.get("_non_persistent_buffers_set") if kind == "_buffers" else ()
        passing = passing.elements if isinstance(passing, Stub) else passing or ()
        for name, tensor in _entries(state.get(kind)):
            if isinstance(tensor, Tensor) and name not in passing:
                yield prefix + name, tensor
    for name, child in _entries(state.get("_modules")):
        if isinstance(child, Stub):
            yield from _parameters(child, f"{prefix}{name}.")


def _entries(mapping: Any) -> Iterator[tuple[str, Any]]:
    items = mapping.items if isinstance(mapping, Stub) else mapping
    yield from (items.items() if isinstance(items, dict) else ())


def _root(archive: zipfile.ZipFile, path: Path) -> str:
    for name in archive.namelist():
        root, _, file = name.rpartition("/")
        if file == "data.pkl":
            if f"{root}/byteorder" in archive.namelist() and (
                archive.read(f"{root}/byteorder") != b"little"
            ):
                raise CheckpointError(f"{path} was written on a big-endian machine")
            return root
    raise CheckpointError(f"{path} is a zip file without data.pkl: torch.save did not write it")


class _Storage:
    """Bytes of tensors, in elements of one type."""

    def __init__(self, elements: Tensor) -> None:
        self.elements = elements


class _Reader(pickle.Unpickler):
    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(file, encoding="utf-8")
        self._archive, self._root = archive, root
        self._storages: dict[str, _Storage] = {}
        self._stubs: dict[tuple[str, str], type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("builtins", "__builtin__") and name in _CONTAINERS:
            return _CONTAINERS[name]
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        key = module, name
        if key not in self._stubs:
            self._stubs[key] = type(name.rpartition(".")[2], (Stub,), {"module": module})
        return self._stubs[key]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _device, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"the pickle refers to {kind} of {dtype}, which is no storage")
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._root}/data/{key}"))
            if len(data) != count * dtype.itemsize:
                raise CheckpointError(f"storage {key} has {len(data)} bytes, not {count} elements")
            empty = torch.empty(0, dtype=dtype)
            self._storages[key] = _Storage(torch.frombuffer(data, dtype=dtype) if data else empty)
        return self._storages[key]


def _rebuild_tensor(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> Tensor:
    elements = storage.elements
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride), default=0) < 0 or (0 not in size and last >= len(elements)):
        raise CheckpointError(f"a tensor of {tuple(size)} lies outside of its storage")
    return elements.as_strided(tuple(size), tuple(stride), offset)


def _rebuild_parameter(data: Tensor, *_: Any) -> Tensor:
    return data


def _new_object(kind: Any, *arguments: Any) -> Any:
    """For `copyreg.__newobj__` and `_reconstructor`: of containers and stubs alone."""
    if kind in (dict, list, set, OrderedDict) or (
        isinstance(kind, type) and issubclass(kind, Stub)
    ):
        return kind()
    raise CheckpointError(f"the pickle makes a {kind!r} of {arguments!r}")


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): tuple,
    ("copyreg", "__newobj__"): _new_object,
    ("copyreg", "_reconstructor"): _new_object,
    ("copy_reg", "_reconstructor"): _new_object,
}
