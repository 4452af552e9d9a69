# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Attention of one new token per sequence over full-precision and compressed pages.

There are two launches. `windowed_decode_kernel` computes splits of the result: one program for the
full-precision tokens of each KV head of each sequence, and further programs for the compressed
tokens of all of them.

Full-precision tokens are those of the first pages (sinks) and of the window; they are numbered
without the gap between the two. Compressed tokens are divided into tiles of BLOCK tokens of one KV
head. Programs have equal numbers of tiles, see `runtime.attention.kernels.balance`, or tiles of
equal cost, see `runtime.kv.kernels.division`. `merge_windowed_kernel` merges the splits of each
query head.

A format contributes two functions. The first one attends over compressed tiles of one KV head::

    ATTEND(
        queries, kv_head, begin, end, count, planes, table, scale,
        KV_HEADS, DIM, PAGE, BLOCK, K_WIDTH, V_WIDTH, STRIDES,
    )

- queries: `[STORED_ROWS, WIDTH]`, bf16 or fp32.
- begin, end: compressed tokens, multiples of BLOCK.
- count: number of compressed tokens of the sequence.
- planes: pointers to the compressed planes of the layer, `[page, KV_HEADS, PAGE, width]` with
  contiguous pages, and then other inputs of the format.
- table: pointer to the page id of the first compressed page of the sequence.
- K_WIDTH, V_WIDTH: widths of the first two planes.
- STRIDES: for each compressed plane, elements from a page to the next one.

It returns ``acc``, ``m`` and ``l`` of an online softmax, as `decode.attend_tiles` does. ``acc`` is
a sum of V as stored, `[STORED_ROWS, SUMS]`, where SUMS is a power of two and at most WIDTH.
Instead of undoing transforms of K on each key, ATTEND applies them to the queries. Transforms of V
are undone after merging, once per query head, by the second function::

    FINISH(acc, kv_head, planes, KV_HEADS, DIM, WIDTH, K_WIDTH, V_WIDTH)

It returns fp32 outputs `[1, WIDTH]` from a sum ``acc``, fp32 `[1, SUMS]`.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.balance import divide, head_of_tile, head_splits, interval_begin
from runtime.attention.kernels.decode import attend_tiles, no_keys
from runtime.kv.kernels.division import (
    divide_costs,
    fixed_splits,
    split_interval,
    splits_by_cost,
    tile_at,
)


