# mypy: ignore-errors
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Causal prefill attention for Hopper GPUs, in Gluon: `kernels.prefill` with warp specialization.

One warp loads tiles of keys and values into a ring of shared memory with TMA. Two warp groups, of
64 queries each, compute. Each group starts the matmul for the scores of a tile together with the
matmul of weights and values of the previous tile, and computes the softmax of the new scores while
the second matmul runs, as FlashAttention 3 does
(https://arxiv.org/abs/2407.08608, section 3.2).

Scores, weights and sums are computed in the same order as by `kernels.prefill`. They do not depend
on the other sequences or on how a prompt is divided into chunks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from runtime.attention.kernels.prefill import block_of
from runtime.kernels.compat import load_block

ROWS, KEYS, BOX = gl.constexpr(64), gl.constexpr(128), gl.constexpr(64)
"""Queries per warp group, keys per tile, and dimensions per TMA load: 128 bytes, the width of the
swizzle pattern of shared memory."""
QUERIES = gl.constexpr(2 * ROWS.value)
"""Queries per program."""


@gluon.jit
def load_tile(
    descriptor, item, ids, page_rows, first_row, ring, ready, free,
    SLOTS: gl.constexpr, PAGES: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Wait until the ring slot of ``item`` is free, then load a head's rows of pages ``ids``."""
    slot = item % SLOTS
    mbarrier.wait(free.index(slot), item // SLOTS & 1 ^ 1)
    mbarrier.expect(ready.index(slot), PAGES * PAGE * DIM * 2)
    for i in gl.static_range(PAGES):
        row = ids[i] * page_rows + first_row
        page = ring.index(slot).slice(i * PAGE, PAGE, dim=0)
        for d in gl.static_range(0, DIM, BOX):
            box = page.slice(d, BOX, dim=1)
            load_block(descriptor, [row, d], ready.index(slot), box)


@gluon.jit
def load_tiles(
    k_descriptor, v_descriptor, table, last_page, tiles, page_rows, first_row, ring, ready, free,
    SLOTS: gl.constexpr, PAGES: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Load the keys of tile i as item 2 i of the ring, and its values as item 2 i + 1.

    Pages after ``last_page`` are not read. The last page is loaded in their place.
    """
    for tile in range(tiles):
        ids = ()
        for i in gl.static_range(PAGES):
            ids = ids + (gl.load(table + gl.minimum(tile * PAGES + i, last_page)),)
        load_tile(
            k_descriptor, 2 * tile, ids, page_rows, first_row, ring, ready, free,
            SLOTS, PAGES, PAGE, DIM,
        )  # fmt: skip
        load_tile(
            v_descriptor, 2 * tile + 1, ids, page_rows, first_row, ring, ready, free,
            SLOTS, PAGES, PAGE, DIM,
        )  # fmt: skip


@gluon.jit
def wait_for(ready, item, SLOTS: gl.constexpr):
    """Wait until an item is in the ring."""
    mbarrier.wait(ready.index(item % SLOTS), item // SLOTS & 1)


@gluon.jit
def softmax(scores, m, l, first, position, scale, CAUSAL: gl.constexpr):
    """Update the online softmax with the scores of a tile, fp32 `[ROWS, KEYS]`.

    Args:
        m, l: fp32 `[ROWS]`, maximum and sum.
        first: position of the tile's first key.
        position: position of each query `[ROWS]`.

    Returns:
        Weights, shaped as ``scores``; new maximum and sum; and the factor by which the output of
        the earlier tiles must be multiplied.
    """
    if CAUSAL:
        layout: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        keys = first + gl.arange(0, scores.shape[1], layout)
        scores = gl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
    new_m = gl.maximum(m, gl.max(scores, axis=1) * scale)
    weights = gl.exp2(scores * scale - new_m[:, None])
    alpha = gl.exp2(m - new_m)
    return weights, new_m, l * alpha + gl.sum(weights, axis=1), alpha


@gluon.jit
def add_values_weigh_keys(
    tile, queries, weights, m, l, acc, position, ring, ready, free, scale,
    CAUSAL: gl.constexpr, SLOTS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Add the values of tile ``tile - 1`` to the output, and compute the weights of ``tile``."""
    key, value = 2 * tile, 2 * tile - 1
    wait_for(ready, key, SLOTS)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    keys = ring.index(key % SLOTS).permute((1, 0))
    scores = warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)
    wait_for(ready, value, SLOTS)
    acc = warpgroup_mma(weights, ring.index(value % SLOTS), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(free.index(key % SLOTS))
    made, m, l, alpha = softmax(scores, m, l, tile * KEYS, position, scale, CAUSAL)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(value % SLOTS))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(made.to(queries.dtype), weights.type.layout), m, l, acc


@gluon.jit
def clear_rows(values, first, end, WARPS: gl.constexpr):
    """Zero the values of keys from ``end`` on. They have weight 0, but may be NaN.

    Args:
        values: a tile in shared memory.
        first: position of its first key.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    keys = first + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    values.store(gl.where((keys < end)[:, None], values.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def attend_queries(
    queries, index, tokens, length, tiles, end, out, out_row, ring, ready, free, cleared, scale,
    GROUP: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, SLOTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Attend with the queries of one warp group and store the result.

    Args:
        queries: `[ROWS, DIM]` in shared memory.
        index: index of the first query among the sequence's new tokens.
        tiles, end: number of tiles, and number of keys, to which the program attends.
        GROUP: which of the two warp groups this is.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    first = length - tokens + index
    position = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, DIM], gl.float32, OUTPUT)
    wait_for(ready, 0, SLOTS)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(queries, ring.index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(free.index(0))
    made, m, l, _ = softmax(scores, m, l, 0, position, scale, True)
    weights = gl.convert_layout(made.to(queries.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
    unmasked = gl.maximum((first + 1) // KEYS, 1)
    for tile in range(1, unmasked):
        weights, m, l, acc = add_values_weigh_keys(
            tile, queries, weights, m, l, acc, position, ring, ready, free, scale,
            False, SLOTS, SCORES,
        )  # fmt: skip
    for tile in range(unmasked, tiles):
        weights, m, l, acc = add_values_weigh_keys(
            tile, queries, weights, m, l, acc, position, ring, ready, free, scale,
            True, SLOTS, SCORES,
        )  # fmt: skip
    value = 2 * tiles - 1
    wait_for(ready, value, SLOTS)
    values = ring.index(value % SLOTS)
    if end % KEYS:
        if GROUP == 0:
            clear_rows(values, (tiles - 1) * KEYS, end, WARPS)
            mbarrier.arrive(cleared)
        mbarrier.wait(cleared, 0)
    acc = warpgroup_mma(weights, values, acc)
    acc = acc / gl.convert_layout(l, gl.SliceLayout(1, OUTPUT))[:, None]
    row = index + gl.arange(0, ROWS, gl.SliceLayout(1, OUTPUT))
    d = gl.arange(0, DIM, gl.SliceLayout(0, OUTPUT))
    at = (out_row + row).to(gl.int64) * HEADS * DIM
    made = acc.to(out.dtype.element_ty)
    gl.store(out + at[:, None] + d[None, :], made, mask=(row < tokens)[:, None])


@gluon.jit
def load_queries(q, index, tokens, queries, HEADS: gl.constexpr, DIM: gl.constexpr):
    """Copy `[2, ROWS, DIM]` queries to shared memory, zeros after the sequence's last token."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    for group in gl.static_range(2):
        row = index + group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        at = row.to(gl.int64)[:, None] * (HEADS * DIM) + d[None, :]
        queries.index(group).store(gl.load(q + at, mask=(row < tokens)[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def make_barriers(SLOTS: gl.constexpr):
    """Return the barriers of slots that are filled, of slots that are free, and of `clear_rows`."""
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    mbarrier.init(cleared, count=1)
    return ready, free, cleared


@gluon.jit
def prefill_kernel(
    q, k_descriptor, v_descriptor, page_rows, head_rows, page_table, table_stride,
    starts, lengths, sequences, out, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    SLOTS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend with QUERIES queries of one head of one sequence per program.

    Grid `(HEADS, tokens // QUERIES + sequences)`. Programs start with the last block,
    since later queries of a sequence attend to more keys.

    Args:
        q: bf16 `[tokens, HEADS, DIM]`.
        k_descriptor, v_descriptor: descriptors of the pages as rows of DIM elements, with boxes of
            `[PAGE, BOX]`. The rows of head h in page p start at ``p page_rows + h head_rows``.

    The other arguments are those of `kernels.prefill.prefill_kernel`.
    """
    head, block = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    sequence, start, tokens, index, length = block_of(starts, lengths, sequences, block, QUERIES)
    if index < tokens:
        element: gl.constexpr = q.dtype.element_ty
        SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        queries = gl.allocate_shared_memory(element, [2, ROWS, DIM], SHARED)
        ring = gl.allocate_shared_memory(element, [SLOTS, KEYS, DIM], SHARED)
        ready, free, cleared = make_barriers(SLOTS)
        first_query = q + (start.to(gl.int64) * HEADS + head) * DIM
        load_queries(first_query, index, tokens, queries, HEADS, DIM)
        end = gl.minimum(length, length - tokens + index + QUERIES)
        tiles = (end + KEYS - 1) // KEYS
        rows = head // (HEADS // KV_HEADS) * head_rows
        result = out + head * DIM
        gl.warp_specialize(
            [
                (attend_queries, (
                    queries.index(0), index, tokens, length, tiles, end, result, start,
                    ring, ready, free, cleared, scale, 0, HEADS, DIM, SLOTS, num_warps,
                )),
                (attend_queries, (
                    queries.index(1), index + ROWS, tokens, length, tiles, end, result, start,
                    ring, ready, free, cleared, scale, 1, HEADS, DIM, SLOTS, num_warps,
                )),
                (load_tiles, (
                    k_descriptor, v_descriptor, page_table + sequence * table_stride,
                    (end - 1) // PAGE, tiles, page_rows, rows, ring, ready, free,
                    SLOTS, KEYS // PAGE, PAGE, DIM,
                )),
            ],
            [num_warps, 1],
            [240, 24],
        )  # fmt: skip
