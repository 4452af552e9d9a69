# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Attention of one new token per sequence over its pages, balanced over a fixed number of programs.

A tile is BLOCK consecutive keys; see `runtime.attention.kernels.balance`.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.balance import (
    divide,
    head_of_tile,
    head_splits,
    interval_begin,
    write_split,
    write_whole,
)
from runtime.kernels.arith import matmul
from runtime.kernels.overlap import after_previous


@triton.jit
def tokens_at(
    first, kv_head, length, gap, table, page_stride, head_stride,
    DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return BLOCK consecutive keys of a sequence, and the offsets of their slots in the pages.

    Args:
        first: index of the first key.
        length: number of keys of the sequence.
        gap: number of positions after the first page that have no keys, a multiple of PAGE.
        table: pointer to the page table of the sequence.
    """
    t = first + tl.arange(0, BLOCK)
    index = (t + tl.where(t < PAGE, 0, gap)) // PAGE
    page = tl.load(table + index, mask=t < length, other=0).to(tl.int64)
    return t, page * page_stride + kv_head * head_stride + (t % PAGE) * DIM


@triton.jit
def no_keys(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the initial state of an online softmax: ``acc``, ``m`` and ``l``."""
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    return acc, m, l


@triton.jit
def attend_tiles(
    queries, acc, m, l, kv_head, begin, end, length, gap, k_pages, v_pages, page_stride,
    head_stride, table, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend over the keys ``begin`` to ``end - 1`` in the pages of one KV head.

    Args:
        queries: `[ROWS, WIDTH]`.
        begin, end: multiples of BLOCK.
        acc: fp32 `[ROWS, WIDTH]`, unnormalized output over the keys attended so far.
        m, l: fp32 `[ROWS]`, maximum and sum of the online softmax over them.
        length: number of keys of the sequence in ``k_pages``.
        gap: positions after the first page whose keys are elsewhere, a multiple of PAGE.
        table: pointer to the page table of the sequence.

    Returns:
        ``acc``, ``m`` and ``l``, updated.
    """
    d = tl.arange(0, WIDTH)
    for first in range(begin, end, BLOCK):
        t, at = tokens_at(
            first, kv_head, length, gap, table, page_stride, head_stride, DIM, PAGE, BLOCK
        )
        read = (t < length)[:, None] & (d < DIM)[None, :]
        keys = tl.load(k_pages + at[:, None] + d[None, :], mask=read, other=0.0)  # [BLOCK, WIDTH]
        values = tl.load(v_pages + at[:, None] + d[None, :], mask=read, other=0.0)
        zeros = tl.zeros((queries.shape[0], BLOCK), tl.float32)
        scores = matmul(queries, tl.trans(keys.to(queries.dtype)), zeros) * scale  # [ROWS, BLOCK]
        scores = tl.where((t < length)[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_m[:, None])
        alpha = tl.exp2(m - new_m)
        l = l * alpha + tl.sum(weights, axis=1)
        acc = matmul(weights.to(values.dtype), values, acc * alpha[:, None])
        m = new_m
    return acc, m, l


@triton.jit(do_not_specialize=["sequences"])
def decode_kernel(
    q, k_pages, v_pages, page_stride, head_stride, page_table, table_stride, lengths, sequences,
    split_acc, split_m, split_l, counters, out, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr,
    MIN_TILES: tl.constexpr, MERGED: tl.constexpr, MERGED_HEADS: tl.constexpr,
):  # fmt: skip
    """Attend over one interval of tiles per program, for the GROUP query heads of each KV head.

    Grid `(programs,)`. Every program finds its interval from the lengths of all sequences.

    Args:
        q: `[sequences, KV_HEADS * GROUP, DIM]`, bf16 or fp32.
        k_pages, v_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`, of equal strides.
        page_table: int32 `[sequences, pages]`, row stride ``table_stride``.
        lengths: int32 `[sequences]`.
        split_acc, split_m, split_l, counters: see `balance.write_split`.
        out: shaped as ``q``, written.
        scale: log2(e) / sqrt(DIM).
        ROWS, WIDTH: powers of two of at least 16, and at least GROUP and DIM respectively.
        BLOCK: keys of a tile.
        SEQUENCES: power of two, at least ``sequences``.
        MIN_TILES: minimum number of tiles of an interval; with little work, some programs get none.
        MERGED, MERGED_HEADS: see `balance.write_split`.
    """
    after_previous()
    s = tl.arange(0, SEQUENCES)
    # Tiles of one KV head of each sequence.
    tiles = tl.cdiv(tl.load(lengths + s, mask=s < sequences, other=0), BLOCK)
    ends, programs, each, extra = divide(tiles, tl.num_programs(0), KV_HEADS, MIN_TILES)
    program = tl.program_id(0)
    if program >= programs:
        return
    begin = interval_begin(program, each, extra)
    end = interval_begin(program + 1, each, extra)

    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    valid = (row < GROUP)[:, None] & (d < DIM)[None, :]
    tile = begin
    while tile < end:
        sequence, kv_head, head_begin, count = head_of_tile(s, tile, tiles, ends, KV_HEADS)
        stop = tl.minimum(head_begin + count, end)
        head = ((sequence * KV_HEADS + kv_head) * GROUP + row).to(tl.int64)  # [ROWS]
        queries = tl.load(q + head[:, None] * DIM + d[None, :], mask=valid, other=0.0)
        acc, m, l = no_keys(ROWS, WIDTH)
        acc, m, l = attend_tiles(
            queries, acc, m, l, kv_head, (tile - head_begin) * BLOCK, (stop - head_begin) * BLOCK,
            tl.load(lengths + sequence), 0, k_pages, v_pages, page_stride, head_stride,
            page_table + sequence * table_stride, scale, DIM, WIDTH, PAGE, BLOCK,
        )  # fmt: skip
        if stop - tile == count:
            write_whole(acc, l, sequence, kv_head, out, KV_HEADS, GROUP, ROWS, DIM, WIDTH)
        else:
            first, splits, first_slot = head_splits(head_begin, count, each, extra)
            write_split(
                acc, m, l, sequence, kv_head, (tile > begin).to(tl.int32), first, splits,
                first_slot, split_acc, split_m, split_l, counters, out, KV_HEADS, GROUP, ROWS, DIM,
                WIDTH, MERGED, MERGED_HEADS,
            )  # fmt: skip
        tile = stop