@triton.jit
def stored_tokens(
    length, PAGE: tl.constexpr, WINDOW: tl.constexpr, SINK_PAGES: tl.constexpr
):  # fmt: skip
    """Return the number of compressed tokens; see `runtime.pages.window.first_recent`."""
    return tl.maximum((length - WINDOW) // PAGE - SINK_PAGES, 0) * PAGE


@triton.jit
def rows_at(
    first, kv_head, count, table, PAGE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return every STEP-th compressed token from ``first`` on, and where it is stored.

    A page of a plane has ``KV_HEADS * PAGE`` rows of ``width`` elements.

    Returns:
        Tokens, int32; their compressed pages, int64; and their rows in these pages, int32. All are
        `[BLOCK / STEP]`. Tokens from ``count`` on have page 0.
    """
    t = first + tl.arange(0, BLOCK // STEP) * STEP
    page = tl.load(table + t // PAGE, mask=t < count, other=0).to(tl.int64)
    return t, page, kv_head * PAGE + t % PAGE


@triton.jit
def softmax_step(scores, m, l):
    """Update an online softmax, in base 2.

    Args:
        scores: fp32 `[ROWS, BLOCK]`.
        m, l: fp32 `[ROWS]`, maximum and sum of the softmax.

    Returns:
        fp32 weights `[ROWS, BLOCK]`; the factor by which to multiply previous outputs, `[ROWS]`;
        and the new ``m`` and ``l``.
    """
    new_m = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    return weights, alpha, new_m, l * alpha + tl.sum(weights, axis=1)


@triton.jit
def transposed_softmax_step(scores, m, sums):
    """Update an online softmax, in base 2, whose tokens are rows.

    Args:
        scores: fp32 `[BLOCK, ROWS]`.
        m: fp32 `[ROWS]`, maximum.
        sums: fp32 `[BLOCK, ROWS]`; the sum over its rows is the sum of the softmax.

    Returns:
        fp32 weights `[BLOCK, ROWS]`; the factor by which to multiply previous outputs, `[1, ROWS]`;
        and the new ``m`` and ``sums``.
    """
    new_m = tl.maximum(m, tl.max(scores, axis=0))
    weights = tl.exp2(scores - new_m[None, :])
    alpha = tl.exp2(m - new_m)[None, :]
    return weights, alpha, new_m, sums * alpha + weights


@triton.jit
def divide_stored(
    lengths, sequences, costs,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SINK_PAGES: tl.constexpr,
    BLOCK: tl.constexpr, SEQUENCES: tl.constexpr, MIN_TILES: tl.constexpr, MIN_COST: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Divide the compressed tiles of a batch over at most PROGRAMS programs.

    Returns:
        Number of compressed tiles of a KV head of each sequence, the tile after each sequence, and
        the cost up to the end of each sequence, all `[SEQUENCES]`; the number of programs with an
        interval; and ``each`` and ``extra``, see `balance.interval_begin`.
    """
    s = tl.arange(0, SEQUENCES)
    length = tl.load(lengths + s, mask=s < sequences, other=0)
    tiles = tl.cdiv(stored_tokens(length, PAGE, WINDOW, SINK_PAGES), BLOCK)
    ends, programs, each, extra = divide(tiles, PROGRAMS, KV_HEADS, MIN_TILES)
    cost_ends = ends
    if costs is not None:
        cost_ends, programs, each, extra = divide_costs(tiles, costs, PROGRAMS, MIN_COST, KV_HEADS)
    return tiles, ends, cost_ends, programs, each, extra


@triton.jit(do_not_specialize=["sequences"])
def windowed_decode_kernel(
    q, k_pages, v_pages, page_stride, head_stride, page_table, table_stride, planes, stored_table,
    stored_stride, lengths, sequences, split_acc, split_m, split_l, scale, costs,
    ATTEND: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    STORED_ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SINK_PAGES: tl.constexpr, BLOCK: tl.constexpr, EXACT_BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr, SEQUENCES: tl.constexpr,
    MIN_TILES: tl.constexpr, MIN_COST: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attend over an interval of compressed tiles, or the full-precision tokens of one KV head.

    Grid `(sequences * KV_HEADS + PROGRAMS,)`; the first programs have full-precision tokens.

    Args:
        q: `[sequences, KV_HEADS * GROUP, DIM]`, bf16 or fp32.
        k_pages, v_pages: full-precision pages, bf16 `[page, KV_HEADS, PAGE, DIM]`, of equal
            strides.
        page_table: int32 `[sequences, pages]`, full-precision pages, row stride ``table_stride``.
        planes, K_WIDTH, V_WIDTH, STRIDES: see the head of this file.
        stored_table: int32 `[sequences, pages]`, compressed pages, row stride ``stored_stride``.
        lengths: int32 `[sequences]`, tokens of each sequence, including the new one.
        split_acc: fp32 `[2 (PROGRAMS + sequences * KV_HEADS), GROUP, WIDTH]`, unnormalized results,
            written. There are two splits for each program with compressed tiles: the tiles with
            which its interval begins, and those with which it ends. Then there are two splits for
            each KV head: its compressed tokens, if they are in one interval, and its full-precision
            tokens.
        split_m, split_l: fp32 `[2 (PROGRAMS + sequences * KV_HEADS), GROUP]`, maximum and sum of
            the online softmax of each split, written.
        scale: log2(e) / sqrt(DIM).
        ATTEND: see the head of this file.
        ROWS, WIDTH: powers of two of at least 16, and at least GROUP and DIM respectively.
        STORED_ROWS: power of two, at least GROUP; 8 or more in formats whose tokens are rows of
            matmuls, otherwise 16 or more.
        BLOCK: tokens of a compressed tile.
        EXACT_BLOCK: full-precision tokens per iteration.
        SEQUENCES: power of two, at least ``sequences``.
        MIN_TILES: minimum number of tiles of an interval.
        costs, MIN_COST: see `runtime.kv.kernels.division`; without ``costs``, all tiles cost the
            same.
        PROGRAMS: number of programs for compressed tiles.
        SPLITS: if positive, the tiles of each KV head are divided over this number of programs,
            whatever their number. This is the usual kernel without balancing (ablation).
    """
    program = tl.program_id(0) - sequences * KV_HEADS
    d = tl.arange(0, WIDTH)
    if program < 0:
        row = tl.arange(0, ROWS)
        valid = (row < GROUP)[:, None] & (d < DIM)[None, :]
        index = tl.program_id(0)
        sequence = index // KV_HEADS
        length = tl.load(lengths + sequence)
        gap = stored_tokens(length, PAGE, WINDOW, SINK_PAGES)
        head = (index * GROUP + row).to(tl.int64)  # [ROWS]
        queries = tl.load(q + head[:, None] * DIM + d[None, :], mask=valid, other=0.0)
        acc, m, l = no_keys(ROWS, WIDTH)
        acc, m, l = attend_tiles(
            queries, acc, m, l, index % KV_HEADS, 0, length - gap, length - gap, gap, k_pages,
            v_pages, page_stride, head_stride, page_table + sequence * table_stride, scale, DIM,
            WIDTH, PAGE, EXACT_BLOCK,
        )  # fmt: skip
        store_split(
            acc, m, l, 2 * (PROGRAMS + index) + 1, split_acc, split_m, split_l, GROUP, WIDTH
        )
    else:
        tiles, ends, _, programs, each, extra = divide_stored(
            lengths, sequences, costs, KV_HEADS, PAGE, WINDOW, SINK_PAGES, BLOCK, SEQUENCES,
            MIN_TILES, MIN_COST, PROGRAMS,
        )  # fmt: skip
        if SPLITS > 0:
            begin, end = split_interval(program, sequences, tiles, ends, SPLITS, KV_HEADS)
        else:
            if program >= programs:
                return
            begin = interval_begin(program, each, extra)
            end = interval_begin(program + 1, each, extra)
            if costs is not None:
                begin = tile_at(begin, tiles, costs, KV_HEADS)
                end = tile_at(end, tiles, costs, KV_HEADS)
        s = tl.arange(0, SEQUENCES)
        stored_row = tl.arange(0, STORED_ROWS)
        of_group = (stored_row < GROUP)[:, None] & (d < DIM)[None, :]
        tile = begin
        while tile < end:
            sequence, kv_head, head_begin, count = head_of_tile(s, tile, tiles, ends, KV_HEADS)
            stop = tl.minimum(head_begin + count, end)
            length = tl.load(lengths + sequence)
            query_head = ((sequence * KV_HEADS + kv_head) * GROUP + stored_row).to(tl.int64)
            own = tl.load(q + query_head[:, None] * DIM + d[None, :], mask=of_group, other=0.0)
            acc, m, l = ATTEND(
                own, kv_head, (tile - head_begin) * BLOCK, (stop - head_begin) * BLOCK,
                stored_tokens(length, PAGE, WINDOW, SINK_PAGES), planes,
                stored_table + sequence * stored_stride + SINK_PAGES, scale, KV_HEADS, DIM, PAGE,
                BLOCK, K_WIDTH, V_WIDTH, STRIDES,
            )  # fmt: skip
            split = program * 2 + (tile > begin).to(tl.int32)
            if stop - tile == count:
                split = 2 * (PROGRAMS + sequence * KV_HEADS + kv_head)
            store_split(acc, m, l, split, split_acc, split_m, split_l, GROUP, WIDTH)
            tile = stop


@triton.jit
def store_split(
    acc, m, l, split, split_acc, split_m, split_l, GROUP: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write the result of one split; see `windowed_decode_kernel`.

    Args:
        acc: fp32 `[ROWS, SUMS]`, unnormalized results; the first GROUP rows are query heads.
        m, l: fp32 `[ROWS]`, maximum and sum of the online softmax.
        split: index of the split in ``split_acc``, ``split_m`` and ``split_l``.
    """
    row = tl.arange(0, acc.shape[0])
    c = tl.arange(0, acc.shape[1])
    at = split.to(tl.int64) * GROUP + row
    used = row < GROUP
    tl.store(split_acc + at[:, None] * WIDTH + c[None, :], acc, mask=used[:, None])
    tl.store(split_m + at, m, mask=used)
    tl.store(split_l + at, l, mask=used)


@triton.jit(do_not_specialize=["sequences"])
def merge_windowed_kernel(
    planes, lengths, sequences, split_acc, split_m, split_l, out, costs,
    FINISH: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, SUMS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SINK_PAGES: tl.constexpr, BLOCK: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    SEQUENCES: tl.constexpr, MIN_TILES: tl.constexpr, MIN_COST: tl.constexpr,
    PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query head.

    Grid `(sequences * KV_HEADS * GROUP,)`.

    Args:
        out: `[sequences, KV_HEADS * GROUP, DIM]`, written.
        FINISH, SUMS: see the head of this file.
        MERGED: splits per iteration.

    The other arguments are those of `windowed_decode_kernel`.
    """
    index = tl.program_id(0)
    g = index % GROUP
    sequence = index // (GROUP * KV_HEADS)
    kv_head = index // GROUP % KV_HEADS
    tiles, ends, cost_ends, _, each, extra = divide_stored(
        lengths, sequences, costs, KV_HEADS, PAGE, WINDOW, SINK_PAGES, BLOCK, SEQUENCES, MIN_TILES,
        MIN_COST, PROGRAMS,
    )  # fmt: skip
    s = tl.arange(0, SEQUENCES)
    count = tl.sum(tl.where(s == sequence, tiles, 0), axis=0)
    i = tl.arange(0, MERGED)
    c = tl.arange(0, SUMS)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros((SUMS,), tl.float32)
    if count > 0:
        if SPLITS > 0:
            first, splits, slot = fixed_splits(sequence, kv_head, count, SPLITS, KV_HEADS)
        elif costs is None:
            head_begin = tl.max(tl.where(s < sequence, ends, 0), axis=0) + kv_head * count
            first, splits, slot = head_splits(head_begin, count, each, extra)
        else:
            first, splits, slot = splits_by_cost(
                sequence, kv_head, count, cost_ends, costs, each, extra, KV_HEADS
            )
        for begin in range(0, splits, MERGED):
            program = first + begin + i
            split = program * 2 + tl.where(program == first, slot, 0)
            if splits == 1:
                split = 2 * (PROGRAMS + sequence * KV_HEADS + kv_head) + tl.zeros_like(i)
            at = split.to(tl.int64) * GROUP + g
            used = begin + i < splits
            all_m = tl.load(split_m + at, mask=used, other=float("-inf"))
            all_l = tl.load(split_l + at, mask=used, other=0.0)
            all_acc = tl.load(
                split_acc + at[:, None] * WIDTH + c[None, :], mask=used[:, None], other=0.0
            )  # [MERGED, SUMS]
            new_m = tl.maximum(m, tl.max(all_m, axis=0))
            share = tl.exp2(all_m - new_m)
            alpha = tl.exp2(m - new_m)
            l = l * alpha + tl.sum(share * all_l, axis=0)
            acc = acc * alpha + tl.sum(share[:, None] * all_acc, axis=0)
            m = new_m
    found = FINISH(acc[None, :], kv_head, planes, KV_HEADS, DIM, WIDTH, K_WIDTH, V_WIDTH)
    d = tl.arange(0, WIDTH)[None, :]
    exact = (2 * (PROGRAMS + sequence * KV_HEADS + kv_head) + 1).to(tl.int64) * GROUP + g
    exact_m = tl.load(split_m + exact)
    new_m = tl.maximum(m, exact_m)
    of_stored = tl.exp2(m - new_m)
    of_exact = tl.exp2(exact_m - new_m)
    l = l * of_stored + tl.load(split_l + exact) * of_exact
    found = found * of_stored + tl.load(split_acc + exact * WIDTH + d) * of_exact
    at = out + index.to(tl.int64) * DIM + d
    tl.store(at, (found / l).to(out.dtype.element_ty), mask=d < DIM)
