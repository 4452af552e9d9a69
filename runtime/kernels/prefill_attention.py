# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Causal attention of many new tokens of each sequence over its pages, theirs among them."""

import triton
import triton.language as tl

from runtime.kernels.arith import product
from runtime.kernels.decode_attention import tokens_at


@triton.jit
def sequence_of(starts, sequences, block, BLOCK_Q: tl.constexpr):
    """Which sequence a block of queries belongs to: sequence i's first is starts[i] / BLOCK_Q + i,
    rounded down, which leaves each at least as many as it needs."""
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
def attend_to(
    queries, peak, total, mixed, first, kv_head, seen, position, table, k_pages, v_pages,
    page_stride, head_stride, d, scale,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of keys. Without CAUSAL every query sees all of it, and all of it is there."""
    t, at = tokens_at(first, kv_head, seen, table, page_stride, head_stride, DIM, PAGE, BLOCK)
    read = (d < DIM)[None, :]
    if CAUSAL:
        read = read & (t < seen)[:, None]
    keys = tl.load(k_pages + at[:, None] + d[None, :], mask=read, other=0.0)
    nothing = tl.zeros((queries.shape[0], BLOCK), tl.float32)
    scores = product(queries, tl.trans(keys.to(queries.dtype)), nothing)
    if CAUSAL:
        visible = (t[None, :] <= position[:, None]) & (t < seen)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    fading = tl.exp2(peak - higher)
    values = tl.load(v_pages + at[:, None] + d[None, :], mask=read, other=0.0)
    total = total * fading + tl.sum(weights, axis=1)
    mixed = product(weights.to(values.dtype), values, mixed * fading[:, None])
    return higher, total, mixed


@triton.jit
def prefill_kernel(
    q, k_pages, v_pages, page_stride, head_stride, page_table, table_stride,
    starts, lengths, sequences, out, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_Q queries of one head of one sequence.

    Grid `(tokens / BLOCK_Q + sequences, HEADS)`. ``q`` and ``out`` `[n, HEADS, DIM]`; ``starts``
    `[sequences + 1]`, ``lengths`` `[sequences]` as in `Batch`. ``scale`` has log2(e) in it.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of(starts, sequences, block, BLOCK_Q)
    start = tl.load(starts + sequence)
    tokens = tl.load(starts + sequence + 1) - start
    index = (block - (start // BLOCK_Q + sequence)) * BLOCK_Q
    if index < tokens:
        length = tl.load(lengths + sequence)
        table = page_table + sequence * table_stride
        kv_head = head // (HEADS // KV_HEADS)
        row = index + tl.arange(0, BLOCK_Q)
        d = tl.arange(0, WIDTH)
        position = length - tokens + row
        here = (row < tokens)[:, None] & (d < DIM)[None, :]
        at = ((start + row).to(tl.int64) * HEADS + head) * DIM
        queries = tl.load(q + at[:, None] + d[None, :], mask=here, other=0.0)
        peak = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        mixed = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
        seen = tl.minimum(length, length - tokens + index + BLOCK_Q)
        whole = (length - tokens + index + 1) // BLOCK * BLOCK
        for first in range(0, whole, BLOCK):
            peak, total, mixed = attend_to(
                queries, peak, total, mixed, first, kv_head, seen, position, table, k_pages,
                v_pages, page_stride, head_stride, d, scale, False, DIM, PAGE, BLOCK,
            )  # fmt: skip
        for first in range(whole, seen, BLOCK):
            peak, total, mixed = attend_to(
                queries, peak, total, mixed, first, kv_head, seen, position, table, k_pages,
                v_pages, page_stride, head_stride, d, scale, True, DIM, PAGE, BLOCK,
            )  # fmt: skip
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] + d[None, :], result, mask=here)
