"""RMSNorm and SwiGLU on a GPU, one Triton launch each. The reference is in `pointwise`."""

import torch
import triton
from torch import Tensor

from runtime.kernels.overlap import overlapped
from runtime.layers.kernels import rms_norm_kernel, silu_mul_kernel

_BLOCK = 1024
"""Columns of one program of `silu_mul_kernel`."""


def triton_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each row of ``x`` `[n, d]`, in its dtype.

    Args:
        weight: fp32 or bf16 `[d]`.
    """
    y = torch.empty_like(x)
    width = x.shape[-1]
    if len(x):
        rms_norm_kernel[(len(x),)](
            x, weight, y, width, eps,
            WIDTH=triton.next_power_of_2(width), num_warps=8, **overlapped(x.device),
        )  # fmt: skip
    return y


def triton_silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) · up`` `[n, d]` from ``gate_up`` `[n, 2 d]`, gate first."""
    width = gate_up.shape[1] // 2
    y = gate_up.new_empty(len(gate_up), width)
    if len(y):
        silu_mul_kernel[(len(y), triton.cdiv(width, _BLOCK))](
            gate_up, y, width, BLOCK=_BLOCK, **overlapped(y.device)
        )
    return y
