# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of one new token of each sequence over its pages, the length split among programs.

The last program of a head to finish adds up what all of its splits found, so that one launch does.
Lengths are read on the device: a CUDA graph serves any of them.
"""

import triton
import triton.language as tl

from runtime.kernels.arith import product


@triton.jit
def tokens_at(
    first, kv_head, length, table, page_stride, head_stride,
    DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of BLOCK tokens from ``first`` on: which there are, and where in a plane each one starts."""
    t = first + tl.arange(0, BLOCK)
    page = tl.load(table + t // PAGE, mask=t < length, other=0).to(tl.int64)
    return t, page * page_stride + kv_head * head_stride + (t % PAGE) * DIM


@triton.jit
def attend_part(
    sequence, kv_head, split, q, k_pages, v_pages, page_stride, head_stride, page_table,
    table_stride, lengths, sums, peaks, totals, arrived, out, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One part of a sequence's length, of the GROUP query heads of one KV head."""
    length = tl.load(lengths + sequence)
    table = page_table + sequence * table_stride
    each = (length + BLOCK * SPLITS - 1) // (BLOCK * SPLITS) * BLOCK
    begin = split * each
    end = tl.minimum(begin + each, length)

    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    head = ((sequence * KV_HEADS + kv_head) * GROUP + row).to(tl.int64)
    here = (row < GROUP)[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + head[:, None] * DIM + d[None, :], mask=here, other=0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(begin, end, BLOCK):
        t, at = tokens_at(first, kv_head, length, table, page_stride, head_stride, DIM, PAGE, BLOCK)
        read = (t < length)[:, None] & (d < DIM)[None, :]
        keys = tl.load(k_pages + at[:, None] + d[None, :], mask=read, other=0.0)
        values = tl.load(v_pages + at[:, None] + d[None, :], mask=read, other=0.0)
        nothing = tl.zeros((ROWS, BLOCK), tl.float32)
        scores = product(queries, tl.trans(keys.to(queries.dtype)), nothing) * scale
        scores = tl.where((t < length)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fading = tl.exp2(peak - higher)
        total = total * fading + tl.sum(weights, axis=1)
        mixed = product(weights.to(values.dtype), values, mixed * fading[:, None])
        peak = higher

    kind = out.dtype.element_ty
    if SPLITS == 1:
        result = mixed / total[:, None]
        tl.store(out + head[:, None] * DIM + d[None, :], result.to(kind), mask=here)
    else:
        part = head * SPLITS + split
        tl.store(sums + part[:, None] * DIM + d[None, :], mixed, mask=here)
        tl.store(peaks + part, peak, mask=row < GROUP)
        tl.store(totals + part, total, mask=row < GROUP)
        tl.debug_barrier()
        place = arrived + sequence * KV_HEADS + kv_head
        if tl.atomic_add(place, 1, sem="acq_rel") == SPLITS - 1:
            i = tl.arange(0, SPLITS)
            for g in range(GROUP):
                own_head = (sequence * KV_HEADS + kv_head) * GROUP + g
                each_part = (own_head * SPLITS + i).to(tl.int64)
                own = tl.load(peaks + each_part, cache_modifier=".cg")
                share = tl.exp2(own - tl.max(own, axis=0))
                whole = tl.sum(share * tl.load(totals + each_part, cache_modifier=".cg"), axis=0)
                found = tl.load(
                    sums + each_part[:, None] * DIM + d[None, :],
                    mask=(d < DIM)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                result = tl.sum(found * share[:, None], axis=0) / whole
                tl.store(out + own_head * DIM + d, result.to(kind), mask=d < DIM)
            tl.store(place, 0)


@triton.jit
def decode_kernel(
    q, k_pages, v_pages, page_stride, head_stride, page_table, table_stride, lengths,
    sums, peaks, totals, arrived, out, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A program has the GROUP query heads of one KV head, and a part of the tokens.

    Grid `(sequences, KV_HEADS, SPLITS)`. ``q`` and ``out`` `[s, KV_HEADS * GROUP, DIM]`; ROWS and
    WIDTH are powers of two, from GROUP and DIM on, at least 16. ``sums`` fp32
    `[s, KV_HEADS, GROUP, SPLITS, DIM]`, ``peaks`` and ``totals`` `[s, KV_HEADS, GROUP, SPLITS]`;
    ``arrived`` int32 `[s, KV_HEADS]`, zeros before and after. ``scale`` has log2(e) in it.
    """
    attend_part(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), q, k_pages, v_pages, page_stride,
        head_stride, page_table, table_stride, lengths, sums, peaks, totals, arrived, out, scale,
        KV_HEADS, GROUP, ROWS, DIM, WIDTH, PAGE, BLOCK, SPLITS,
    )  # fmt: skip
