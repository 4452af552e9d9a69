# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Causal attention of many new tokens per sequence over the sequence's pages.

The K and V of the new tokens must be in the pages already.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import tokens_at
from runtime.kernels.arith import VECTOR, matmul


@triton.jit
def sequence_of(starts, sequences, block, BLOCK_Q: tl.constexpr):
    """Return the index of the sequence of a block of queries, by binary search.

    The first block of sequence i is ``starts[i] // BLOCK_Q + i``. Every sequence then has at least
    as many blocks as it needs, and some blocks are empty.
    """
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend_keys(
    queries, m, l, acc, first, kv_head, end, position, table, k_pages, v_pages,
    page_stride, head_stride, d, scale,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the online softmax with BLOCK consecutive keys.

    Args:
        queries: `[BLOCK_Q, WIDTH]`.
        m, l: fp32 `[BLOCK_Q]`, maximum and sum of the online softmax.
        acc: fp32 `[BLOCK_Q, WIDTH]`, unnormalized output.
        first: position of the first key.
        end: number of leading keys of the sequence that the block of queries may attend to.
        position: position of each query `[BLOCK_Q]`.
        table: pointer to the page table of the sequence.
        d: dimensions `[WIDTH]`.
        CAUSAL: whether to apply the causal mask. If false, every query must be allowed to attend to
            all BLOCK keys.
    """
    t, at = tokens_at(first, kv_head, end, 0, table, page_stride, head_stride, DIM, PAGE, BLOCK)
    read = (d < DIM)[None, :]
    if CAUSAL:
        read = read & (t < end)[:, None]
    keys = tl.load(k_pages + at[:, None] + d[None, :], mask=read, other=0.0)  # [BLOCK, WIDTH]
    zeros = tl.zeros((queries.shape[0], BLOCK), tl.float32)
    scores = matmul(queries, tl.trans(keys.to(queries.dtype)), zeros)  # [BLOCK_Q, BLOCK]
    if CAUSAL:
        visible = (t[None, :] <= position[:, None]) & (t < end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    values = tl.load(v_pages + at[:, None] + d[None, :], mask=read, other=0.0)
    l = l * alpha + tl.sum(weights, axis=1)
    acc = matmul(weights.to(values.dtype), values, acc * alpha[:, None])
    return new_m, l, acc


@triton.jit
def block_of(starts, lengths, sequences, block, BLOCK_Q: tl.constexpr):
    """Locate a block of queries.

    Returns:
        Index of the block's sequence; row of the sequence's first new token; number of new tokens
        of the sequence; index of the block's first token among these; and sequence length.
    """
    sequence = sequence_of(starts, sequences, block, BLOCK_Q)
    start = tl.load(starts + sequence)
    tokens = tl.load(starts + sequence + 1) - start
    index = (block - (start // BLOCK_Q + sequence)) * BLOCK_Q
    return sequence, start, tokens, index, tl.load(lengths + sequence)


@triton.jit
def attend_block(
    queries, index, tokens, length, kv_head, table, k_pages, v_pages, page_stride, head_stride,
    scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the attention of a block of queries, fp32 `[BLOCK_Q, WIDTH]`.

    Args:
        queries: `[BLOCK_Q, WIDTH]`, queries of consecutive new tokens of one sequence.
        index: index of the first query among the sequence's new tokens.
        tokens: number of new tokens of the sequence.
        length: number of all tokens of the sequence.
        table: pointer to the page table of the sequence.
    """
    d = tl.arange(0, WIDTH)
    position = length - tokens + index + tl.arange(0, BLOCK_Q)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    end = tl.minimum(length, length - tokens + index + BLOCK_Q)
    unmasked = (length - tokens + index + 1) // BLOCK * BLOCK
    for first in range(0, unmasked, BLOCK):
        m, l, acc = attend_keys(
            queries, m, l, acc, first, kv_head, end, position, table, k_pages, v_pages,
            page_stride, head_stride, d, scale, False, DIM, PAGE, BLOCK,
        )  # fmt: skip
    for first in range(unmasked, end, BLOCK):
        m, l, acc = attend_keys(
            queries, m, l, acc, first, kv_head, end, position, table, k_pages, v_pages,
            page_stride, head_stride, d, scale, True, DIM, PAGE, BLOCK,
        )  # fmt: skip
    return acc / l[:, None]


@triton.jit
def prefill_kernel(
    q, k_pages, v_pages, page_stride, head_stride, page_table, table_stride,
    starts, lengths, sequences, out, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_Q queries of one head of one sequence per program.

    Grid `(tokens // BLOCK_Q + sequences, HEADS)`.

    Args:
        q: `[tokens, HEADS, DIM]`, bf16 or fp32.
        k_pages, v_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`, of equal strides.
        page_table: int32 `[sequences, pages]`, row stride ``table_stride``.
        starts: int32 `[sequences + 1]`, first row of each sequence in ``q``.
        lengths: int32 `[sequences]`, tokens of each sequence, the new ones included.
        out: shaped as ``q``, written.
        scale: log2(e) / sqrt(DIM).
        WIDTH: smallest power of two that is at least DIM and 16.
        BLOCK: keys per iteration.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    sequence, start, tokens, index, length = block_of(starts, lengths, sequences, block, BLOCK_Q)
    if index < tokens:
        row = index + tl.arange(0, BLOCK_Q)
        d = tl.arange(0, WIDTH)
        valid = (row < tokens)[:, None] & (d < DIM)[None, :]
        at = ((start + row).to(tl.int64) * HEADS + head) * DIM
        queries = tl.load(q + at[:, None] + d[None, :], mask=valid, other=0.0)  # [BLOCK_Q, WIDTH]
        found = attend_block(
            queries, index, tokens, length, head // (HEADS // KV_HEADS),
            page_table + sequence * table_stride, k_pages, v_pages, page_stride, head_stride, scale,
            DIM, WIDTH, PAGE, BLOCK_Q, BLOCK,
        )  # fmt: skip
        tl.store(out + at[:, None] + d[None, :], found.to(out.dtype.element_ty), mask=valid)


@triton.jit
def factored_prefill_kernel(
    inner, inner_stride, u, u_stride, rank, biases, cos, sin, k_pages, v_pages, page_stride,
    head_stride, page_table, table_stride, starts, lengths, sequences, out, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`prefill_kernel` with queries that each program computes from their factors, rounded to bf16.

    FlashSVD v1.5 also computes K and V from their factors, for every block of queries. Here they
    are computed once and read from pages.

    Args:
        inner: bf16 `[tokens, 8 inner_stride]`; its first columns are V_q x.
        u: bf16 `[HEADS * DIM, 8 rank]`, row stride 8 u_stride; rows in the order of
            `gemm.weights.by_halves`.
        biases: fp32 `[HEADS * DIM]`, in the same order, with BIAS.
        cos, sin: fp32 `[context, DIM / 2]`.
        out: bf16 `[tokens, HEADS, DIM]`, written.
        DIM: a power of two.
        BLOCK_R: columns of the factors per iteration.

    The other arguments are those of `prefill_kernel`.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    sequence, start, tokens, index, length = block_of(starts, lengths, sequences, block, BLOCK_Q)
    if index < tokens:
        row = index + tl.arange(0, BLOCK_Q)
        token = (start + row).to(tl.int64)
        valid = (row < tokens)[:, None]
        d = tl.arange(0, DIM // 2)
        k = tl.arange(0, BLOCK_R)
        first_row = head * DIM + d // 8 * 16 + d % 8  # [DIM / 2], rows of the first half
        left = inner + token[:, None] * (inner_stride * VECTOR) + k[None, :]
        right = u + first_row[None, :].to(tl.int64) * (u_stride * VECTOR) + k[:, None]
        first = tl.zeros((BLOCK_Q, DIM // 2), tl.float32)
        second = tl.zeros((BLOCK_Q, DIM // 2), tl.float32)
        for at in tl.range(0, rank * VECTOR, BLOCK_R, num_stages=4):
            inside = at + k < rank * VECTOR
            x = tl.load(left + at, mask=valid & inside[None, :], other=0.0)  # [BLOCK_Q, BLOCK_R]
            own = tl.load(right + at, mask=inside[:, None], other=0.0)  # [BLOCK_R, DIM / 2]
            partner = tl.load(right + u_stride * (8 * VECTOR) + at, mask=inside[:, None], other=0.0)
            first = matmul(x, own, first)
            second = matmul(x, partner, second)
        if BIAS:
            first += tl.load(biases + first_row)[None, :]
            second += tl.load(biases + first_row + 8)[None, :]
        angle = (length - tokens + row)[:, None] * (DIM // 2) + d[None, :]
        c = tl.load(cos + angle, mask=valid, other=0.0)
        s = tl.load(sin + angle, mask=valid, other=0.0)
        rotated = tl.join(first * c - second * s, second * c + first * s)  # [BLOCK_Q, DIM / 2, 2]
        queries = tl.reshape(tl.permute(rotated, (0, 2, 1)), (BLOCK_Q, DIM))
        found = attend_block(
            queries.to(inner.dtype.element_ty), index, tokens, length,
            head // (HEADS // KV_HEADS), page_table + sequence * table_stride, k_pages, v_pages,
            page_stride, head_stride, scale, DIM, DIM, PAGE, BLOCK_Q, BLOCK,
        )  # fmt: skip
        i = tl.arange(0, DIM)
        at = (token * HEADS + head) * DIM
        target = out + at[:, None] + i[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=valid)
