# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What a decoder layer does between its products."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, weight, y, width, eps, WIDTH: tl.constexpr):
    """A program norms one row of ``x`` `[n, width]`; WIDTH is a power of two, from it on."""
    row = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, WIDTH)
    values = tl.load(x + row + i, mask=i < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    weights = tl.load(weight + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(y + row + i, (values * scale * weights).to(y.dtype.element_ty), mask=i < width)


@triton.jit
def silu_mul_kernel(gate_up, y, width, BLOCK: tl.constexpr):
    """``silu(gate) · up``. Grid `(n, width / BLOCK)`; ``gate_up`` `[n, 2 width]`, gate first."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = gate_up + row * 2 * width + i
    gate = tl.load(source, mask=i < width, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=i < width, other=0.0).to(tl.float32)
    made = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * width + i, made.to(y.dtype.element_ty), mask=i < width)
