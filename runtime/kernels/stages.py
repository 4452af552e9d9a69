# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The products of a decode step: what all programs together do in one of its stages.

Each program has whole rows of a product, spread evenly, so that nothing but finished numbers is
shared. Weights `[rows, K]` are bf16 in one buffer, rows padded with zeros to multiples of eight
elements; activations are fp32. `runtime/decode_step.py` lays them out.
"""

import triton
import triton.language as tl

SEGMENT = tl.constexpr(5)
"""Fields of a segment: where its weights start, K, which input it has, where in it, its bias."""
HIDDEN, INNER = tl.constexpr(0), tl.constexpr(1)
"""A segment's input: what the group's first product reads, or what that wrote."""


@triton.jit
def root_scale(source, K, eps, BK: tl.constexpr):
    """1 / rms of a vector of K."""
    squares = tl.zeros((BK,), tl.float32)
    for k in range(0, K, BK):
        j = k + tl.arange(0, BK)
        x = tl.load(source + j, mask=j < K, other=0.0)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def inputs(source, norm, scale, k, K, BK: tl.constexpr, NORM: tl.constexpr):
    """BK elements of a stage's input from number k on, normed if it is."""
    j = k + tl.arange(0, BK)
    x = tl.load(source + j, mask=j < K, other=0.0)
    if NORM:
        x = x * scale * tl.load(norm + j, mask=j < K, other=0.0)
    return x


@triton.jit
def row_sums(weights, at, row, rows, k, width, x, BK: tl.constexpr):
    """What columns from k on add to some rows' products with ``x``; a row is ``width`` wide.

    The compiler is told here, where the numbers are made, that eight elements are one access.
    """
    j = k + tl.arange(0, BK)
    start = tl.multiple_of(at + row.to(tl.int64) * width, 8)
    inside = (row < rows)[:, None] & (j < width)[None, :]
    w = tl.load(weights + start[:, None] + j[None, :], mask=inside, other=0.0)
    return tl.sum(w.to(tl.float32) * x[None, :], axis=1)


