# mypy: ignore-errors
"""What triton has given other names between the versions that Headrace runs with."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Of the warps that run a function."""
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def seen_as(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory, otherwise laid out."""
    if _REINTERPRETS:
        seen = memory.reinterpret(dtype, shape, layout)
    else:
        seen = memory._reinterpret(dtype, shape, layout)
    return seen
