# mypy: ignore-errors
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Bidirectional attention over ragged batches for Hopper GPUs, in Gluon.

The structure is that of `runtime.attention.kernels.prefill_hopper`: one warp loads tiles of keys
and values with TMA, and two warp groups of 64 queries each start the matmul for the scores of a
tile together with that of weights and values of the previous tile. Tiles are small enough that two
programs share a multiprocessor, because texts have few tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from runtime.attention.kernels.prefill import sequence_of
from runtime.kernels.compat import load_block

ROWS = gl.constexpr(64)
"""Queries per warp group."""
QUERIES = gl.constexpr(2 * ROWS.value)
"""Queries per program."""
DIM = gl.constexpr(64)
"""Dimensions of a head: 128 bytes, the width of the swizzle pattern of shared memory."""


@gluon.jit
def load_tiles(
    q, k, v, row, column, index, tiles, queries, queries_ready, ring, ready, free,
    KEYS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Load the queries, then keys of tile t as item 2 t of the ring, its values as item 2 t + 1.

    Rows after the input's last token are those of the next input, or zeros.

    Args:
        row: index of the input's first token.
        column: first column of the head.
        index: index of the first query in the input.
    """
    mbarrier.expect(queries_ready, QUERIES * DIM * 2)
    for group in gl.static_range(2):
        load_block(q, [row + index + group * ROWS, column], queries_ready, queries.index(group))
    for tile in range(tiles):
        for part in gl.static_range(2):
            item = 2 * tile + part
            slot = item % SLOTS
            mbarrier.wait(free.index(slot), item // SLOTS & 1 ^ 1)
            mbarrier.expect(ready.index(slot), KEYS * DIM * 2)
            if part == 0:
                load_block(k, [row + tile * KEYS, column], ready.index(slot), ring.index(slot))
            else:
                load_block(v, [row + tile * KEYS, column], ready.index(slot), ring.index(slot))


@gluon.jit
def softmax(scores, m, l, left, scale):
    """Update the online softmax with the scores of a tile, of which ``left`` keys are valid.

    Returns:
        Weights, shaped as ``scores``; new maximum and sum; and the factor by which the output of
        the earlier tiles must be multiplied.
    """
    if left < scores.shape[1]:
        keys = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores = gl.where((keys < left)[None, :], scores, float("-inf"))
    new_m = gl.maximum(m, gl.max(scores, axis=1) * scale)
    weights = gl.exp2(scores * scale - new_m[:, None])
    alpha = gl.exp2(m - new_m)
    return weights, new_m, l * alpha + gl.sum(weights, axis=1), alpha


@gluon.jit
def attend_queries(
    queries, queries_ready, q_bias, v_bias, index, tokens, tiles, out, out_stride, ring, ready,
    free, scale,
    KEYS: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Attend with the queries of one warp group and store the result.

    Args:
        queries: `[ROWS, DIM]` in shared memory.
        q_bias, v_bias: of the head, `[DIM]`, or None.
        index: index of the first query in the input.
        out: pointer to the head's elements of the input's first token.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    element: gl.constexpr = out.dtype.element_ty
    mbarrier.wait(queries_ready, 0)
    if q_bias is not None:
        added = gl.load(q_bias + gl.arange(0, DIM, gl.SliceLayout(0, QUERY))).to(gl.float32)
        queries.store((queries.load(QUERY).to(gl.float32) + added[None, :]).to(element))
        fence_async_shared()
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, DIM], gl.float32, OUTPUT)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    mbarrier.wait(ready.index(0), 0)
    scores = warpgroup_mma(queries, ring.index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(free.index(0))
    made, m, l, _ = softmax(scores, m, l, tokens, scale)
    weights = gl.convert_layout(made.to(element), WEIGHT)
    for tile in range(1, tiles):
        key, value = 2 * tile, 2 * tile - 1
        mbarrier.wait(ready.index(key % SLOTS), key // SLOTS & 1)
        keys = ring.index(key % SLOTS).permute((1, 0))
        scores = warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(value % SLOTS), value // SLOTS & 1)
        started = warpgroup_mma(weights, ring.index(value % SLOTS), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(free.index(key % SLOTS))
        made, m, l, alpha = softmax(scores, m, l, tokens - tile * KEYS, scale)
        acc = warpgroup_mma_wait(0, deps=[started])
        mbarrier.arrive(free.index(value % SLOTS))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUT))[:, None]
        weights = gl.convert_layout(made.to(element), WEIGHT)
    last = 2 * tiles - 1
    mbarrier.wait(ready.index(last % SLOTS), last // SLOTS & 1)
    acc = warpgroup_mma(weights, ring.index(last % SLOTS), acc)
    acc = acc / gl.convert_layout(l, gl.SliceLayout(1, OUTPUT))[:, None]
    d = gl.arange(0, DIM, gl.SliceLayout(0, OUTPUT))
    if v_bias is not None:  # the weights of a query have the sum 1
        acc += gl.load(v_bias + d).to(gl.float32)[None, :]
    row = index + gl.arange(0, ROWS, gl.SliceLayout(1, OUTPUT))
    at = row.to(gl.int64)[:, None] * out_stride + d[None, :]
    gl.store(out + at, acc.to(element), mask=(row < tokens)[:, None])


@gluon.jit(do_not_specialize=["inputs"], do_not_specialize_on_alignment=["starts"])
def ragged_attention_kernel(
    q, k, v, q_bias, v_bias, starts, inputs, out, out_stride, scale,
    KEYS: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend with QUERIES queries of one head of one input per program.

    Grid `(n // QUERIES + 1 + inputs, heads)`.

    Args:
        q, k, v: TMA descriptors of bf16 `[n, heads * DIM]`, with boxes of `[ROWS, DIM]` for ``q``
            and `[KEYS, DIM]` for the others. All values are finite.
        KEYS: keys per tile.
        SLOTS: slots of the ring, a tile of keys or of values each.
        REGISTERS: registers of a thread of the second warp group.

    The other arguments are those of `kernels.layers.ragged_attention_kernel`.
    """
    origin, head = gl.load(starts), gl.program_id(1)
    block = origin // QUERIES + gl.program_id(0)
    each = sequence_of(starts, inputs, block, QUERIES)
    start = gl.load(starts + each)
    tokens = gl.load(starts + each + 1) - start
    index = (block - (start // QUERIES + each)) * QUERIES
    start -= origin
    if index < tokens:
        SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        element: gl.constexpr = out.dtype.element_ty
        queries = gl.allocate_shared_memory(element, [2, ROWS, DIM], SHARED)
        ring = gl.allocate_shared_memory(element, [SLOTS, KEYS, DIM], SHARED)
        queries_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        mbarrier.init(queries_ready, count=1)
        for slot in gl.static_range(SLOTS):
            mbarrier.init(ready.index(slot), count=1)
            mbarrier.init(free.index(slot), count=2)
        tiles = (tokens + KEYS - 1) // KEYS
        result = out + start.to(gl.int64) * out_stride + head * DIM
        if q_bias is not None:
            q_bias += head * DIM
        if v_bias is not None:
            v_bias += head * DIM
        gl.warp_specialize(
            [
                (attend_queries, (
                    queries.index(0), queries_ready, q_bias, v_bias, index, tokens, tiles, result,
                    out_stride, ring, ready, free, scale, KEYS, SLOTS, num_warps,
                )),
                (attend_queries, (
                    queries.index(1), queries_ready, q_bias, v_bias, index + ROWS, tokens, tiles,
                    result, out_stride, ring, ready, free, scale, KEYS, SLOTS, num_warps,
                )),
                (load_tiles, (
                    q, k, v, start, head * DIM, index, tiles, queries, queries_ready, ring, ready,
                    free, KEYS, SLOTS,
                )),
            ],
            [num_warps, 1],
            [REGISTERS, 24],
        )  # fmt: skip
