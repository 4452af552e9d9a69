# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Triton kernels of encoders: bidirectional ragged attention, embeddings, LayerNorm and GELU."""

import triton
import triton.language as tl

from runtime.attention.kernels.prefill import sequence_of
from runtime.kernels.arith import matmul
from runtime.kernels.overlap import after_previous

HALF_ROOT = tl.constexpr(0.7071067811865476)
"""Square root of 1/2."""
MINUS_HALF_LOG2E = tl.constexpr(-0.7213475204444817)
"""-log2(e) / 2."""


@triton.jit
def attend_keys(
    queries, m, l, acc, k, v, stride, first, tokens, d, scale,
    MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the online softmax with BLOCK consecutive keys of one head of one input.

    Args:
        queries: `[BLOCK_Q, WIDTH]`.
        m, l: fp32 `[BLOCK_Q]`, maximum and sum of the online softmax.
        acc: fp32 `[BLOCK_Q, WIDTH]`, unnormalized output.
        k, v: pointers to the head's elements of the input's first token.
        stride: row stride of ``k`` and ``v``.
        first: index of the first key in the input.
        tokens: number of tokens of the input.
        d: dimensions `[WIDTH]`.
        MASKED: whether some of the keys may be behind the input's last token.
    """
    t = first + tl.arange(0, BLOCK)
    at = t.to(tl.int64)[:, None] * stride + d[None, :]
    read = (d < DIM)[None, :]
    if MASKED:
        read = read & (t < tokens)[:, None]
    keys = tl.load(k + at, mask=read, other=0.0)  # [BLOCK, WIDTH]
    zeros = tl.zeros((queries.shape[0], BLOCK), tl.float32)
    scores = matmul(queries, tl.trans(keys), zeros)  # [BLOCK_Q, BLOCK]
    if MASKED:
        scores = tl.where((t < tokens)[None, :], scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    values = tl.load(v + at, mask=read, other=0.0)
    l = l * alpha + tl.sum(weights, axis=1)
    acc = matmul(weights.to(values.dtype), values, acc * alpha[:, None])
    return new_m, l, acc


@triton.jit(do_not_specialize=["inputs"], do_not_specialize_on_alignment=["starts"])
def ragged_attention_kernel(
    q, k, v, q_stride, stride, q_bias, v_bias, starts, inputs, out, out_stride, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_Q queries of one head of one input per program.

    Grid `(n // BLOCK_Q + 1 + inputs, HEADS)`.

    Args:
        q, k, v: `[n, HEADS * DIM]`, row stride ``q_stride`` of ``q``, ``stride`` of the others.
        q_bias, v_bias: `[HEADS * DIM]`, added to each query and value; None for zeros.
        starts: int32 `[inputs + 1]`, see `runtime.encoder.batch.RaggedBatch`. Rows of the other
            tensors are counted from the first value.
        out: `[n, HEADS * DIM]`, row stride ``out_stride``, written. It may be ``q``.
        scale: log2(e) / sqrt(DIM).
        WIDTH: smallest power of two that is at least DIM and 16.
        BLOCK: keys per iteration.
    """
    after_previous()
    origin, head = tl.load(starts), tl.program_id(1)
    block = origin // BLOCK_Q + tl.program_id(0)
    each = sequence_of(starts, inputs, block, BLOCK_Q)
    start = tl.load(starts + each)
    tokens = tl.load(starts + each + 1) - start
    index = (block - (start // BLOCK_Q + each)) * BLOCK_Q
    start -= origin
    if index < tokens:
        row = index + tl.arange(0, BLOCK_Q)
        d = tl.arange(0, WIDTH)
        valid = (row < tokens)[:, None] & (d < DIM)[None, :]
        token = (start + row).to(tl.int64)
        queries = tl.load(
            q + token[:, None] * q_stride + (head * DIM + d)[None, :], mask=valid, other=0.0
        )  # [BLOCK_Q, WIDTH]
        if q_bias is not None:
            added = tl.load(q_bias + head * DIM + d, mask=d < DIM, other=0.0)
            queries = (queries.to(tl.float32) + added.to(tl.float32)[None, :]).to(queries.dtype)
        before = start.to(tl.int64) * stride + head * DIM
        m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
        whole = tokens // BLOCK * BLOCK
        for first in range(0, whole, BLOCK):
            m, l, acc = attend_keys(
                queries, m, l, acc, k + before, v + before, stride, first, tokens, d, scale,
                False, DIM, BLOCK,
            )  # fmt: skip
        if whole < tokens:
            m, l, acc = attend_keys(
                queries, m, l, acc, k + before, v + before, stride, whole, tokens, d, scale,
                True, DIM, BLOCK,
            )  # fmt: skip
        found = acc / l[:, None]
        if v_bias is not None:  # the weights of a query have the sum 1
            added = tl.load(v_bias + head * DIM + d, mask=d < DIM, other=0.0)
            found += added.to(tl.float32)[None, :]
        target = out + token[:, None] * out_stride + (head * DIM + d)[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=valid)


@triton.jit
def layer_norm(values, valid, weight, bias, i, width, eps):
    """Return the LayerNorm of fp32 rows `[ROWS, WIDTH]`, whose elements are 0 unless ``valid``."""
    mean = tl.sum(values, axis=1) / width
    centered = tl.where(valid, values - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, axis=1) / width + eps)
    weights = tl.load(weight + i, mask=i < width, other=0.0).to(tl.float32)
    biases = tl.load(bias + i, mask=i < width, other=0.0).to(tl.float32)
    return centered * scale[:, None] * weights[None, :] + biases[None, :]


@triton.jit(do_not_specialize=["n"])
def add_norm_kernel(
    x, added, weight, bias, n, width, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Replace ROWS rows of ``x`` by the LayerNorm of their sum with ``added``, computed in fp32.

    Grid `(ceil(n / ROWS),)`.

    Args:
        x: `[n, width]`, contiguous, read and written.
        added: `[n, width]`, contiguous.
        weight, bias: `[width]`.
        WIDTH: smallest power of two that is at least ``width``.
    """
    after_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WIDTH)
    at = row.to(tl.int64)[:, None] * width + i[None, :]
    valid = (row < n)[:, None] & (i < width)[None, :]
    values = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)  # [ROWS, WIDTH]
    values += tl.load(added + at, mask=valid, other=0.0).to(tl.float32)
    made = layer_norm(values, valid, weight, bias, i, width, eps)
    tl.store(x + at, made.to(x.dtype.element_ty), mask=valid)


@triton.jit
def rows_of(table, index, i, valid, width):
    """Return fp32 rows ``index`` `[ROWS]` of a contiguous table `[…, width]`."""
    at = index[:, None] * width + i[None, :]
    return tl.load(table + at, mask=valid, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n"])
def embed_kernel(
    tokens, positions, types, token_rows, position_rows, type_rows, weight, bias, out, n, width,
    eps, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the LayerNorm of the sum of three embeddings of ROWS tokens, computed in fp32.

    Grid `(ceil(n / ROWS),)`.

    Args:
        tokens, positions, types: int64 `[n]`, rows of the tables; ``types`` may be None for zeros.
        token_rows, position_rows, type_rows: the tables, `[…, width]`, contiguous.
        weight, bias: `[width]`.
        out: `[n, width]`, contiguous, written.
        WIDTH: smallest power of two that is at least ``width``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WIDTH)
    inside = row < n
    valid = inside[:, None] & (i < width)[None, :]
    token = tl.load(tokens + row, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0)
    values = rows_of(token_rows, token, i, valid, width)
    values += rows_of(position_rows, position, i, valid, width)
    if types is None:
        values += tl.load(type_rows + i, mask=i < width, other=0.0).to(tl.float32)[None, :]
        values = tl.where(valid, values, 0.0)
    else:
        kind = tl.load(types + row, mask=inside, other=0)
        values += rows_of(type_rows, kind, i, valid, width)
    made = layer_norm(values, valid, weight, bias, i, width, eps)
    at = row.to(tl.int64)[:, None] * width + i[None, :]
    tl.store(out + at, made.to(out.dtype.element_ty), mask=valid)


@triton.jit
def gelu_kernel(x, size, BLOCK: tl.constexpr):
    """Replace BLOCK elements of ``x`` `[size]` by their GELU, in the form with the error function.

    The error function is formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical
    Functions, with an absolute error below 1.5e-7. The function of CUDA takes longer than the
    memory accesses.

    Grid `(ceil(size / BLOCK),)`.
    """
    after_previous()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)  # [BLOCK]
    t = 1.0 / (1.0 + tl.abs(values) * HALF_ROOT * 0.3275911)
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    series = t * (0.254829592 + t * (-0.284496736 + t * series))
    below = 0.5 * values * series * tl.exp2(values * values * MINUS_HALF_LOG2E)
    made = tl.where(values < 0.0, below, values - below)
    tl.store(x + at, made.to(x.dtype.element_ty), mask=at < size)
