# mypy: ignore-errors
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Attention of one new token per sequence, with its KV split among programs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from runtime.kernels.compat import barrier, reinterpret
from runtime.megakernel.kernels.layouts import (
    LHS,
    MAX_DIM,
    MMA,
    QUERY,
    RHS,
    ROWS,
    SPLIT_RESULTS,
    TOKENS,
    UNSWIZZLED,
    WARP_RESULTS,
    WARPS,
    index_along,
)
from runtime.megakernel.kernels.messages import (
    opaque_zero,
    receive_bf16,
    receive_fp32,
    send_bf16,
    send_fp32,
)
from runtime.megakernel.kernels.opcodes import past_tiles
from runtime.megakernel.kernels.ring import as_wide_tile, release, wait_full


@gluon.jit
def attend_past(
    ring, tile, item, queries, lengths, scale, SHAPE: gl.constexpr, SLOTS: gl.constexpr
):
    """Attend over one split of a sequence's past, for the query heads of one KV head.

    Each warp processes 16 tokens of every tile with its own online softmax. At the end, the results
    of all warps are rescaled to a common maximum.

    Args:
        tile: index of the next tile in the ring.
        item: `(sequence * KV_HEADS + kv_head) * SPLITS + split`.
        queries: bf16 `[WARPS, ROWS, MAX_DIM]`, up to ROWS heads, the same in every warp.

    Returns:
        Index of the next tile; acc fp32 `[WARPS, ROWS, MAX_DIM]`, unnormalized outputs per warp; m
        fp32 `[ROWS]`, maximum over warps; and l fp32 `[ROWS]`, sum of weights over warps.
    """
    past, _, first, last = past_tiles(item, lengths, SHAPE.KV_HEADS, SHAPE.SPLITS)
    t = index_along(WARPS, 0, MMA) * ROWS + index_along(ROWS, 2, MMA) + opaque_zero()
    warp_m = gl.full([WARPS, ROWS], float("-inf"), gl.float32, gl.SliceLayout(2, MMA))
    warp_l = gl.zeros([WARPS, ROWS], gl.float32, gl.SliceLayout(2, MMA))
    acc = gl.zeros([WARPS, ROWS, MAX_DIM], gl.float32, MMA)
    for number in range(first, last):
        keys = as_wide_tile(wait_full(ring, tile, SLOTS)).permute([0, 2, 1]).load(RHS)
        release(ring, tile, SLOTS)
        scores = mma_v2(queries, keys, gl.zeros([WARPS, ROWS, ROWS], gl.float32, MMA))
        scores = gl.where(number * TOKENS + t < past, scores * scale, float("-inf"))
        new_m = gl.maximum(warp_m, gl.max(scores, axis=2))
        finite_m = gl.where(new_m == float("-inf"), 0.0, new_m)
        weights = gl.exp2(scores - gl.expand_dims(finite_m, 2))
        alpha = gl.exp2(warp_m - finite_m)
        warp_l = warp_l * alpha + gl.sum(weights, axis=2)
        warp_m = new_m
        values = as_wide_tile(wait_full(ring, tile + 1, SLOTS)).load(RHS)
        release(ring, tile + 1, SLOTS)
        tile += 2
        weights = gl.convert_layout(weights.to(gl.bfloat16), LHS)
        acc = mma_v2(weights, values, acc * gl.expand_dims(alpha, 2))
    m = gl.max(warp_m, axis=0)
    finite_m = gl.where(m == float("-inf"), 0.0, m)
    share = gl.exp2(warp_m - gl.expand_dims(finite_m, 0))
    return tile, acc * gl.expand_dims(share, 2), m, gl.sum(warp_l * share, axis=0)


