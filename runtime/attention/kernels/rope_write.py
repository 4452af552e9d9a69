# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""RoPE of q and k, optionally after RMSNorm of each head, and the write of k and v into pages."""

import triton
import triton.language as tl

from runtime.kernels.overlap import after_previous


@triton.jit
def norm_heads(
    first, second, head, d, q_norm, k_norm,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Apply RMSNorm to the query and key heads among ROWS heads; value heads are not changed.

    Statistics are fp32. The result is rounded to DTYPE, as if a separate norm had stored it.

    Args:
        first, second: fp32 `[ROWS, HALF]`, the halves of each head; columns at or beyond DIM / 2
            are 0.
        head: head indices `[ROWS, 1]`.
        d: dimensions `[1, HALF]` of the first half.
    """
    mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / DIM  # [ROWS]
    scale = tl.rsqrt(mean + EPS)[:, None]
    real = d < DIM // 2
    is_q = head < HEADS
    q_first = tl.load(q_norm + d, mask=real, other=0.0)  # [1, HALF]
    q_second = tl.load(q_norm + DIM // 2 + d, mask=real, other=0.0)
    k_first = tl.load(k_norm + d, mask=real, other=0.0)
    k_second = tl.load(k_norm + DIM // 2 + d, mask=real, other=0.0)
    normed_first = first * scale * tl.where(is_q, q_first, k_first)
    normed_second = second * scale * tl.where(is_q, q_second, k_second)
    is_v = head >= HEADS + KV_HEADS
    first = tl.where(is_v, first, normed_first.to(DTYPE).to(tl.float32))
    second = tl.where(is_v, second, normed_second.to(DTYPE).to(tl.float32))
    return first, second


@triton.jit
def rope_write_kernel(
    qkv, cos, sin, positions, sequences, starts, lengths, page_table, table_stride, q, k_pages,
    v_pages, page_stride, head_stride, q_norm, k_norm,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, BY_HALVES: tl.constexpr, NORM: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Apply RoPE to ROWS heads of one token per program, and write k and v into pages.

    Grid `(tokens, ceil((HEADS + 2 KV_HEADS) / ROWS))`. With HEADS = 0, the input has k and v only.

    Args:
        qkv: `[tokens, (HEADS + 2 KV_HEADS) * DIM]`; with BY_HALVES, the elements of a head are in
            the order of `gemm.weights.by_halves`.
        cos, sin: fp32 `[context, DIM / 2]`.
        positions: int64 `[tokens]`, which RoPE depends on.
        sequences: int32 `[tokens]`, the row of ``page_table`` for each token.
        starts, lengths: int32 `[sequences + 1]` and `[sequences]`, see `Batch`. They determine
            where k and v are written, as a sequence may have evicted tokens.
        page_table: int32 `[sequences, pages]`, row stride ``table_stride``.
        q: `[tokens, HEADS, DIM]`, written, with the dtype of ``qkv``.
        k_pages, v_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`, written, of equal strides.
        q_norm, k_norm: fp32 `[DIM]` in the model's order of dimensions, with NORM; otherwise None.
        HALF: smallest power of two that is at least DIM / 2.
        NORM: whether to normalize query and key heads before RoPE.
        EPS: epsilon of the norm.
    """
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    sequence = tl.load(sequences + token)
    index = tl.load(lengths + sequence) - tl.load(starts + sequence + 1) + token
    page = tl.load(page_table + sequence * table_stride + index // PAGE)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    d = tl.arange(0, HALF)[None, :]  # [1, HALF]
    inside = (head < HEADS + 2 * KV_HEADS) & (d < DIM // 2)
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    source += d // 8 * 16 + d % 8 if BY_HALVES else d
    partner: tl.constexpr = 8 if BY_HALVES else DIM // 2
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)  # [ROWS, HALF]
    second = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        first, second = norm_heads(
            first, second, head, d, q_norm, k_norm, HEADS, KV_HEADS, DIM, EPS,
            qkv.dtype.element_ty,
        )  # fmt: skip
    c = tl.load(cos + position * (DIM // 2) + d, mask=d < DIM // 2, other=0.0)
    s = tl.load(sin + position * (DIM // 2) + d, mask=d < DIM // 2, other=0.0)
    rotated = head < HEADS + KV_HEADS
    a = tl.where(rotated, first * c - second * s, first)
    b = tl.where(rotated, second * c + first * s, second)

    dtype = q.dtype.element_ty
    target = q + token * (HEADS * DIM) + head * DIM + d
    tl.store(target, a.to(dtype), mask=inside & (head < HEADS))
    tl.store(target + DIM // 2, b.to(dtype), mask=inside & (head < HEADS))
    slot = page.to(tl.int64) * page_stride + (index % PAGE) * DIM + d
    at = slot + (head - HEADS) * head_stride
    is_k = inside & (head >= HEADS) & rotated
    tl.store(k_pages + at, a.to(tl.bfloat16), mask=is_k)
    tl.store(k_pages + at + DIM // 2, b.to(tl.bfloat16), mask=is_k)
    at = slot + (head - HEADS - KV_HEADS) * head_stride
    is_v = inside & (head >= HEADS + KV_HEADS)
    tl.store(v_pages + at, a.to(tl.bfloat16), mask=is_v)
    tl.store(v_pages + at + DIM // 2, b.to(tl.bfloat16), mask=is_v)