@triton.jit
def product_of(
    weights, at, row, rows, K, source, norm, scale,
    BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """fp32 `[BN]`: some rows of a product."""
    y = tl.zeros((BN,), tl.float32)
    width = (K + 7) // 8 * 8
    for k in range(0, width, BK):
        x = inputs(source, norm, scale, k, K, BK, NORM)
        y += row_sums(weights, at, row, rows, k, width, x, BK)
    return y


@triton.jit
def segment_of(segments, number, hidden, inner):
    """A segment's weights, K, input and bias (or none: below zero)."""
    fields = segments + number * SEGMENT
    at = tl.load(fields)
    K = tl.load(fields + 1).to(tl.int32)
    kind = tl.load(fields + 2)
    offset = tl.load(fields + 3)
    source = tl.where(kind == INNER, inner + offset, hidden)
    return at, K, source, kind, tl.load(fields + 4)


@triton.jit
def segment_rows(
    weights, segments, number, row, rows, hidden, inner, norm, scale, vectors,
    BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Some rows of a segment, its bias added."""
    at, K, source, kind, bias = segment_of(segments, number, hidden, inner)
    if kind == HIDDEN:
        y = product_of(weights, at, row, rows, K, source, norm, scale, BN, BK, NORM)
    else:
        y = product_of(weights, at, row, rows, K, source, norm, scale, BN, BK, False)
    if bias >= 0:
        y += tl.load(vectors + bias + row, mask=row < rows, other=0.0)
    return y


@triton.jit
def inner_stage(
    pid, programs, weights, at, rows, K, hidden, hidden_stride, norm, eps, target, target_stride,
    B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``target`` `[B, rows]` = one matrix times the inputs: V of a group, or the head."""
    for b in range(B):
        source = hidden + b * hidden_stride
        scale = 0.0
        if NORM:
            scale = root_scale(source, K, eps, BK)
        for group in range(pid, (rows + BN - 1) // BN, programs):
            row = group * BN + tl.arange(0, BN)
            y = product_of(weights, at, row, rows, K, source, norm, scale, BN, BK, NORM)
            tl.store(target + b * target_stride + row, y, mask=row < rows)


@triton.jit
def residual_stage(
    pid, programs, weights, segments, rows, vectors, hidden, hidden_stride, inner, inner_stride,
    target, B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds a projection to the residual stream ``target`` `[B, rows]`: o and down."""
    for group in range(pid, (rows + BN - 1) // BN, programs):
        row = group * BN + tl.arange(0, BN)
        for b in range(B):
            y = segment_rows(
                weights, segments, 0, row, rows, hidden + b * hidden_stride,
                inner + b * inner_stride, vectors, 0.0, vectors, BN, BK, False,
            )  # fmt: skip
            place = target + b * rows + row
            y += tl.load(place, mask=row < rows, other=0.0)
            tl.store(place, y, mask=row < rows)


@triton.jit
def gate_stage(
    pid, programs, weights, segments, rows, vectors, hidden, K, inner, inner_stride, norm, eps,
    target, B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``target`` `[B, rows]` = silu(gate) * up."""
    for b in range(B):
        source = hidden + b * K
        scale = root_scale(source, K, eps, BK)
        for group in range(pid, (rows + BN - 1) // BN, programs):
            row = group * BN + tl.arange(0, BN)
            gate = segment_rows(
                weights, segments, 0, row, rows, source, inner + b * inner_stride, norm, scale,
                vectors, BN, BK, True,
            )  # fmt: skip
            up = segment_rows(
                weights, segments, 1, row, rows, source, inner + b * inner_stride, norm, scale,
                vectors, BN, BK, True,
            )  # fmt: skip
            y = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(target + b * rows + row, y, mask=row < rows)


@triton.jit
def heads_stage(
    pid, programs, weights, segments, vectors, hidden, K, inner, inner_stride, norm, eps,
    cos, sin, positions, page_table, table_stride, q, k_pages, v_pages, page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """q after RoPE, `[B, HEADS, DIM]`; k after RoPE and v into the pages.

    A group is BN rows of the first half of a head and their partners in the second.
    """
    HALF: tl.constexpr = DIM // 2
    EACH: tl.constexpr = (HALF + BN - 1) // BN
    for b in range(B):
        source = hidden + b * K
        scale = root_scale(source, K, eps, BK)
        position = tl.load(positions + b)
        page = tl.load(page_table + b * table_stride + position // PAGE).to(tl.int64)
        slot = page * page_stride + (position % PAGE) * DIM
        for group in range(pid, (HEADS + 2 * KV_HEADS) * EACH, programs):
            head = group // EACH
            d = group % EACH * BN + tl.arange(0, BN)
            number = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
            own = head - tl.where(number == 0, 0, tl.where(number == 1, HEADS, HEADS + KV_HEADS))
            last = own * DIM + HALF
            first = segment_rows(
                weights, segments, number, own * DIM + d, last, source, inner + b * inner_stride,
                norm, scale, vectors, BN, BK, True,
            )  # fmt: skip
            second = segment_rows(
                weights, segments, number, last + d, last + HALF, source,
                inner + b * inner_stride, norm, scale, vectors, BN, BK, True,
            )  # fmt: skip
            here = d < HALF
            if number < 2:
                c = tl.load(cos + position * HALF + d, mask=here, other=0.0)
                s = tl.load(sin + position * HALF + d, mask=here, other=0.0)
                turned = first * c - second * s
                second = second * c + first * s
                first = turned
            if number == 0:
                place = q + (b * HEADS + own) * DIM + d
                kind = q.dtype.element_ty
                tl.store(place, first.to(kind), mask=here)
                tl.store(place + HALF, second.to(kind), mask=here)
            else:
                at = slot + own * head_stride + d
                if number == 1:
                    tl.store(k_pages + at, first.to(tl.bfloat16), mask=here)
                    tl.store(k_pages + at + HALF, second.to(tl.bfloat16), mask=here)
                else:
                    tl.store(v_pages + at, first.to(tl.bfloat16), mask=here)
                    tl.store(v_pages + at + HALF, second.to(tl.bfloat16), mask=here)
