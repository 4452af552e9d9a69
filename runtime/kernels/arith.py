# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Constants and functions that several Triton kernels share."""

import triton
import triton.language as tl
from triton import knobs
from triton.experimental.gluon import constexpr_function

from runtime.kernels.alignment import LINE_ELEMENTS, VECTOR_ELEMENTS

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
VECTOR = tl.constexpr(VECTOR_ELEMENTS)
LINE = tl.constexpr(LINE_ELEMENTS)


@constexpr_function
def power_of_2(size):
    """Return the least power of two that is at least ``size`` and 16, the minimum in matmuls."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit
def matmul(a, b, acc):
    """Return ``acc + a @ b``.

    Triton's interpreter has no bf16 dot, so it multiplies in fp32. The products are equal, because
    the product of two bf16 numbers is exact in fp32.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)
