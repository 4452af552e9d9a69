# mypy: allow-untyped-decorators
"""Just-in-time compilation of CPU loops, and exact floating-point primitives for them.

Loops compiled here use no fast-math: operations are executed in the order written, on any x86
processor. The result of a row therefore does not depend on the rest of the batch.
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
from numpy.typing import NDArray

log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
_f, _u, _i = np.float32, np.uint32, np.int32


def _stamp_of(package: Path) -> str:
    """Return a hash of all source files of a package, as a suffix for function names."""
    sources = (source.read_bytes() for source in sorted(package.rglob("*.py")))
    return "_" + hashlib.blake2b(b"".join(sources), digest_size=8).hexdigest()


_STAMP = _stamp_of(Path(__file__).parents[1])


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """numba's cache on disk. If it cannot be written, a warning is logged."""

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("compiled code not cached: %s", error, extra={"failed_write": "cache"})


def compiled(function: _Function) -> _Function:
    """Compile a function on first use, to run without the GIL, and cache the result on disk.

    numba's cache key covers only the function's name and the file that defines it. The name is
    therefore extended by a hash of the whole package, so that a change in any other file also
    invalidates the cache.
    """
    function.__qualname__ += _STAMP
    result: Any = numba.njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # no writable directory for the cache
        result._cache = _Cache(function)
    return cast("_Function", result)


@intrinsic
def fma(_typing_context: Any, _a: Any, _b: Any, _c: Any) -> Any:
    """Return a·b + c, rounded once."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    f32 = types.float32
    return f32(f32, f32, f32), generate


def _bitcast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))


@intrinsic
def as_float(_typing_context: Any, _bits: Any) -> Any:
    """Reinterpret the bits of a u32 as fp32."""
    return types.float32(types.uint32), _bitcast


@intrinsic
def as_bits(_typing_context: Any, _value: Any) -> Any:
    """Return the bits of an fp32 as a u32."""
    return types.uint32(types.float32), _bitcast


@compiled
def exp(x: np.float32) -> np.float32:
    """Return e^x for x <= 0 with an error of at most 2 ulp.

    The result is 0 below -87, where it would be subnormal.

    Source: range reduction and polynomial of Moshier's Cephes library, `expf`.
    """
    bounded = x if x > _f(-87.0) else _f(-87.0)
    n = np.floor(fma(bounded, _f(1.44269504), _f(0.5)))
    y = fma(n, _f(2.12194440e-4), fma(n, _f(-0.693359375), bounded))
    z = fma(y, _f(1.9875691500e-4), _f(1.3981999507e-3))
    z = fma(z, y, _f(8.3334519073e-3))
    z = fma(z, y, _f(4.1665795894e-2))
    z = fma(z, y, _f(1.6666665459e-1))
    z = fma(z, y, _f(5.0000001201e-1))
    z = fma(z, y * y, y + _f(1.0))
    power = as_float(_u(_i(n) + _i(127)) << _u(23))
    return z * power if x > _f(-87.0) else _f(0.0)
