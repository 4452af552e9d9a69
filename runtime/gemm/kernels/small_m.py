# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products with one to three weight matrices at a time, and what is done with them.

Matrices that share a launch are found from one base by offsets in lines of 64 elements; widths,
strides, and where a matrix's input starts, are counted in eights: so the compiler knows how all is
aligned.
"""

import triton
import triton.language as tl

from runtime.kernels.arith import product

PLAIN, RESIDUAL, GATED = (tl.constexpr(n) for n in range(3))
"""What is done with products: they are stored, added to a residual stream, or the first's SiLU is
multiplied by the second."""


@triton.jit
def part_of_product(
    total, x, x_stride, tokens, weights, offset, width, stride, first, rows, m, n, split,
    BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """``total + x W^T`` of some tokens and rows, over one of SPLITS parts of the columns."""
    width = width * 8
    each = (width + BK * SPLITS - 1) // (BK * SPLITS) * BK
    begin = split * each
    end = tl.minimum(begin + each, width)
    k = tl.arange(0, BK)
    left = x + m.to(tl.int64)[:, None] * (x_stride * 8) + (first * 8 + k)[None, :]
    row = n.to(tl.int64)[None, :] * (stride * 8)
    right = weights + offset.to(tl.int64) * 64 + row + k[:, None]
    here_m = (m < tokens)[:, None]
    here_n = (n < rows)[None, :]
    for at in range(begin, end, BK):
        inside = at + k < width
        a = tl.load(left + at, mask=here_m & inside[None, :], other=0.0)
        b = tl.load(right + at, mask=here_n & inside[:, None], other=0.0)
        total = product(a, b, total)
    return total


@triton.jit
def added_up(
    total, sums, arrived, place, split,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The parts of a product together, in the program that is the last to have one; in the order of
    the parts, whoever is last."""
    i = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    own = sums + place.to(tl.int64) * (SPLITS * BM * BN) + i
    tl.store(own + split * (BM * BN), total)
    tl.debug_barrier()
    last = tl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1
    if last:
        total = tl.zeros((BM, BN), tl.float32)
        for other in range(SPLITS):
            total += tl.load(own + other * (BM * BN), cache_modifier=".cg")
        tl.store(arrived + place, 0)
    return total, last


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x, x_stride, tokens, weights,
    offset0, width0, stride0, first0, rows0,
    offset1, width1, stride1, first1, rows1,
    offset2, width2, stride2, first2, rows2,
    biases, residual, y, y_stride, sums, arrived,
    KIND: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """A program has BM tokens and BN rows of one matrix; with GATED, of the first and the second.

    Grid `(blocks of tokens * blocks of rows of all matrices, SPLITS)`; TALL blocks of tokens have
    the same rows at about the same time. ``x`` bf16 `[tokens, 8 x_stride]`; ``y`` and ``residual``
    bf16 `[tokens, rows of all]`, rows ``y_stride`` apart; ``biases`` fp32 `[rows of all]`. ``sums``
    fp32 `[grid[0], SPLITS, BM, BN]`, and ``arrived`` int32 `[grid[0]]`, zeros before and after, are
    for SPLITS > 1.
    """
    blocks0 = tl.cdiv(rows0, BN)
    blocks1 = 0 if KIND == GATED else tl.cdiv(rows1, BN)
    blocks2 = 0 if KIND == GATED else tl.cdiv(rows2, BN)
    blocks = blocks0 + blocks1 + blocks2
    block = tl.program_id(0)
    tall = tl.minimum(TALL, tl.cdiv(tokens, BM) - block // (TALL * blocks) * TALL)
    in_band = block % (TALL * blocks)
    m = (block // (TALL * blocks) * TALL + in_band % tall) * BM + tl.arange(0, BM)
    block_n = in_band // tall
    split = tl.program_id(1)

    offset, width, stride, first, rows, column = offset0, width0, stride0, first0, rows0, 0
    if (KIND != GATED) & (block_n >= blocks0):
        if block_n >= blocks0 + blocks1:
            offset, width, stride, first, rows = offset2, width2, stride2, first2, rows2
            column = rows0 + rows1
            block_n -= blocks0 + blocks1
        else:
            offset, width, stride, first, rows = offset1, width1, stride1, first1, rows1
            column = rows0
            block_n -= blocks0
    n = block_n * BN + tl.arange(0, BN)
    total = part_of_product(
        tl.zeros((BM, BN), tl.float32), x, x_stride, tokens, weights, offset, width, stride,
        first, rows, m, n, split, BK, SPLITS,
    )  # fmt: skip
    other = total
    last = True
    if KIND == GATED:
        other = part_of_product(
            tl.zeros((BM, BN), tl.float32), x, x_stride, tokens, weights, offset1, width1, stride1,
            first1, rows1, m, n, split, BK, SPLITS,
        )  # fmt: skip
    elif SPLITS > 1:
        total, last = added_up(total, sums, arrived, block, split, BM, BN, SPLITS)
    if last:
        here = (m < tokens)[:, None] & (n < rows)[None, :]
        if BIAS:
            total += tl.load(biases + column + n, mask=n < rows, other=0.0)[None, :]
        if KIND == GATED:
            if BIAS:
                other += tl.load(biases + rows0 + n, mask=n < rows, other=0.0)[None, :]
            total = total / (1.0 + tl.exp(-total)) * other
        at = m.to(tl.int64)[:, None] * y_stride + (column + n)[None, :]
        if KIND == RESIDUAL:
            total += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=here)
