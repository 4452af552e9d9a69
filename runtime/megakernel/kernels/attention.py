# mypy: ignore-errors
"""Attention of one new token of each sequence, its KV split among programs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from runtime.kernels.compat import barrier, seen_as
from runtime.megakernel.kernels.layouts import (
    HEAD,
    KV_SLOT,
    LEFT,
    MMA,
    MOST_DIM,
    OF_WARPS,
    OTHERS,
    PLAIN,
    RIGHT,
    ROWS,
    TOKENS,
    WARPS,
    along,
)
from runtime.megakernel.kernels.messages import anew, receive, receive_input, send, send_input
from runtime.megakernel.kernels.opcodes import past_tiles
from runtime.megakernel.kernels.ring import full_slot, give_back


@gluon.jit
def attend(
    ring, full, empty, tile, item, queries, lengths, scale,
    KV_HEADS: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """One part of what a sequence had before this step, of the query heads of one KV head. A warp
    has 16 tokens of a tile, and its own softmax of them until the end: ``mixed`` `[WARPS, ROWS,
    MOST_DIM]`, of weights relative to ``peak`` `[ROWS]`, whose sum is ``total``."""
    past, _, first, last = past_tiles(item, lengths, KV_HEADS, SPLITS)
    t = along(WARPS, 0, MMA) * ROWS + along(ROWS, 2, MMA) + anew()
    peak = gl.full([WARPS, ROWS], float("-inf"), gl.float32, gl.SliceLayout(2, MMA))
    total = gl.zeros([WARPS, ROWS], gl.float32, gl.SliceLayout(2, MMA))
    mixed = gl.zeros([WARPS, ROWS, MOST_DIM], gl.float32, MMA)
    for number in range(first, last):
        slot = full_slot(ring, full, tile, SLOTS)
        slot = seen_as(slot, gl.bfloat16, [WARPS, ROWS, MOST_DIM], KV_SLOT)
        keys = slot.permute([0, 2, 1]).load(RIGHT)
        give_back(empty, tile, SLOTS)
        scores = mma_v2(queries, keys, gl.zeros([WARPS, ROWS, ROWS], gl.float32, MMA))
        scores = gl.where(number * TOKENS + t < past, scores * scale, float("-inf"))
        higher = gl.maximum(peak, gl.max(scores, axis=2))
        level = gl.where(higher == float("-inf"), 0.0, higher)
        shares = gl.exp2(scores - gl.expand_dims(level, 2))
        fading = gl.exp2(peak - level)
        total = total * fading + gl.sum(shares, axis=2)
        peak = higher
        slot = full_slot(ring, full, tile + 1, SLOTS)
        values = seen_as(slot, gl.bfloat16, [WARPS, ROWS, MOST_DIM], KV_SLOT).load(RIGHT)
        give_back(empty, tile + 1, SLOTS)
        tile += 2
        shares = gl.convert_layout(shares.to(gl.bfloat16), LEFT)
        mixed = mma_v2(shares, values, mixed * gl.expand_dims(fading, 2))
    top = gl.max(peak, axis=0)
    level = gl.where(top == float("-inf"), 0.0, top)
    part = gl.exp2(peak - gl.expand_dims(level, 0))
    return tile, mixed * gl.expand_dims(part, 2), top, gl.sum(total * part, axis=0)


@gluon.jit
def merge(
    kept, mixed, top, total, row: gl.constexpr, item, split_in, heads,
    new, before, parts, epoch, scale, attended,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Eight heads of what the warps of a program found, ``mixed`` `[WARPS, 8, MOST_DIM]`. The
    program of the first part puts all parts together, and the token that is new in this step."""
    FOUND: gl.constexpr = gl.SliceLayout(0, OF_WARPS)
    ALONE: gl.constexpr = gl.SliceLayout(1, FOUND)
    shared = seen_as(kept, gl.float32, [WARPS, 8, MOST_DIM], PLAIN)
    barrier()
    shared.store(mixed)
    barrier()
    found = gl.sum(shared.load(OF_WARPS), axis=0)
    top = gl.convert_layout(top, ALONE)
    total = gl.convert_layout(total, ALONE)
    g = row + gl.arange(0, 8, ALONE) + anew()
    d = gl.expand_dims(gl.arange(0, MOST_DIM, gl.SliceLayout(0, FOUND)), 0)
    here = (gl.expand_dims(g, 1) < GROUP) & (d < DIM)
    part = parts + (item // SPLITS * GROUP + g) * (SPLITS * (MOST_DIM + 2))
    split = item % SPLITS + anew()  # triton 3.6 fails on a branch that is never taken
    if split > 0:
        part += split * (MOST_DIM + 2)
        send(part + MOST_DIM, top, epoch, g < GROUP)
        send(part + MOST_DIM + 1, total, epoch, g < GROUP)
        send(gl.expand_dims(part, 1) + d, found, epoch, here)
    else:
        query = receive_input(heads + gl.expand_dims(g, 1) * DIM + d, before, here, 4, 4)
        key = receive_input(new + d, before, d < DIM, 4, 4).to(gl.float32)
        value = receive_input(new + KV_HEADS * DIM + d, before, d < DIM, 4, 4).to(gl.float32)
        own = gl.sum(query.to(gl.float32) * key, axis=1) * scale
        higher = gl.maximum(top, own)
        fading = gl.exp2(top - higher)
        own = gl.exp2(own - higher)
        total = total * fading + own
        found = found * gl.expand_dims(fading, 1) + gl.expand_dims(own, 1) * value
        top = higher
        for first in range(1, split_in, 4):
            s = along(4, 0, OTHERS) + first
            g3 = row + along(8, 1, OTHERS) + anew()
            d3 = along(MOST_DIM, 2, OTHERS)
            place = parts + ((item // SPLITS * GROUP + g3) * SPLITS + s) * (MOST_DIM + 2)
            real = (g3 < GROUP) & (s < split_in)
            peak = receive(place + MOST_DIM, epoch, real, 4)
            peak = gl.where(real, peak, float("-inf"))
            more = receive(place + MOST_DIM + 1, epoch, real, 4)
            theirs = receive(place + d3, epoch, real & (d3 < DIM), 16)
            highest = gl.maximum(
                gl.convert_layout(top, gl.SliceLayout(0, gl.SliceLayout(2, OTHERS))),
                gl.max(gl.max(peak, axis=2), axis=0),
            )
            shares = gl.exp2(peak - gl.expand_dims(gl.expand_dims(highest, 0), 2))
            added = gl.sum(gl.max(shares * more, axis=2), axis=0)
            theirs = gl.sum(theirs * shares, axis=0)
            highest = gl.convert_layout(highest, ALONE)
            fading = gl.exp2(top - highest)
            total = total * fading + gl.convert_layout(added, ALONE)
            found = found * gl.expand_dims(fading, 1) + gl.convert_layout(theirs, FOUND)
            top = highest
        barrier()  # all warps have read what the next layer writes over
        at = attended + (item // SPLITS % KV_HEADS * GROUP + gl.expand_dims(g, 1)) * DIM + d
        send_input(at, found / gl.expand_dims(total, 1), epoch, here)


@gluon.jit
def attend_item(
    ring, full, empty, tile, kept, item, split_in, lengths, scale, words, word_stride, parts,
    query_at, attended_at, before, epoch,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, SPLITS: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """One part of a sequence's KV, of one KV head, and what the program that puts parts together
    makes of them."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    own = words + item // (KV_HEADS * SPLITS) * word_stride
    own_head = item // SPLITS % KV_HEADS
    heads = own + query_at + own_head * GROUP * DIM
    g = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, HEAD)), 1) + anew()
    d = gl.expand_dims(gl.arange(0, MOST_DIM, gl.SliceLayout(0, HEAD)), 0)
    new = own + query_at + (HEADS + own_head) * DIM
    queries = receive_input(heads + g * DIM + d, before, (g < GROUP) & (d < DIM), 8, 4)
    queries = gl.convert_layout(queries, gl.SliceLayout(0, LEFT))
    queries = gl.expand_dims(queries, 0)
    every = gl.zeros([WARPS, ROWS, MOST_DIM], gl.bfloat16, LEFT) + queries
    tile, mixed, peak, mass = attend(
        ring, full, empty, tile, item, every, lengths, scale, KV_HEADS, SPLITS, SLOTS
    )
    mixed = mixed.reshape([WARPS, 2, 8, MOST_DIM]).permute([0, 2, 3, 1])
    upper, lower = gl.split(mixed)
    upper_peak, lower_peak = gl.split(peak.reshape([2, 8]).permute([1, 0]))
    upper_mass, lower_mass = gl.split(mass.reshape([2, 8]).permute([1, 0]))
    merge(
        kept, upper, upper_peak, upper_mass, 0, item, split_in, heads, new, before, parts, epoch,
        scale, own + attended_at, KV_HEADS, GROUP, DIM, SPLITS,
    )  # fmt: skip
    if GROUP > 8:
        merge(
            kept, lower, lower_peak, lower_mass, 8, item, split_in, heads, new, before, parts,
            epoch, scale, own + attended_at, KV_HEADS, GROUP, DIM, SPLITS,
        )  # fmt: skip
    return tile
