# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""From a projection's q, k and v to rotated queries and to K and V in pages."""

import triton
import triton.language as tl


@triton.jit
def turn_and_write_kernel(
    qkv, cos, sin, positions, sequences, page_table, table_stride, q, k_pages, v_pages,
    page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, BY_HALVES: tl.constexpr,
):  # fmt: skip
    """A program turns ROWS heads of one token; HALF is a power of two, from DIM / 2 on. With
    BY_HALVES, heads of ``qkv`` are as `step.weights.by_halves` has them.

    Grid `(tokens, heads in all / ROWS)`. Arguments as of `DenseAttention.write`.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    page = tl.load(page_table + tl.load(sequences + token) * table_stride + position // PAGE)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (d < DIM // 2)
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    source += d // 8 * 16 + d % 8 if BY_HALVES else d
    partner: tl.constexpr = 8 if BY_HALVES else DIM // 2
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + position * (DIM // 2) + d, mask=d < DIM // 2, other=0.0)
    s = tl.load(sin + position * (DIM // 2) + d, mask=d < DIM // 2, other=0.0)
    turned = head < HEADS + KV_HEADS
    a = tl.where(turned, first * c - second * s, first)
    b = tl.where(turned, second * c + first * s, second)

    kind = q.dtype.element_ty
    target = q + token * (HEADS * DIM) + head * DIM + d
    tl.store(target, a.to(kind), mask=inside & (head < HEADS))
    tl.store(target + DIM // 2, b.to(kind), mask=inside & (head < HEADS))
    slot = page.to(tl.int64) * page_stride + (position % PAGE) * DIM + d
    at = slot + (head - HEADS) * head_stride
    is_k = inside & (head >= HEADS) & turned
    tl.store(k_pages + at, a.to(tl.bfloat16), mask=is_k)
    tl.store(k_pages + at + DIM // 2, b.to(tl.bfloat16), mask=is_k)
    at = slot + (head - HEADS - KV_HEADS) * head_stride
    is_v = inside & (head >= HEADS + KV_HEADS)
    tl.store(v_pages + at, a.to(tl.bfloat16), mask=is_v)
    tl.store(v_pages + at + DIM // 2, b.to(tl.bfloat16), mask=is_v)
