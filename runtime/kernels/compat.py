# mypy: ignore-errors
"""Gluon functions whose names differ between the supported Triton versions (3.6 to 3.9)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Barrier across the warps of the current warp-specialized partition."""
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Asynchronous copy from pointers to shared memory (cp.async)."""
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Asynchronous copy of a block of a tensor descriptor to shared memory (TMA)."""
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Return a view of the same shared memory with another dtype, shape and layout."""
    if _REINTERPRETS:
        view = memory.reinterpret(dtype, shape, layout)
    else:
        view = memory._reinterpret(dtype, shape, layout)
    return view
