# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of RMSNorm and SwiGLU."""

import triton
import triton.language as tl

from runtime.kernels.overlap import after_previous


@triton.jit
def rms_norm_kernel(x, weight, y, width, eps, WIDTH: tl.constexpr):
    """Compute RMSNorm of one row per program, with statistics in fp32.

    Grid `(n,)`.

    Args:
        x: `[n, width]`, contiguous.
        weight: fp32 or bf16 `[width]`.
        y: `[n, width]`, contiguous, written.
        WIDTH: smallest power of two that is at least ``width``.
    """
    after_previous()
    row = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, WIDTH)
    values = tl.load(x + row + i, mask=i < width, other=0.0).to(tl.float32)  # [WIDTH]
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    weights = tl.load(weight + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(y + row + i, (values * scale * weights).to(y.dtype.element_ty), mask=i < width)


@triton.jit
def silu_mul_kernel(gate_up, y, width, BLOCK: tl.constexpr):
    """Compute ``silu(gate) · up`` for BLOCK columns of one row per program.

    Grid `(n, ceil(width / BLOCK))`.

    Args:
        gate_up: `[n, 2 width]`, contiguous, gate in the first half of the columns.
        y: `[n, width]`, contiguous, written.
    """
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = gate_up + row * 2 * width + i
    gate = tl.load(source, mask=i < width, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(source + width, mask=i < width, other=0.0).to(tl.float32)
    made = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * width + i, made.to(y.dtype.element_ty), mask=i < width)
