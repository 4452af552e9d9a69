# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Attention of one new token per sequence over latents, balanced over a fixed number of programs.

The kernel is that of `runtime.attention.kernels.decode` with other tiles. K of a tile is rebuilt on
tensor cores. V is not: the weighted sum of its latents is multiplied by U_v once per interval.

RoPE of a key at position p is RoPE by p - p0 and then by p0, where p0 is the first position of the
tile. The rotation by p0 is undone on the queries instead, so that all tiles use the same cosines
and sines for their keys, which stay in registers.
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
from runtime.kernels.arith import VECTOR, matmul
from runtime.kv.kernels.latents import rounded_to
from runtime.kv.kernels.windowed import softmax_step
from runtime.kv.lowrank.kernels import factor_at, latents_at, rebuilt_keys


@triton.jit
def no_sums(ROWS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Return sums of no latents: a tuple of fp32 zeros `[ROWS, CHUNK]`, one per chunk."""
    sums = ()
    for _number in tl.static_range(CHUNKS):
        sums = sums + (tl.zeros((ROWS, CHUNK), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@triton.jit
def add_latents(
    sums, weights, alpha, plane, at, used, width, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Return ``alpha * sums + weights @ latents``, as a tuple of chunks.

    Args:
        weights: bf16 or fp32 `[ROWS, BLOCK]`.
        alpha: fp32 `[ROWS]`.
        plane, at, used: see `kernels.latents_at`.
    """
    found = ()
    for number in tl.static_range(CHUNKS):
        latents = latents_at(plane, at, used, number * CHUNK, width, CHUNK)
        acc = sums[number] * alpha[:, None]
        acc = matmul(rounded_to(weights, latents.dtype), latents, acc)
        found = found + (acc,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def values_of(
    sums, l, u, bias, first_row, width,
    DIM: tl.constexpr, DIMS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return weighted sums of V, fp32 `[ROWS, DIMS]`, from those of its latents.

    The sums are split into a number of the dtype of U and its rounding error.

    Args:
        l: fp32 `[ROWS]`, sums of weights.
        u, bias: U_v, and the bias of V or None.
        first_row: row of the KV head in U_v.
    """
    d = tl.arange(0, DIMS)[None, :]
    acc = tl.zeros((l.shape[0], DIMS), tl.float32)
    for number in tl.static_range(CHUNKS):
        factor = factor_at(u, first_row, number * CHUNK, width, DIMS, DIM, CHUNK)
        own = sums[number]
        rounded = rounded_to(own, factor.dtype)
        acc = matmul(rounded, factor, acc)
        acc = matmul(rounded_to(own - rounded.to(tl.float32), factor.dtype), factor, acc)
    if bias is not None:
        added = tl.load(bias + first_row + d, mask=d < DIM, other=0.0).to(tl.float32)
        acc += l[:, None] * added
    return acc


@triton.jit
def attend_latents(
    q1, q2, kv_head, begin, end, length, k_latents, v_latents, k_stride, v_stride, table, u_k,
    k_bias, cos, sin, context, scale, k_width, v_width,
    DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Attend over the tokens ``begin`` to ``end - 1`` of one KV head.

    Args:
        q1, q2: halves of the queries, `[ROWS, HALF]`, bf16 or fp32.
        begin, end: multiples of BLOCK.
        length: number of tokens of the sequence.
        table: pointer to the page table of the sequence.
        context: rows of ``cos`` and ``sin``.
        k_width, v_width: widths of the latents.

    Returns:
        Sums of latents of V, a tuple of `[ROWS, CHUNK]`, and ``m`` and ``l`` of the online softmax.
    """
    ROWS: tl.constexpr = q1.shape[0]
    dtype: tl.constexpr = q1.dtype
    d = tl.arange(0, HALF)
    offset = tl.arange(0, BLOCK)
    real = (offset < context)[:, None] & (d < DIM // 2)[None, :]
    angle = offset[:, None] * (DIM // 2) + d[None, :]
    c = tl.load(cos + angle, mask=real, other=0.0)  # [BLOCK, HALF]
    s = tl.load(sin + angle, mask=real, other=0.0)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    sums = no_sums(ROWS, CHUNKS, CHUNK)
    for first in range(begin, end, BLOCK):
        t = first + offset
        used = t < length
        page = tl.load(table + t // PAGE, mask=used, other=0).to(tl.int64)
        slot = t % PAGE
        k_at = page * k_stride + slot * k_width
        k1, k2 = rebuilt_keys(
            k_latents, k_at, used, u_k, k_bias, kv_head, k_width, DIM, HALF, BLOCK, CHUNK
        )

        at = first * (DIM // 2) + d
        tile_c = tl.load(cos + at, mask=d < DIM // 2, other=1.0)
        tile_s = tl.load(sin + at, mask=d < DIM // 2, other=0.0)
        # `c` and `s` include YaRN's factor, so the cosines and sines of the tile must not.
        norm = tl.sqrt(tile_c * tile_c + tile_s * tile_s)
        tile_c = (tile_c / norm)[None, :]
        tile_s = (tile_s / norm)[None, :]
        turned1 = rounded_to(q1 * tile_c + q2 * tile_s, dtype)
        turned2 = rounded_to(q2 * tile_c - q1 * tile_s, dtype)
        zeros = tl.zeros((BLOCK, ROWS), tl.float32)
        scores = matmul(rounded_to(k1 * c - k2 * s, dtype), tl.trans(turned1), zeros)
        scores = matmul(rounded_to(k2 * c + k1 * s, dtype), tl.trans(turned2), scores)
        scores = tl.where(used[None, :], tl.trans(scores) * scale, float("-inf"))
        weights, alpha, m, l = softmax_step(scores, m, l)
        v_at = page * v_stride + slot * v_width
        sums = add_latents(sums, weights, alpha, v_latents, v_at, used, v_width, CHUNKS, CHUNK)
    return sums, m, l


@triton.jit(do_not_specialize=["sequences", "k_units", "v_units"])
def latent_decode_kernel(
    q, k_latents, v_latents, k_stride, v_stride, page_table, table_stride, lengths, sequences, u_k,
    u_v, k_bias, v_bias, cos, sin, context, split_acc, split_m, split_l, counters, out, scale,
    k_units, v_units,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SEQUENCES: tl.constexpr, MIN_TILES: tl.constexpr,
    MERGED: tl.constexpr, MERGED_HEADS: tl.constexpr,
):  # fmt: skip
    """Attend over one interval of tiles per program, for the GROUP query heads of each KV head.

    Grid `(programs,)`. Every program finds its interval from the lengths of all sequences.

    Args:
        q: `[sequences, KV_HEADS * GROUP, DIM]`, after RoPE, bf16 or fp32.
        k_latents, v_latents: bf16 `[page, 1, PAGE, width]`, page strides ``k_stride`` and
            ``v_stride``.
        u_k, u_v, k_bias, v_bias: see `kernels.rebuild_kernel`.
        cos, sin: fp32 `[context, DIM / 2]`.
        HALF, DIMS, CHUNK, k_units, v_units: see `runtime.kv.lowrank.kernels`.
        CHUNKS: chunks of latents of V.

    The other arguments are those of `runtime.attention.kernels.decode.decode_kernel`.
    """
    i = tl.arange(0, SEQUENCES)
    # Tiles of one KV head of each sequence.
    tiles = tl.cdiv(tl.load(lengths + i, mask=i < sequences, other=0), BLOCK)
    ends, programs, each, extra = divide(tiles, tl.num_programs(0), KV_HEADS, MIN_TILES)
    program = tl.program_id(0)
    if program >= programs:
        return
    begin = interval_begin(program, each, extra)
    end = interval_begin(program + 1, each, extra)

    row = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    valid = (row < GROUP)[:, None] & (d < DIM // 2)[None, :]
    tile = begin
    while tile < end:
        sequence, kv_head, head_begin, count = head_of_tile(i, tile, tiles, ends, KV_HEADS)
        stop = tl.minimum(head_begin + count, end)
        head = ((sequence * KV_HEADS + kv_head) * GROUP + row).to(tl.int64)  # [ROWS]
        at = q + head[:, None] * DIM + d[None, :]
        sums, m, l = attend_latents(
            tl.load(at, mask=valid, other=0.0), tl.load(at + DIM // 2, mask=valid, other=0.0),
            kv_head, (tile - head_begin) * BLOCK, (stop - head_begin) * BLOCK,
            tl.load(lengths + sequence), k_latents, v_latents, k_stride, v_stride,
            page_table + sequence * table_stride, u_k, k_bias, cos, sin, context, scale,
            k_units * VECTOR, v_units * VECTOR, DIM, HALF,
            PAGE, BLOCK, CHUNKS, CHUNK,
        )  # fmt: skip
        acc = values_of(
            sums, l, u_v, v_bias, kv_head * DIM, v_units * VECTOR, DIM, DIMS, CHUNKS, CHUNK
        )
        if stop - tile == count:
            write_whole(acc, l, sequence, kv_head, out, KV_HEADS, GROUP, ROWS, DIM, DIMS)
        else:
            first, splits, first_slot = head_splits(head_begin, count, each, extra)
            write_split(
                acc, m, l, sequence, kv_head, (tile > begin).to(tl.int32), first, splits,
                first_slot, split_acc, split_m, split_l, counters, out, KV_HEADS, GROUP, ROWS, DIM,
                DIMS, MERGED, MERGED_HEADS,
            )  # fmt: skip
        tile = stop
