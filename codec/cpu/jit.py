# mypy: allow-untyped-decorators
"""Compilation of the CPU loops, and memory access by address.

Loops take memory addresses, which need not be aligned, and numpy integers of explicit width.
"""

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _stamp_of(package: Path) -> str:
    """Return a hash of all Python sources of a package, including its subpackages."""
    sources = (source.read_bytes() for source in sorted(package.rglob("*.py")))
    return "_" + hashlib.blake2b(b"".join(sources), digest_size=8).hexdigest()


_PACKAGE = Path(__file__).parents[1]
_STAMP = _stamp_of(_PACKAGE)
"""Hash of the sources of the `codec` package."""


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """numba's cache on disk. If a write fails, it logs a warning instead of raising an error."""

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("compiled code not cached: %s", error, extra={"failed_write": "cache"})


def compiled(function: _Function) -> _Function:
    """Compile a function on first use, to run without the GIL, and cache the result on disk.

    numba caches beside the source, or in the user's cache directory if that is not writable. If
    neither is writable, every process compiles the function again. numba's cache key is the
    function's name and its own file. `_STAMP` in the name invalidates the cache when other files
    change.
    """
    function.__qualname__ += _STAMP
    made: Any = numba.njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # no writable directory for the cache
        made._cache = _Cache(function)
    return cast("_Function", made)


@intrinsic
def pointer(_typing_context: Any, _address: Any, element: Any) -> Any:
    """Cast an address: `pointer(address, np.uint16)`."""

    def convert(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element.dtype)(types.int64, element), convert


@intrinsic
def load(_typing_context: Any, pointer: Any, _index: Any) -> Any:
    """Load an element: `load(pointer, index)`. The address need not be aligned."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        loaded = builder.load(builder.gep(arguments[0], [arguments[1]]))
        loaded.align = 1
        return loaded

    return pointer.dtype(pointer, types.int64), generate


@intrinsic
def store(_typing_context: Any, pointer: Any, _index: Any, _value: Any) -> Any:
    """Store an element: `store(pointer, index, value)`. The address need not be aligned."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        builder.store(arguments[2], place).align = 1
        return context.get_dummy_value()

    return types.void(pointer, types.int64, pointer.dtype), generate


@intrinsic
def popcount(_typing_context: Any, _value: Any) -> Any:
    """Count the bits of a uint64 that are 1."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def trailing_zeros(_typing_context: Any, _value: Any) -> Any:
    """Return the index of the lowest bit of a uint64 that is 1, or 64 if no bit is."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, False))

    return types.int64(types.uint64), generate


@compiled
def clear(address: int, size: int) -> None:
    """Set `size` bytes from an address on to zero."""
    data = pointer(address, np.uint8)
    for i in range(size):
        store(data, i, np.uint8(0))


@compiled
def copy(source: int, target: int, size: int) -> None:
    """Copy `size` bytes from address `source` to address `target`; they must not overlap."""
    data, out = pointer(source, np.uint8), pointer(target, np.uint8)
    for i in range(size):
        store(out, i, load(data, i))


@compiled
def load_word(address: int, index: int) -> int:
    """Return element `index` of the uint32 array at an address."""
    return int(np.int64(load(pointer(address, np.uint32), index)))


@compiled
def store_word(address: int, index: int, value: int) -> None:
    """Store element `index` of the uint32 array at an address."""
    store(pointer(address, np.uint32), index, np.uint32(value))
