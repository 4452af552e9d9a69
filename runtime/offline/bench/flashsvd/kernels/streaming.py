# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Kernels of FlashSVD v1: each program rebuilds the tiles that it reads, once per use.

K and V of an input are thus rebuilt for every block of queries.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.prefill import sequence_of
from runtime.kernels.arith import matmul
from runtime.offline.bench.flashsvd.kernels.tiles import attend_block, gelu, rebuilt


@triton.jit
def streaming_attention_kernel(
    p_q, p_k, p_v, q_stride, k_stride, v_stride, u_q, u_k, u_v, bias_q, bias_k, bias_v,
    q_rank, k_rank, v_rank, starts, inputs, out, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_Q queries of one head of one input per program.

    Grid `(n // BLOCK_Q + inputs, HEADS)`.

    Args:
        p_q, p_k, p_v: rank-space activations `[n, rank]`, with row strides ``q_stride`` and so on.
        u_q, u_k, u_v: `[HEADS * DIM, rank]`, contiguous.
        bias_q, bias_k, bias_v: `[HEADS * DIM]`.
        starts: int32 `[inputs + 1]`, see `runtime.encoder.batch.RaggedBatch`.
        out: `[n, HEADS * DIM]`, contiguous, written.
        scale: log2(e) / sqrt(DIM).
        DIM: a power of two, at least 16.
        BLOCK: keys per iteration.
        CHUNK: ranks per iteration.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    each = sequence_of(starts, inputs, block, BLOCK_Q)
    start = tl.load(starts + each)
    tokens = tl.load(starts + each + 1) - start
    index = (block - (start // BLOCK_Q + each)) * BLOCK_Q
    if index < tokens:
        at = index + tl.arange(0, BLOCK_Q)
        columns = head * DIM + tl.arange(0, DIM)
        rows = (start + at).to(tl.int64)
        queries = rebuilt(p_q, q_stride, rows, at < tokens, u_q, columns, bias_q, q_rank, CHUNK)
        m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, DIM), tl.float32)
        for first in range(0, tokens, BLOCK):
            t = first + tl.arange(0, BLOCK)
            read = (start + t).to(tl.int64)
            keys = rebuilt(p_k, k_stride, read, t < tokens, u_k, columns, bias_k, k_rank, CHUNK)
            values = rebuilt(p_v, v_stride, read, t < tokens, u_v, columns, bias_v, v_rank, CHUNK)
            m, l, acc = attend_block(
                queries, tl.trans(keys), values, m, l, acc, t < tokens, scale, True
            )
        found = acc / l[:, None]
        target = out + rows[:, None] * (HEADS * DIM) + columns[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=(at < tokens)[:, None])


@triton.jit
def streaming_ffn_kernel(
    p, stride, u, bias, v, out, n, inner, rank, out_rank,
    BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute ``gelu(p @ u.T + bias) @ v.T`` for BLOCK_N tokens and BLOCK_R ranks per program.

    The inner activations `[n, inner]` exist as tiles only. Programs of the same tokens rebuild the
    same tiles.

    Grid `(ceil(n / BLOCK_N), ceil(out_rank / BLOCK_R))`.

    Args:
        p: rank-space activations `[n, rank]`, row stride ``stride``.
        u: `[inner, rank]`, contiguous; ``bias`` `[inner]`.
        v: `[out_rank, inner]`, contiguous.
        out: `[n, out_rank]`, contiguous, written.
        inner: a multiple of BLOCK_I.
        CHUNK: ranks per iteration of ``p @ u.T``.
    """
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for first in range(0, inner, BLOCK_I):
        i = first + tl.arange(0, BLOCK_I)
        made = rebuilt(p, stride, rows, rows < n, u, i, bias, rank, CHUNK)
        right = tl.load(
            v + r[:, None] * inner + i[None, :], mask=(r < out_rank)[:, None], other=0.0
        )  # [BLOCK_R, BLOCK_I]
        acc = matmul(gelu(made.to(tl.float32)).to(right.dtype), tl.trans(right), acc)
    target = out + rows[:, None] * out_rank + r[None, :]
    tl.store(
        target, acc.to(out.dtype.element_ty), mask=(rows < n)[:, None] & (r < out_rank)[None, :]
    )
