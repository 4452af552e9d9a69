# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Attention of one new token per sequence over its stored and exact pages, in one launch.

The tiles of a KV head are its stored tiles, BLOCK tokens each, and then its exact tiles,
EXACT_BLOCK tokens each. The exact tokens are those of the first pages (sinks) and of the window;
they are numbered without the gap between the two. A program may attend over both kinds. Programs
have equal numbers of tiles, see `runtime.attention.kernels.balance`, or tiles of equal cost, see
`runtime.kv.kernels.division`.

A format contributes one function that attends over stored tiles of one KV head::

    ATTEND(
        queries, kv_head, begin, end, count, planes, table, scale,
        KV_HEADS, DIM, PAGE, BLOCK, K_WIDTH, V_WIDTH,
    )

- queries: `[ROWS, WIDTH]`, bf16 or fp32.
- begin, end: stored tokens, multiples of BLOCK; ``count``: number of stored tokens of the sequence.
- planes: pointers to the stored planes of the layer, `[page, KV_HEADS, PAGE, width]`, contiguous,
  and then other inputs of the format.
- table: pointer to the page id of the first stored page of the sequence.
- K_WIDTH, V_WIDTH: widths of the first two planes.

It returns ``acc``, ``m`` and ``l`` of an online softmax, as `decode.attend_tiles` does. Transforms
of K and V are undone once per call, on the queries and the output, not for each tile.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.balance import (
    divide,
    head_parts,
    interval_begin,
    locate,
    write_part,
    write_whole,
)
from runtime.attention.kernels.decode import attend_tiles, no_keys
from runtime.kv.kernels.division import (
    divide_costs,
    parts_by_cost,
    split_interval,
    split_parts,
    tile_at,
)