@gluon.jit
def merge(
    kept, acc, m, l, row: gl.constexpr, item, splits, heads, new, flag_before, flag, messages,
    scale, output, SHAPE: gl.constexpr,
):  # fmt: skip
    """Combine the results of eight heads over warps, splits and the new token.

    The programs of the other splits send their results to the program of split 0, which combines
    all results and sends the output.

    Args:
        kept: buffer in shared memory that attention passes can use for temporary results.
        acc: fp32 `[WARPS, 8, MAX_DIM]`.
        m, l: fp32 `[8]`, maximum and sum of weights.
        row: index of the first of the eight heads among the KV head's query heads.
        splits: number of splits in use.
        heads: pointer to the messages of the queries.
        new: pointer to the messages of the new key; those of the new values follow the keys.
        flag_before, flag: flag of the stage that wrote q, k and v, and flag of this stage.
        output: pointer to the messages of the output.
    """
    RESULT: gl.constexpr = gl.SliceLayout(0, WARP_RESULTS)  # [head, dim]
    PER_HEAD: gl.constexpr = gl.SliceLayout(1, RESULT)  # [head]
    SPLITS: gl.constexpr = SHAPE.SPLITS
    KV_HEADS: gl.constexpr = SHAPE.KV_HEADS
    GROUP: gl.constexpr = SHAPE.GROUP
    DIM: gl.constexpr = SHAPE.DIM
    shared = reinterpret(kept, gl.float32, [WARPS, 8, MAX_DIM], UNSWIZZLED)
    barrier()
    shared.store(acc)
    barrier()
    acc = gl.sum(shared.load(WARP_RESULTS), axis=0)  # [8, MAX_DIM]
    m = gl.convert_layout(m, PER_HEAD)
    l = gl.convert_layout(l, PER_HEAD)
    g = row + gl.arange(0, 8, PER_HEAD) + opaque_zero()
    d = gl.expand_dims(gl.arange(0, MAX_DIM, gl.SliceLayout(0, RESULT)), 0)
    valid = (gl.expand_dims(g, 1) < GROUP) & (d < DIM)
    address = messages.splits + (item // SPLITS * GROUP + g) * (SPLITS * (MAX_DIM + 2))
    split = item % SPLITS + opaque_zero()  # triton 3.6 cannot compile a branch that is never taken
    if split > 0:
        address += split * (MAX_DIM + 2)
        send_fp32(address + MAX_DIM, m, flag, g < GROUP)
        send_fp32(address + MAX_DIM + 1, l, flag, g < GROUP)
        send_fp32(gl.expand_dims(address, 1) + d, acc, flag, valid)
    else:
        query = receive_bf16(heads + gl.expand_dims(g, 1) * DIM + d, flag_before, valid, 4, 4)
        key = receive_bf16(new + d, flag_before, d < DIM, 4, 4).to(gl.float32)
        value = receive_bf16(new + KV_HEADS * DIM + d, flag_before, d < DIM, 4, 4).to(gl.float32)
        own = gl.sum(query.to(gl.float32) * key, axis=1) * scale  # score of the new token
        new_m = gl.maximum(m, own)
        alpha = gl.exp2(m - new_m)
        own = gl.exp2(own - new_m)
        l = l * alpha + own
        acc = acc * gl.expand_dims(alpha, 1) + gl.expand_dims(own, 1) * value
        m = new_m
        for first in range(1, splits, 4):
            s = index_along(4, 0, SPLIT_RESULTS) + first
            g3 = row + index_along(8, 1, SPLIT_RESULTS) + opaque_zero()
            d3 = index_along(MAX_DIM, 2, SPLIT_RESULTS)
            other = (item // SPLITS * GROUP + g3) * SPLITS + s
            other = messages.splits + other * (MAX_DIM + 2)
            real = (g3 < GROUP) & (s < splits)
            other_m = receive_fp32(other + MAX_DIM, flag, real, 4)
            other_m = gl.where(real, other_m, float("-inf"))
            other_l = receive_fp32(other + MAX_DIM + 1, flag, real, 4)
            other_acc = receive_fp32(other + d3, flag, real & (d3 < DIM), 16)
            new_m = gl.maximum(
                gl.convert_layout(m, gl.SliceLayout(0, gl.SliceLayout(2, SPLIT_RESULTS))),
                gl.max(gl.max(other_m, axis=2), axis=0),
            )
            share = gl.exp2(other_m - gl.expand_dims(gl.expand_dims(new_m, 0), 2))
            added = gl.sum(gl.max(share * other_l, axis=2), axis=0)
            other_acc = gl.sum(other_acc * share, axis=0)
            new_m = gl.convert_layout(new_m, PER_HEAD)
            alpha = gl.exp2(m - new_m)
            l = l * alpha + gl.convert_layout(added, PER_HEAD)
            acc = acc * gl.expand_dims(alpha, 1) + gl.convert_layout(other_acc, RESULT)
            m = new_m
        barrier()  # all warps must have read the messages before a later stage overwrites them
        at = output + (item // SPLITS % KV_HEADS * GROUP + gl.expand_dims(g, 1)) * DIM + d
        send_bf16(at, acc / gl.expand_dims(l, 1), flag, valid)


@gluon.jit
def attend_item(
    ring, tile, kept, item, splits, lengths, messages, attention, flag_before, flag,
    SHAPE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Compute one split of attention for the query heads of one KV head.

    Args:
        tile: index of the next tile in the ring.
        item: `(sequence * KV_HEADS + kv_head) * SPLITS + split`.
        splits: number of splits in use.
        flag_before, flag: flag of the stage that wrote q, k and v, and flag of this stage.

    Returns:
        Index of the next tile.
    """
    SPLITS: gl.constexpr = SHAPE.SPLITS
    KV_HEADS: gl.constexpr = SHAPE.KV_HEADS
    GROUP: gl.constexpr = SHAPE.GROUP
    DIM: gl.constexpr = SHAPE.DIM
    own = messages.activations + item // (KV_HEADS * SPLITS) * messages.stride
    own_head = item // SPLITS % KV_HEADS
    heads = own + attention.query_offset + own_head * GROUP * DIM
    g = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, QUERY)), 1) + opaque_zero()
    d = gl.expand_dims(gl.arange(0, MAX_DIM, gl.SliceLayout(0, QUERY)), 0)
    new = own + attention.query_offset + (SHAPE.HEADS + own_head) * DIM
    queries = receive_bf16(heads + g * DIM + d, flag_before, (g < GROUP) & (d < DIM), 8, 4)
    queries = gl.convert_layout(queries, gl.SliceLayout(0, LHS))
    queries = gl.expand_dims(queries, 0)
    every = gl.zeros([WARPS, ROWS, MAX_DIM], gl.bfloat16, LHS) + queries
    tile, acc, m, l = attend_past(ring, tile, item, every, lengths, attention.scale, SHAPE, SLOTS)
    acc = acc.reshape([WARPS, 2, 8, MAX_DIM]).permute([0, 2, 3, 1])
    upper, lower = gl.split(acc)
    upper_m, lower_m = gl.split(m.reshape([2, 8]).permute([1, 0]))
    upper_l, lower_l = gl.split(l.reshape([2, 8]).permute([1, 0]))
    output = own + attention.output_offset
    merge(
        kept, upper, upper_m, upper_l, 0, item, splits, heads, new, flag_before, flag, messages,
        attention.scale, output, SHAPE,
    )  # fmt: skip
    if GROUP > 8:
        merge(
            kept, lower, lower_m, lower_l, 8, item, splits, heads, new, flag_before, flag,
            messages, attention.scale, output, SHAPE,
        )  # fmt: skip
    return tile
