"""What is made of products."""

from enum import IntEnum

import triton
from torch import Tensor

from runtime.gemm.kernels import small_m as linear
from runtime.layers.kernels import silu_mul_kernel

_BLOCK = 1024
"""Numbers of a program of `silu_mul_kernel`."""


class Kind(IntEnum):
    """What is made of products."""

    PLAIN = linear.PLAIN.value
    RESIDUAL = linear.RESIDUAL.value
    GATED = linear.GATED.value


def gated(gate_up: Tensor) -> Tensor:
    """The SiLU of the first half of the columns times the second: `[n, 2 d]` to `[n, d]`."""
    width = gate_up.shape[1] // 2
    y = gate_up.new_empty(len(gate_up), width)
    if len(y):
        silu_mul_kernel[(len(y), triton.cdiv(width, _BLOCK))](gate_up, y, width, BLOCK=_BLOCK)
    return y