@triton.jit
def stored_tokens(
    length, PAGE: tl.constexpr, WINDOW: tl.constexpr, SINK_PAGES: tl.constexpr
):  # fmt: skip
    """Return the number of stored tokens of a sequence; see `runtime.core.window.first_recent`."""
    return tl.maximum((length - WINDOW) // PAGE - SINK_PAGES, 0) * PAGE


@triton.jit
def rows_at(
    first, kv_head, count, table, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Return every STEP-th stored token from ``first`` on, and its row in the stored planes.

    A plane `[page, KV_HEADS, PAGE, width]` has rows of ``width`` elements.

    Returns:
        Tokens, int32, and rows, int64, both `[BLOCK / STEP]`.
    """
    t = first + tl.arange(0, BLOCK // STEP) * STEP
    page = tl.load(table + t // PAGE, mask=t < count, other=0).to(tl.int64)
    return t, (page * KV_HEADS + kv_head) * PAGE + t % PAGE


@triton.jit
def softmax_step(scores, m, l):
    """Update an online softmax, in base 2.

    Args:
        scores: fp32 `[ROWS, BLOCK]`.
        m, l: fp32 `[ROWS]`, maximum and sum of the softmax.

    Returns:
        fp32 weights `[ROWS, BLOCK]`; the factor of previous outputs `[ROWS]`; and ``m`` and ``l``.
    """
    new_m = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    return weights, alpha, new_m, l * alpha + tl.sum(weights, axis=1)


@triton.jit(do_not_specialize=["sequences"])
def windowed_decode_kernel(
    q, k_pages, v_pages, page_stride, head_stride, page_table, table_stride, planes, stored_table,
    stored_stride, lengths, sequences, part_acc, part_m, part_l, counters, out, scale, costs,
    ATTEND: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SINK_PAGES: tl.constexpr, BLOCK: tl.constexpr, EXACT_BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, SEQUENCES: tl.constexpr,
    MIN_TILES: tl.constexpr, PARTS: tl.constexpr, EXACT_COST: tl.constexpr,
    MIN_COST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attend over one interval of tiles per program, for the GROUP query heads of each KV head.

    Grid `(programs,)`.

    Args:
        q: `[sequences, KV_HEADS * GROUP, DIM]`, bf16 or fp32.
        k_pages, v_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`, exact pages, of equal strides.
        page_table: int32 `[sequences, pages]`, exact pages, row stride ``table_stride``.
        planes, K_WIDTH, V_WIDTH: see the head of this file.
        stored_table: int32 `[sequences, pages]`, stored pages, row stride ``stored_stride``.
        lengths: int32 `[sequences]`, tokens of each sequence, including the new one.
        part_acc, part_m, part_l, counters: see `balance.write_part`.
        out: shaped as ``q``, written.
        scale: log2(e) / sqrt(DIM).
        ATTEND: see the head of this file.
        ROWS, WIDTH: powers of two of at least 16, and at least GROUP and DIM respectively.
        BLOCK, EXACT_BLOCK: tokens of a stored tile and of an exact tile.
        SEQUENCES, MIN_TILES, PARTS: see `decode.decode_kernel`.
        costs, EXACT_COST, MIN_COST: see `runtime.kv.kernels.division`; without ``costs``, all tiles
            cost the same.
        SPLITS: if positive, the tiles of each KV head are divided over this number of programs,
            whatever their number. This is the usual kernel without balancing (ablation).
    """
    s = tl.arange(0, SEQUENCES)
    length = tl.load(lengths + s, mask=s < sequences, other=0)
    gap = stored_tokens(length, PAGE, WINDOW, SINK_PAGES)
    tiles = tl.cdiv(gap, BLOCK) + tl.cdiv(length - gap, EXACT_BLOCK)  # of each KV head
    ends, programs, each, extra = divide(tiles, KV_HEADS, MIN_TILES)
    program = tl.program_id(0)
    if SPLITS > 0:
        begin, end = split_interval(program, sequences, tiles, ends, SPLITS, KV_HEADS)
    elif costs is None:
        if program >= programs:
            return
        begin = interval_begin(program, each, extra)
        end = interval_begin(program + 1, each, extra)
    else:
        stored = tl.cdiv(gap, BLOCK)
        exact = tiles - stored
        cost_ends, programs, each, extra = divide_costs(
            stored, exact, costs, EXACT_COST, MIN_COST, KV_HEADS
        )
        if program >= programs:
            return
        begin = tile_at(
            interval_begin(program, each, extra), stored, exact, ends, cost_ends, costs, EXACT_COST,
            KV_HEADS,
        )  # fmt: skip
        end = tile_at(
            interval_begin(program + 1, each, extra), stored, exact, ends, cost_ends, costs,
            EXACT_COST, KV_HEADS,
        )  # fmt: skip

    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    valid = (row < GROUP)[:, None] & (d < DIM)[None, :]
    tile = begin
    while tile < end:
        sequence, kv_head, head_begin, count = locate(tile, tiles, ends, KV_HEADS)
        stop = tl.minimum(head_begin + count, end)
        own_length = tl.load(lengths + sequence)
        own_gap = stored_tokens(own_length, PAGE, WINDOW, SINK_PAGES)
        exact_begin = head_begin + tl.cdiv(own_gap, BLOCK)  # the first exact tile
        head = ((sequence * KV_HEADS + kv_head) * GROUP + row).to(tl.int64)  # [ROWS]
        queries = tl.load(q + head[:, None] * DIM + d[None, :], mask=valid, other=0.0)
        acc, m, l = no_keys(ROWS, WIDTH)
        if tile < exact_begin:
            acc, m, l = ATTEND(
                queries, kv_head, (tile - head_begin) * BLOCK,
                (tl.minimum(stop, exact_begin) - head_begin) * BLOCK, own_gap, planes,
                stored_table + sequence * stored_stride + SINK_PAGES, scale, KV_HEADS, DIM, PAGE,
                BLOCK, K_WIDTH, V_WIDTH,
            )  # fmt: skip
        acc, m, l = attend_tiles(
            queries, acc, m, l, kv_head, tl.maximum(tile - exact_begin, 0) * EXACT_BLOCK,
            (stop - exact_begin) * EXACT_BLOCK, own_length - own_gap, own_gap, k_pages, v_pages,
            page_stride, head_stride, page_table + sequence * table_stride, scale, DIM, WIDTH, PAGE,
            EXACT_BLOCK,
        )  # fmt: skip
        if stop - tile == count:
            write_whole(acc, l, sequence, kv_head, out, KV_HEADS, GROUP, ROWS, DIM, WIDTH)
        else:
            if SPLITS > 0:
                first, parts, first_slot = split_parts(sequence, kv_head, count, SPLITS, KV_HEADS)
            elif costs is None:
                first, parts, first_slot = head_parts(head_begin, count, each, extra)
            else:
                first, parts, first_slot = parts_by_cost(
                    sequence, kv_head, exact_begin - head_begin, count, cost_ends, costs, each,
                    extra, EXACT_COST, KV_HEADS,
                )  # fmt: skip
            write_part(
                acc, m, l, sequence, kv_head, (tile > begin).to(tl.int32), first, parts, first_slot,
                part_acc, part_m, part_l, counters, out, KV_HEADS, GROUP, ROWS, DIM, WIDTH, PARTS,
            )  # fmt: skip
        tile = stop
