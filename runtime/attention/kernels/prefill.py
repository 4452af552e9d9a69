# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Causal attention of many new tokens of each sequence over its pages, theirs among them."""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import tokens_at
from runtime.kernels.arith import product


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
def block_of(starts, lengths, sequences, block, BLOCK_Q: tl.constexpr):
    """A block's sequence, where its tokens start, how many there are, which of them is the block's
    first, and how long the sequence is."""
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
    """What BLOCK_Q queries `[BLOCK_Q, WIDTH]` find, those from ``index`` on of a sequence's new
    tokens."""
    d = tl.arange(0, WIDTH)
    position = length - tokens + index + tl.arange(0, BLOCK_Q)
    peak = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    seen = tl.minimum(length, length - tokens + index + BLOCK_Q)
    whole = (length - tokens + index + 1) // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        peak, total, mixed = attend_to(
            queries, peak, total, mixed, first, kv_head, seen, position, table, k_pages, v_pages,
            page_stride, head_stride, d, scale, False, DIM, PAGE, BLOCK,
        )  # fmt: skip
    for first in range(whole, seen, BLOCK):
        peak, total, mixed = attend_to(
            queries, peak, total, mixed, first, kv_head, seen, position, table, k_pages, v_pages,
            page_stride, head_stride, d, scale, True, DIM, PAGE, BLOCK,
        )  # fmt: skip
    return mixed / total[:, None]


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
    sequence, start, tokens, index, length = block_of(starts, lengths, sequences, block, BLOCK_Q)
    if index < tokens:
        row = index + tl.arange(0, BLOCK_Q)
        d = tl.arange(0, WIDTH)
        here = (row < tokens)[:, None] & (d < DIM)[None, :]
        at = ((start + row).to(tl.int64) * HEADS + head) * DIM
        queries = tl.load(q + at[:, None] + d[None, :], mask=here, other=0.0)
        found = attend_block(
            queries, index, tokens, length, head // (HEADS // KV_HEADS),
            page_table + sequence * table_stride, k_pages, v_pages, page_stride, head_stride, scale,
            DIM, WIDTH, PAGE, BLOCK_Q, BLOCK,
        )  # fmt: skip
        tl.store(out + at[:, None] + d[None, :], found.to(out.dtype.element_ty), mask=here)


@triton.jit
def factored_prefill_kernel(
    inner, inner_stride, u, u_stride, rank, biases, cos, sin, k_pages, v_pages, page_stride,
    head_stride, page_table, table_stride, starts, lengths, sequences, out, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The same of queries that are not there yet: a program makes its own of their factors.

    ``inner`` bf16 `[n, …]`, of which the first columns are V_q x; strides, and ``rank``, in
    eights. ``u`` bf16 `[HEADS * DIM, 8 rank]`, its rows as `step.weights.by_halves` has them; DIM
    is a power of two. Queries are bf16, as they are elsewhere. FlashSVD v1.5 makes K and V of their
    factors here, too, for every block of queries; ours are in pages, once.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    sequence, start, tokens, index, length = block_of(starts, lengths, sequences, block, BLOCK_Q)
    if index < tokens:
        row = index + tl.arange(0, BLOCK_Q)
        token = (start + row).to(tl.int64)
        here = (row < tokens)[:, None]
        d = tl.arange(0, DIM // 2)
        k = tl.arange(0, BLOCK_R)
        first_row = head * DIM + d // 8 * 16 + d % 8
        left = inner + token[:, None] * (inner_stride * 8) + k[None, :]
        right = u + first_row[None, :].to(tl.int64) * (u_stride * 8) + k[:, None]
        first = tl.zeros((BLOCK_Q, DIM // 2), tl.float32)
        second = tl.zeros((BLOCK_Q, DIM // 2), tl.float32)
        for at in tl.range(0, rank * 8, BLOCK_R, num_stages=4):
            inside = at + k < rank * 8
            x = tl.load(left + at, mask=here & inside[None, :], other=0.0)
            own = tl.load(right + at, mask=inside[:, None], other=0.0)
            partner = tl.load(right + u_stride * 64 + at, mask=inside[:, None], other=0.0)
            first = product(x, own, first)
            second = product(x, partner, second)
        if BIAS:
            first += tl.load(biases + first_row)[None, :]
            second += tl.load(biases + first_row + 8)[None, :]
        angle = (length - tokens + row)[:, None] * (DIM // 2) + d[None, :]
        c = tl.load(cos + angle, mask=here, other=0.0)
        s = tl.load(sin + angle, mask=here, other=0.0)
        turned = tl.join(first * c - second * s, second * c + first * s)
        queries = tl.reshape(tl.permute(turned, (0, 2, 1)), (BLOCK_Q, DIM))
        found = attend_block(
            queries.to(inner.dtype.element_ty), index, tokens, length,
            head // (HEADS // KV_HEADS), page_table + sequence * table_stride, k_pages, v_pages,
            page_stride, head_stride, scale, DIM, DIM, PAGE, BLOCK_Q, BLOCK,
        )  # fmt: skip
        i = tl.arange(0, DIM)
        at = (token * HEADS + head) * DIM
        target = out + at[:, None] + i[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=here)
