# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels around an all-reduce that also sums the squares of an RMSNorm; see `normed_ops`."""

import triton
import triton.language as tl

from runtime.kernels.overlap import after_previous


@triton.jit
def pack_kernel(addend, x, message, width, columns, stride, rank, BLOCK: tl.constexpr):
    """Copy one row of the addend per program, and append the sum of squares of the row of ``x``.

    Grid `(n,)`. The sum of squares is stored as two bf16 numbers, a rounded value and its error, at
    the places of this rank. The places of other ranks are zeros.

    Args:
        addend: bf16 `[n, width]`, contiguous.
        x: bf16 `[n, columns]`, contiguous.
        message: bf16 `[n, stride]`, written: the addend, then two numbers for each rank.
    """
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    square = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        i = first + tl.arange(0, BLOCK)
        values = tl.load(x + row * columns + i, mask=i < columns, other=0.0).to(tl.float32)
        square += values * values
    total = tl.sum(square, axis=0)
    high = total.to(tl.bfloat16)
    low = total - high.to(tl.float32)
    own = width + 2 * rank
    for first in range(0, stride, BLOCK):
        i = first + tl.arange(0, BLOCK)
        values = tl.load(addend + row * width + i, mask=i < width, other=0.0).to(tl.float32)
        values = tl.where(i == own, high.to(tl.float32), tl.where(i == own + 1, low, values))
        tl.store(message + row * stride + i, values.to(tl.bfloat16), mask=i < stride)


@triton.jit
def scale_kernel(
    message, y, width, stride, elements, eps, PLACES: tl.constexpr, USED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Divide summed messages by the rms. Each program computes BLOCK columns of one row.

    Grid `(n, ceil(width / BLOCK))`.

    Args:
        message: bf16 `[n, stride]`, the sum of the messages that `pack_kernel` wrote on all ranks.
        y: bf16 `[n, width]`, contiguous, written.
        elements: number of elements of a row of ``x`` on all ranks.
        eps: added to the mean square.
        USED: number of places of squares: two for each rank.
        PLACES: `USED` rounded up to a power of two.
    """
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    source = message + row * stride
    squares = tl.load(source + width + place, mask=place < USED, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / elements + eps)
    values = tl.load(source + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(y + row * width + i, (values * scale).to(tl.bfloat16), mask=i < width)
