# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Grouped GEMM for few tokens with one to three weight matrices, and its epilogues.

All matrices of a launch are addressed from one base pointer. Offsets are in lines of 64 elements;
widths, strides and first columns are in units of 8 elements. These units let the compiler derive
the alignment of addresses.
"""

import triton
import triton.language as tl

from runtime.kernels.arith import LINE, VECTOR, matmul
from runtime.kernels.overlap import after_previous

PLAIN, RESIDUAL, GATED = (tl.constexpr(n) for n in range(3))
"""Epilogues: store the output; add it to the residual stream; or store SiLU(a) * b, with the
outputs a and b of the first and the second matrix."""


@triton.jit
def multiply_columns(
    acc, x, x_stride, tokens, weights, offset, width, stride, first, rows, m, n, split,
    BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return ``acc + x W^T`` for BM tokens and BN rows, over one of SPLITS parts of the columns.

    Args:
        acc: fp32 `[BM, BN]`.
        offset, width, stride, first, rows: the matrix, as in `small_gemm_kernel`.
        m, n: token indices `[BM]`, and row indices in the matrix `[BN]`.
        split: index of the part.
    """
    width = width * VECTOR
    each = (width + BK * SPLITS - 1) // (BK * SPLITS) * BK
    begin = split * each
    end = tl.minimum(begin + each, width)
    k = tl.arange(0, BK)
    left = x + m.to(tl.int64)[:, None] * (x_stride * VECTOR) + (first * VECTOR + k)[None, :]
    row = n.to(tl.int64)[None, :] * (stride * VECTOR)
    right = weights + tl.cast(offset, tl.int64) * LINE + row + k[:, None]
    valid_m = (m < tokens)[:, None]
    valid_n = (n < rows)[None, :]
    for at in range(begin, end, BK):
        valid_k = at + k < width
        a = tl.load(left + at, mask=valid_m & valid_k[None, :], other=0.0)  # [BM, BK]
        b = tl.load(right + at, mask=valid_n & valid_k[:, None], other=0.0)  # [BK, BN]
        acc = matmul(a, b, acc)
    return acc


@triton.jit
def reduce_splits(
    acc, partials, counters, block, split,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Split-K reduction: store a partial sum; the last program to arrive adds all of them.

    Partial sums are added in the order of the splits, whichever program is last.

    Returns:
        In the last program, the sum `[BM, BN]` and True. In every other program, its own ``acc``
        and False.
    """
    i = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    own = partials + block.to(tl.int64) * (SPLITS * BM * BN) + i
    tl.store(own + split * (BM * BN), acc)
    tl.debug_barrier()
    last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = tl.zeros((BM, BN), tl.float32)
        for other in range(SPLITS):
            acc += tl.load(own + other * (BM * BN), cache_modifier=".cg")
        tl.store(counters + block, 0)
    return acc, last


@triton.jit(do_not_specialize=["tokens"])
def small_gemm_kernel(
    x, x_stride, tokens, weights,
    offset0, width0, stride0, first0, rows0,
    offset1, width1, stride1, first1, rows1,
    offset2, width2, stride2, first2, rows2,
    biases, residual, y, y_stride, partials, counters,
    EPILOGUE: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SPLITS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Compute BM tokens and BN rows of one matrix per program; with GATED, of two matrices.

    Grid `(blocks of tokens * blocks of rows of all matrices, SPLITS)`. Consecutive programs process
    BAND token blocks with the same weight rows, which they read from the L2 cache.

    Args:
        x: bf16 `[tokens, 8 x_stride]`, the input.
        weights: bf16, pointer to which the offsets of matrices are added.
        offset0, width0, stride0, first0, rows0: the first matrix, bf16 `[rows0, 8 width0]`.
            ``offset0`` is its offset from ``weights`` in lines, ``stride0`` its row stride, and
            ``first0`` the first column of ``x`` that it reads, both in units of 8 elements. The
            second and third matrices have the same parameters; an absent matrix has 0 rows.
        biases: fp32 `[sum of rows]`, with BIAS.
        residual: bf16, shaped as ``y``, with RESIDUAL; it may be ``y``.
        y: bf16 `[tokens, sum of rows]`, with GATED `[tokens, rows0]`; row stride ``y_stride``.
        partials: fp32 `[grid[0], SPLITS, BM, BN]`, with SPLITS > 1.
        counters: int32 `[grid[0]]`, with SPLITS > 1; zero before and after the launch.
    """
    after_previous()
    blocks0 = tl.cdiv(rows0, BN)
    blocks1 = 0 if EPILOGUE == GATED else tl.cdiv(rows1, BN)
    blocks2 = 0 if EPILOGUE == GATED else tl.cdiv(rows2, BN)
    blocks = blocks0 + blocks1 + blocks2
    block = tl.program_id(0)
    band = tl.minimum(BAND, tl.cdiv(tokens, BM) - block // (BAND * blocks) * BAND)
    in_band = block % (BAND * blocks)
    m = (block // (BAND * blocks) * BAND + in_band % band) * BM + tl.arange(0, BM)  # [BM]
    block_n = in_band // band
    split = tl.program_id(1)

    # Triton passes each offset as int32 or, for weights that are far apart, as int64.
    offset = tl.cast(offset0, tl.int64)
    width, stride, first, rows, column = width0, stride0, first0, rows0, 0
    if (EPILOGUE != GATED) & (block_n >= blocks0):
        if block_n >= blocks0 + blocks1:
            offset = tl.cast(offset2, tl.int64)
            width, stride, first, rows = width2, stride2, first2, rows2
            column = rows0 + rows1
            block_n -= blocks0 + blocks1
        else:
            offset = tl.cast(offset1, tl.int64)
            width, stride, first, rows = width1, stride1, first1, rows1
            column = rows0
            block_n -= blocks0
    n = block_n * BN + tl.arange(0, BN)  # [BN]
    acc = multiply_columns(
        tl.zeros((BM, BN), tl.float32), x, x_stride, tokens, weights, offset, width, stride,
        first, rows, m, n, split, BK, SPLITS,
    )  # fmt: skip
    up = acc
    last = True
    if EPILOGUE == GATED:
        up = multiply_columns(
            tl.zeros((BM, BN), tl.float32), x, x_stride, tokens, weights, offset1, width1, stride1,
            first1, rows1, m, n, split, BK, SPLITS,
        )  # fmt: skip
    elif SPLITS > 1:
        acc, last = reduce_splits(acc, partials, counters, block, split, BM, BN, SPLITS)
    if last:
        valid = (m < tokens)[:, None] & (n < rows)[None, :]
        if BIAS:
            acc += tl.load(biases + column + n, mask=n < rows, other=0.0)[None, :]
        if EPILOGUE == GATED:
            if BIAS:
                up += tl.load(biases + rows0 + n, mask=n < rows, other=0.0)[None, :]
            acc = acc / (1.0 + tl.exp(-acc)) * up
        at = m.to(tl.int64)[:, None] * y_stride + (column + n)[None, :]  # [BM, BN]
        if EPILOGUE == RESIDUAL:
            acc += tl.load(residual + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=valid)
