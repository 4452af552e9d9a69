"""Read pickled PyTorch files without importing or calling anything that they name.

A pickle is a program that can call any function. This reader resolves only the few names needed to
build tensors. Objects of any other class become a `Stub`, which records their state. Models of
unknown classes can therefore be read without importing them. Tensors are memory-mapped.
"""

import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.offline.convert.stubs import Stub

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
_CONTAINERS = {"dict": dict, "list": list, "set": set, "frozenset": frozenset, "tuple": tuple}
_MAX_PICKLE_BYTES = 1 << 28
_MAX_NUMBER = 1 << 48
"""Upper bound of sizes, strides and offsets of tensors in elements, exclusive."""


def read_pickled(path: Path) -> Any:
    """Return the object that `torch.save` wrote to ``path``.

    Tensors are on the CPU and memory-mapped, and those that shared memory share it again. An
    `OrderedDict`, such as a state dict, is read as a dict. Objects of unknown classes are `Stub`
    instances.

    Raises:
        CheckpointError: the file is damaged, or is not a zip file as written by torch 1.6 and
            later.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            root = _root(archive, path)
            if archive.getinfo(f"{root}/data.pkl").file_size > _MAX_PICKLE_BYTES:
                raise CheckpointError(f"{path} has a pickle of more than {_MAX_PICKLE_BYTES} bytes")
            with archive.open(f"{root}/data.pkl") as file:
                return _Reader(file, archive, root, path).load()
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is damaged or older than torch 1.6 ({error}): save it again with torch.save"
        ) from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointError(f"{path} cannot be unpickled: {type(error).__name__}") from error


def _root(archive: zipfile.ZipFile, path: Path) -> str:
    for name in archive.namelist():
        root, _, file = name.rpartition("/")
        if file == "data.pkl":
            if f"{root}/byteorder" in archive.namelist() and (
                archive.read(f"{root}/byteorder") != b"little"
            ):
                raise CheckpointError(f"{path} was written on a big-endian machine")
            return root
    raise CheckpointError(f"{path} is a zip file without data.pkl, not written by torch.save")


class _Storage:
    """A block of memory that tensors view: ``elements`` ``[n]`` of one dtype."""

    def __init__(self, elements: Tensor) -> None:
        self.elements = elements


_PythonUnpickler: Any = pickle._Unpickler


class _Reader(_PythonUnpickler):  # type: ignore[misc]
    """The standard library's Python unpickler with restricted operations.

    It calls only known functions, sets the state of stubs only, and accepts only plain keys.
    """

    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile, root: str, path: Path) -> None:
        super().__init__(file, encoding="utf-8")
        self._archive = archive
        self._root = root
        self._path = path
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
        key = str(module), str(name)
        if key not in self._stubs:
            self._stubs[key] = type(key[1].rpartition(".")[2], (Stub,), {})
        return self._stubs[key]

    def persistent_load(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise CheckpointError("the pickle has a persistent id that is not a storage")
        _, dtype, key, _device, count = pid
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or not _is_count(count):
            raise CheckpointError("the pickle has a storage of an unknown type")
        if key not in self._storages:
            member = self._archive.getinfo(f"{self._root}/data/{key}")
            if member.compress_type != zipfile.ZIP_STORED or (
                member.file_size != count * dtype.itemsize
            ):
                raise CheckpointError(f"storage {key[:40]} does not have {count} elements")
            self._storages[key] = _Storage(_mapped(self._path, member).view(dtype))
        return self._storages[key]


_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Header before a member's name and content: signature, length of the name and of extra fields."""


def _mapped(path: Path, member: zipfile.ZipInfo) -> Tensor:
    """Return the bytes of an uncompressed member ``[file_size]``, memory-mapped.

    Raises:
        CheckpointError: its checksum does not match.
    """
    if not member.file_size:
        return torch.empty(0, dtype=torch.uint8)
    with path.open("rb") as file:
        file.seek(member.header_offset)
        signature, *lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise CheckpointError(f"{path} has no header of {member.filename}")
    start = member.header_offset + _LOCAL_HEADER.size + sum(lengths)
    # Mode "c" is copy-on-write: the file never changes, and torch does not warn.
    content = np.memmap(path, np.uint8, mode="c", offset=start, shape=(member.file_size,))
    if zlib.crc32(content.data) != member.CRC:
        raise CheckpointError(f"{path} is damaged: {member.filename} has another checksum")
    return torch.from_numpy(content)


def _build(reader: Any) -> None:
    state = reader.stack.pop()
    built = reader.stack[-1]
    if isinstance(built, Stub):
        built.__setstate__(state)
    elif not isinstance(built, dict | Tensor):  # extra attributes, such as `_metadata`, are ignored
        raise CheckpointError("the pickle sets the state of an object that has none")


def _reduce(reader: Any) -> None:
    arguments = reader.stack.pop()
    called = reader.stack[-1]
    if not isinstance(arguments, tuple) or not _may_be_called(called):
        raise CheckpointError("the pickle calls an unknown function")
    reader.stack[-1] = _HASHED.get(called, called)(*arguments)


