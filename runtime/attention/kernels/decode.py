# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Attention of one new token per sequence over its pages, split along the sequence's length.

The last program of a KV head to finish reduces the partial results of all splits, so that one
launch suffices. Lengths are read on the device, so that a CUDA graph can be replayed with other
lengths.
"""

import triton
import triton.language as tl

from runtime.kernels.arith import matmul


@triton.jit
def tokens_at(
    first, kv_head, length, table, page_stride, head_stride,
    DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return BLOCK consecutive positions, and the offsets of their slots in the K or V pages.

    Args:
        first: first position.
        table: pointer to the page table of the sequence.
    """
    t = first + tl.arange(0, BLOCK)
    page = tl.load(table + t // PAGE, mask=t < length, other=0).to(tl.int64)
    return t, page * page_stride + kv_head * head_stride + (t % PAGE) * DIM


@triton.jit
def attend_split(
    sequence, kv_head, split, q, k_pages, v_pages, page_stride, head_stride, page_table,
    table_stride, lengths, part_acc, part_m, part_l, counters, out, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attend over one split of a sequence, for the GROUP query heads of one KV head.

    The arguments are those of `decode_kernel`.
    """
    length = tl.load(lengths + sequence)
    table = page_table + sequence * table_stride
    each = (length + BLOCK * SPLITS - 1) // (BLOCK * SPLITS) * BLOCK
    begin = split * each
    end = tl.minimum(begin + each, length)

    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    head = ((sequence * KV_HEADS + kv_head) * GROUP + row).to(tl.int64)  # [ROWS]
    valid = (row < GROUP)[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + head[:, None] * DIM + d[None, :], mask=valid, other=0.0)  # [ROWS, WIDTH]
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(begin, end, BLOCK):
        t, at = tokens_at(first, kv_head, length, table, page_stride, head_stride, DIM, PAGE, BLOCK)
        read = (t < length)[:, None] & (d < DIM)[None, :]
        keys = tl.load(k_pages + at[:, None] + d[None, :], mask=read, other=0.0)  # [BLOCK, WIDTH]
        values = tl.load(v_pages + at[:, None] + d[None, :], mask=read, other=0.0)
        zeros = tl.zeros((ROWS, BLOCK), tl.float32)
        scores = matmul(queries, tl.trans(keys.to(queries.dtype)), zeros) * scale  # [ROWS, BLOCK]
        scores = tl.where((t < length)[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_m[:, None])
        alpha = tl.exp2(m - new_m)
        l = l * alpha + tl.sum(weights, axis=1)
        acc = matmul(weights.to(values.dtype), values, acc * alpha[:, None])
        m = new_m

    dtype = out.dtype.element_ty
    if SPLITS == 1:
        result = acc / l[:, None]
        tl.store(out + head[:, None] * DIM + d[None, :], result.to(dtype), mask=valid)
    else:
        part = head * SPLITS + split
        tl.store(part_acc + part[:, None] * DIM + d[None, :], acc, mask=valid)
        tl.store(part_m + part, m, mask=row < GROUP)
        tl.store(part_l + part, l, mask=row < GROUP)
        tl.debug_barrier()
        counter = counters + sequence * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            i = tl.arange(0, SPLITS)
            for g in range(GROUP):
                own_head = (sequence * KV_HEADS + kv_head) * GROUP + g
                parts = (own_head * SPLITS + i).to(tl.int64)  # [SPLITS]
                all_m = tl.load(part_m + parts, cache_modifier=".cg")
                share = tl.exp2(all_m - tl.max(all_m, axis=0))
                total = tl.sum(share * tl.load(part_l + parts, cache_modifier=".cg"), axis=0)
                all_acc = tl.load(
                    part_acc + parts[:, None] * DIM + d[None, :],
                    mask=(d < DIM)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )  # [SPLITS, WIDTH]
                result = tl.sum(all_acc * share[:, None], axis=0) / total
                tl.store(out + own_head * DIM + d, result.to(dtype), mask=d < DIM)
            tl.store(counter, 0)


@triton.jit
def decode_kernel(
    q, k_pages, v_pages, page_stride, head_stride, page_table, table_stride, lengths,
    part_acc, part_m, part_l, counters, out, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attend over one split of a sequence per program, for the GROUP query heads of one KV head.

    Grid `(sequences, KV_HEADS, SPLITS)`.

    Args:
        q: `[sequences, KV_HEADS * GROUP, DIM]`, bf16 or fp32.
        k_pages, v_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`, of equal strides.
        page_table: int32 `[sequences, pages]`, row stride ``table_stride``.
        lengths: int32 `[sequences]`.
        part_acc: fp32 `[sequences, KV_HEADS, GROUP, SPLITS, DIM]`, unnormalized outputs of splits.
        part_m, part_l: fp32 `[sequences, KV_HEADS, GROUP, SPLITS]`, maximum and sum of each split.
        counters: int32 `[sequences, KV_HEADS]`, zero before and after the launch.
        out: shaped as ``q``, written.
        scale: log2(e) / sqrt(DIM).
        ROWS, WIDTH: powers of two of at least 16, and at least GROUP and DIM respectively.
        BLOCK: keys per iteration.
    """
    attend_split(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), q, k_pages, v_pages, page_stride,
        head_stride, page_table, table_stride, lengths, part_acc, part_m, part_l, counters, out,
        scale, KV_HEADS, GROUP, ROWS, DIM, WIDTH, PAGE, BLOCK, SPLITS,
    )  # fmt: skip
