# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Tiles that several kernels compute on chip."""

import triton
import triton.language as tl

from runtime.kernels.arith import matmul

HALF_ROOT = tl.constexpr(0.7071067811865476)
"""Square root of 1/2."""
MINUS_HALF_LOG2E = tl.constexpr(-0.7213475204444817)
"""-log2(e) / 2."""


@triton.jit
def rebuilt(p, stride, rows, valid, u, columns, bias, rank, CHUNK: tl.constexpr):
    """Return a tile of ``p @ u.T + bias``, in the dtype of ``p``.

    Args:
        p: pointer to rank-space activations `[n, rank]`, row stride ``stride``.
        rows: int64 `[ROWS]`, rows of the tile.
        valid: `[ROWS]`, rows that exist; the products of others are 0.
        u: `[out, rank]`, contiguous.
        columns: `[COLUMNS]`, columns of the tile, all below ``out``.
        bias: `[out]`.
        CHUNK: ranks per iteration.
    """
    acc = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for first in range(0, rank, CHUNK):
        r = first + tl.arange(0, CHUNK)
        left = tl.load(
            p + rows[:, None] * stride + r[None, :],
            mask=valid[:, None] & (r < rank)[None, :], other=0.0,
        )  # [ROWS, CHUNK]  # fmt: skip
        right = tl.load(
            u + columns[:, None] * rank + r[None, :], mask=(r < rank)[None, :], other=0.0
        )  # [COLUMNS, CHUNK]
        acc = matmul(left, tl.trans(right), acc)
    return (acc + tl.load(bias + columns).to(tl.float32)[None, :]).to(p.dtype.element_ty)


@triton.jit
def attend_block(queries, keys, values, m, l, acc, allowed, scale, MASKED: tl.constexpr):
    """Update the online softmax with a block of keys and values.

    Args:
        queries: `[BLOCK_Q, DIM]`.
        keys: `[DIM, BLOCK]`.
        values: `[BLOCK, DIM]`.
        m, l: fp32 `[BLOCK_Q]`, maximum and sum of the online softmax.
        acc: fp32 `[BLOCK_Q, DIM]`, unnormalized output.
        allowed: `[BLOCK]`, which keys exist; unused unless MASKED.
        scale: log2(e) / sqrt(DIM).
    """
    zeros = tl.zeros((queries.shape[0], keys.shape[1]), tl.float32)
    scores = matmul(queries, keys, zeros)  # [BLOCK_Q, BLOCK]
    if MASKED:
        scores = tl.where(allowed[None, :], scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    l = l * alpha + tl.sum(weights, axis=1)
    acc = matmul(weights.to(values.dtype), values, acc * alpha[:, None])
    return new_m, l, acc


@triton.jit
def gelu(x):
    """Return the GELU of fp32 elements, in the form with the error function.

    The error function is formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical
    Functions, with an absolute error below 1.5e-7.
    """
    t = 1.0 / (1.0 + tl.abs(x) * HALF_ROOT * 0.3275911)
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    series = t * (0.254829592 + t * (-0.284496736 + t * series))
    below = 0.5 * x * series * tl.exp2(x * x * MINUS_HALF_LOG2E)
    return tl.where(x < 0.0, below, x - below)