def _make(reader: Any) -> None:
    reader.stack.pop()  # arguments, which stubs ignore
    reader.stack[-1] = _new_object(reader.stack[-1])


def _make_named(reader: Any) -> None:
    reader.stack.pop()
    _make(reader)


def _set_item(reader: Any) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _put(reader.stack[-1], [key, value])


def _set_items(reader: Any) -> None:
    items = reader.pop_mark()
    _put(reader.stack[-1], items)


def _make_dict(reader: Any) -> None:
    made: dict[Any, Any] = {}
    _put(made, reader.pop_mark())
    reader.append(made)


def _add_items(reader: Any) -> None:
    items = reader.pop_mark()
    target = reader.stack[-1]
    for item in items:
        target.add(_plain(item) if isinstance(target, set) else item)


def _make_frozenset(reader: Any) -> None:
    reader.append(frozenset(_plain(item) for item in reader.pop_mark()))


def _refuse(_: Any) -> None:
    raise CheckpointError("the pickle uses an operation that torch.save never writes")


_Reader.dispatch = _PythonUnpickler.dispatch | {
    code[0]: operation
    for code, operation in (
        (pickle.BUILD, _build),
        (pickle.REDUCE, _reduce),
        (pickle.NEWOBJ, _make),
        (pickle.NEWOBJ_EX, _make_named),
        (pickle.SETITEM, _set_item),
        (pickle.SETITEMS, _set_items),
        (pickle.DICT, _make_dict),
        (pickle.ADDITEMS, _add_items),
        (pickle.FROZENSET, _make_frozenset),
        (pickle.INST, _refuse),
        (pickle.OBJ, _refuse),
        (pickle.PERSID, _refuse),
        (pickle.EXT1, _refuse),
        (pickle.EXT2, _refuse),
        (pickle.EXT4, _refuse),
        (pickle.NEXT_BUFFER, _refuse),
        (pickle.READONLY_BUFFER, _refuse),
    )
}


def _put(target: Any, items: list[Any]) -> None:
    if not isinstance(target, dict | Stub):
        raise CheckpointError("the pickle sets items of an object without items")
    into = target.items if isinstance(target, Stub) else target
    for key, value in zip(items[::2], items[1::2], strict=True):
        into[_plain(key)] = value


def _plain(key: Any) -> Any:
    """Return ``key`` if it is a string or a small number, or a short tuple of these.

    Hashing nested tuples or huge numbers can take very long.
    """
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        plain = isinstance(part, str | bytes | float | None) or (
            isinstance(part, int) and -_MAX_NUMBER < part < _MAX_NUMBER
        )
        if not plain or len(parts) > 8:
            raise CheckpointError("the pickle has a key that is neither a string nor a number")
    return key


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < _MAX_NUMBER


def _may_be_called(called: Any) -> bool:
    if isinstance(called, type):
        return called in _CONTAINERS.values() or issubclass(called, Stub)
    return any(called is known for known in _KNOWN.values())


def _dict_of(pairs: Iterable[tuple[Any, Any]] = ()) -> dict[Any, Any]:
    return {_plain(key): value for key, value in pairs}


def _set_of(items: Iterable[Any] = ()) -> set[Any]:
    return {_plain(item) for item in items}


_HASHED: dict[Any, Any] = {dict: _dict_of, set: _set_of, frozenset: _set_of}
"""Replacements of containers that hash their arguments."""


def _rebuild_tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _requires_grad: Any = None,
    _hooks: Any = None,
    metadata: Any = None,
) -> Tensor:
    if not isinstance(storage, _Storage) or metadata:
        raise CheckpointError("a tensor of an unsupported type")
    sizes, strides = tuple(size), tuple(stride)
    if len(sizes) != len(strides) or not all(map(_is_count, (offset, *sizes, *strides))):
        raise CheckpointError("a tensor with an invalid shape")
    count, last = 1, offset
    for n, step in zip(sizes, strides, strict=True):
        count, last = count * n, last + (n - 1) * step
        if count > len(storage.elements) or count >= _MAX_NUMBER:
            raise CheckpointError(f"a tensor has more elements than its storage: {sizes[:8]}")
    if count and last >= len(storage.elements):
        raise CheckpointError(f"a tensor reaches beyond its storage: {sizes[:8]}")
    return storage.elements.as_strided(sizes, strides, offset)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(function: Any, _type: Any, arguments: Any, *_: Any) -> Any:
    """Rebuild a tensor that has Python attributes, and ignore the attributes."""
    if function not in (_rebuild_tensor, _rebuild_parameter) or not isinstance(arguments, tuple):
        raise CheckpointError("a tensor of an unsupported type")
    return function(*arguments)


def _new_object(kind: Any, *_: Any) -> Any:
    """Replace `copyreg.__newobj__` and `_reconstructor`; create containers and stubs only."""
    if isinstance(kind, type) and issubclass(kind, dict | list | set | Stub):
        return kind()
    raise CheckpointError("the pickle instantiates something that is not a class")


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch", "Size"): tuple,
    ("copyreg", "__newobj__"): _new_object,
    ("copyreg", "_reconstructor"): _new_object,
    ("copy_reg", "_reconstructor"): _new_object,
}
