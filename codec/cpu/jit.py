"""What the CPU backend's compiled loops are made of: the compiler's settings, memory by address.

Loops take addresses, which need no alignment, and numpy's integers of the widths that they name.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _stamp_of(package: Path) -> str:
    """Changes with any of a package's sources."""
    sources = (source.read_bytes() for source in sorted(package.rglob("*.py")))
    return "_" + hashlib.blake2b(b"".join(sources), digest_size=8).hexdigest()


_STAMP = _stamp_of(Path(__file__).parents[1])


def compiled(function: _Function) -> _Function:
    """Compile on first use, without the interpreter's lock, cached on disk where that is possible.

    numba looks for a writable directory beside the source, then in the user's cache. Where neither
    is, every process compiles for itself. It knows a cached function by its name and its own file;
    the stamp in the name makes it know what that calls and imports from other files, too.
    """
    function.__qualname__ += _STAMP
    try:
        made: _Function = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        made = numba.njit(nogil=True, error_model="numpy")(function)
    return made


def _pointer_type(_typing_context: Any, _address: Any, element: Any) -> Any:
    """How `pointer(address, np.uint16)` is typed and compiled: as a cast, without any code."""

    def convert(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element.dtype)(types.int64, element), convert


def _load_type(_typing_context: Any, pointer: Any, _index: Any) -> Any:
    """How `load(pointer, index)` is typed and compiled: from any address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        loaded = builder.load(builder.gep(arguments[0], [arguments[1]]))
        loaded.align = 1
        return loaded

    return pointer.dtype(pointer, types.int64), generate


def _store_type(_typing_context: Any, pointer: Any, _index: Any, _value: Any) -> Any:
    """How `store(pointer, index, value)` is typed and compiled: to any address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        builder.store(arguments[2], place).align = 1
        return context.get_dummy_value()

    return types.void(pointer, types.int64, pointer.dtype), generate


def _ones_type(_typing_context: Any, _value: Any) -> Any:
    """How `ones(value)`, the number of a u64's bits that are 1, is typed and compiled."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


def _lowest_type(_typing_context: Any, _value: Any) -> Any:
    """How `lowest(value)`, the place of a u64's lowest 1 or 64, is typed and compiled."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, False))

    return types.int64(types.uint64), generate


pointer = intrinsic(_pointer_type)
load = intrinsic(_load_type)
store = intrinsic(_store_type)
ones = intrinsic(_ones_type)
lowest = intrinsic(_lowest_type)


@compiled
def clear(address: int, size: int) -> None:
    """Zero so many bytes."""
    data = pointer(address, np.uint8)
    for i in range(size):
        store(data, i, np.uint8(0))


@compiled
def copy(source: int, target: int, size: int) -> None:
    """So many bytes, which do not overlap."""
    data, out = pointer(source, np.uint8), pointer(target, np.uint8)
    for i in range(size):
        store(out, i, load(data, i))


@compiled
def load_word(address: int, index: int) -> int:
    """Word `index` of those that start at an address."""
    return int(np.int64(load(pointer(address, np.uint32), index)))


@compiled
def store_word(address: int, index: int, value: int) -> None:
    store(pointer(address, np.uint32), index, np.uint32(value))
