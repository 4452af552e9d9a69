# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Kernels of FlashSVD v1.5: each tile is rebuilt once, and stays on chip while it is used."""

import triton
import triton.language as tl

from runtime.kernels.arith import matmul
from runtime.kernels.overlap import after_previous
from runtime.offline.bench.flashsvd.kernels.tiles import attend_block, gelu, rebuilt


@triton.jit
def resident_attention_kernel(
    p_q, p_k, p_v, q_stride, k_stride, v_stride, u_q, u_k, u_v, bias_q, bias_k, bias_v,
    q_rank, k_rank, v_rank, starts, out, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend with all queries of one head of one input per program.

    K and V of the head are rebuilt once and stay in shared memory: 128 KiB for 512 tokens, heads of
    64 and bf16.

    Grid `(HEADS, inputs)`.

    Args:
        p_q, p_k, p_v: rank-space activations `[n, rank]`, with row strides ``q_stride`` and so on.
        u_q, u_k, u_v: `[HEADS * DIM, rank]`, contiguous.
        bias_q, bias_k, bias_v: `[HEADS * DIM]`.
        starts: int32 `[inputs + 1]`, see `runtime.encoder.batch.RaggedBatch`.
        out: `[n, HEADS * DIM]`, contiguous, written.
        scale: log2(e) / sqrt(DIM).
        DIM: a power of two, at least 16.
        BLOCK, BLOCKS: keys of a block, and number of blocks for the longest input: 1, 2 or 4.
        CHUNK: ranks per iteration.
        MASKED: whether an input has fewer than ``BLOCK * BLOCKS`` tokens.
    """
    after_previous()
    head, each = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + each)
    tokens = tl.load(starts + each + 1) - start
    columns = head * DIM + tl.arange(0, DIM)
    t = tl.arange(0, BLOCK * BLOCKS)
    read = (start + t).to(tl.int64)
    made = rebuilt(p_k, k_stride, read, t < tokens, u_k, columns, bias_k, k_rank, CHUNK)
    key_blocks = blocks_of(made, BLOCKS)
    made = rebuilt(p_v, v_stride, read, t < tokens, u_v, columns, bias_v, v_rank, CHUNK)
    value_blocks = blocks_of(made, BLOCKS)
    for index in range(0, tokens, BLOCK_Q):
        at = index + tl.arange(0, BLOCK_Q)
        rows = (start + at).to(tl.int64)
        queries = rebuilt(p_q, q_stride, rows, at < tokens, u_q, columns, bias_q, q_rank, CHUNK)
        m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, DIM), tl.float32)
        for i in tl.static_range(BLOCKS):
            allowed = i * BLOCK + tl.arange(0, BLOCK) < tokens
            keys = tl.trans(key_blocks[i])
            values = value_blocks[i]
            m, l, acc = attend_block(queries, keys, values, m, l, acc, allowed, scale, MASKED)
        found = acc / l[:, None]
        target = out + rows[:, None] * (HEADS * DIM) + columns[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=(at < tokens)[:, None])


@triton.jit
def halves_of(x):
    """Return the first and the second half of the rows of ``x``."""
    halves = tl.reshape(x, (2, x.shape[0] // 2, x.shape[1]))
    return tl.split(tl.permute(halves, (1, 2, 0)))


@triton.jit
def blocks_of(x, BLOCKS: tl.constexpr):
    """Return the rows of ``x`` in a tuple of BLOCKS equal blocks: 1, 2 or 4."""
    if BLOCKS == 1:
        blocks = (x,)
    elif BLOCKS == 2:
        blocks = halves_of(x)
    else:
        low, high = halves_of(x)
        first, second = halves_of(low)
        third, fourth = halves_of(high)
        blocks = (first, second, third, fourth)  # type: ignore[assignment]
    return blocks


@triton.jit
def columns_of(x, stride, rows, valid, FIRST: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr):
    """Return the columns FIRST to ``FIRST + SIZE`` of rows of ``x``; 0 from column END on."""
    at = FIRST + tl.arange(0, SIZE)
    return tl.load(
        x + rows[:, None] * stride + at[None, :], mask=valid[:, None] & (at < END)[None, :],
        other=0.0,
    )  # fmt: skip


@triton.jit
def rows_of(x, stride, i, FIRST: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr):
    """Return columns ``i`` of the rows FIRST to ``FIRST + SIZE`` of ``x``; 0 from row END on."""
    at = FIRST + tl.arange(0, SIZE)
    return tl.load(x + at[:, None] * stride + i[None, :], mask=(at < END)[:, None], other=0.0)


@triton.jit
def resident_ffn_kernel(
    p, stride, u, bias, v, out, n, inner,
    RANK: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    OUT_RANK: tl.constexpr, OUT_LOW: tl.constexpr, OUT_HIGH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Compute ``gelu(p @ u.T + bias) @ v.T`` for BLOCK_N tokens per program.

    The rank-space activations of the tokens stay in shared memory, and their results in registers.
    Each tile of the inner activations `[n, inner]` is computed once. Tensors have sizes that are
    powers of two, so ranks are divided into a low and a high part.

    Grid `(ceil(n / BLOCK_N),)`.

    Args:
        p: rank-space activations `[n, RANK]`, row stride ``stride``.
        u: `[inner, RANK]`, contiguous; ``bias`` `[inner]`.
        v: `[OUT_RANK, inner]`, contiguous.
        out: `[n, OUT_RANK]`, contiguous, written.
        inner: a multiple of BLOCK_I.
        LOW, HIGH: powers of two whose sum is at least RANK; HIGH may be 0. The others likewise.
    """
    after_previous()
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    valid = rows < n
    low = columns_of(p, stride, rows, valid, 0, LOW, RANK)  # [BLOCK_N, LOW]
    if HIGH:
        high = columns_of(p, stride, rows, valid, LOW, HIGH, RANK)
    acc_low = tl.zeros((BLOCK_N, OUT_LOW), tl.float32)
    if OUT_HIGH:
        acc_high = tl.zeros((BLOCK_N, OUT_HIGH), tl.float32)
    for first in range(0, inner, BLOCK_I):
        i = first + tl.arange(0, BLOCK_I)
        every = i >= 0
        made = tl.zeros((BLOCK_N, BLOCK_I), tl.float32)
        made = matmul(low, tl.trans(columns_of(u, RANK, i, every, 0, LOW, RANK)), made)
        if HIGH:
            made = matmul(high, tl.trans(columns_of(u, RANK, i, every, LOW, HIGH, RANK)), made)
        made = gelu(made + tl.load(bias + i).to(tl.float32)[None, :]).to(p.dtype.element_ty)
        acc_low = matmul(made, tl.trans(rows_of(v, inner, i, 0, OUT_LOW, OUT_RANK)), acc_low)
        if OUT_HIGH:
            right = rows_of(v, inner, i, OUT_LOW, OUT_HIGH, OUT_RANK)
            acc_high = matmul(made, tl.trans(right), acc_high)
    r = tl.arange(0, OUT_LOW)
    written = valid[:, None] & (r < OUT_RANK)[None, :]
    target = out + rows[:, None] * OUT_RANK
    tl.store(target + r[None, :], acc_low.to(out.dtype.element_ty), mask=written)
    if OUT_HIGH:
        r = OUT_LOW + tl.arange(0, OUT_HIGH)
        written = valid[:, None] & (r < OUT_RANK)[None, :]
        tl.store(target + r[None, :], acc_high.to(out.dtype.element_ty), mask=written)
