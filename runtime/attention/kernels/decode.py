# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Attention of one new token per sequence over its pages, balanced over a fixed number of programs.

The KV of a batch is divided into tiles: BLOCK consecutive keys of one KV head of one sequence.
Tiles are numbered by sequence, KV head and position, and each program attends over an equal
interval of them. A long sequence is therefore shared by many programs, and a program may attend
over several short ones (the balanced kernel of FDC).

The tiles of a KV head that are in one interval are a part. The result of a head in one part is
written at once. Otherwise, the last program to finish a part of the head merges all of them, so
that one launch suffices. Lengths are read on the device, so that a CUDA graph can be replayed with
other lengths.
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
def attend_tiles(
    queries, kv_head, begin, end, length, k_pages, v_pages, page_stride, head_stride, table, scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend over the keys of one KV head at positions ``begin`` to ``end``, multiples of BLOCK.

    Args:
        queries: `[ROWS, WIDTH]`.
        length: number of keys of the sequence.
        table: pointer to the page table of the sequence.

    Returns:
        fp32 unnormalized output `[ROWS, WIDTH]`, maximum and sum `[ROWS]` of the softmax.
    """
    d = tl.arange(0, WIDTH)
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
    return acc, m, l


@triton.jit
def merge_parts(
    query_head, g, first, count, first_slot, part_acc, part_m, part_l, out,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query head and write its output.

    Args:
        query_head: index of the query head in ``out``.
        g: index of the query head within its KV head.
        first, count: the first program with a part, and the number of programs with one.
        first_slot: slot of that program's part. The parts of all others are in slot 0.
        PARTS: parts per iteration.
    """
    d = tl.arange(0, WIDTH)
    i = tl.arange(0, PARTS)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros((WIDTH,), tl.float32)
    for begin in range(0, count, PARTS):
        program = first + begin + i
        part = (program * 2 + tl.where(program == first, first_slot, 0)) * GROUP + g  # [PARTS]
        valid = begin + i < count
        all_m = tl.load(part_m + part, mask=valid, other=float("-inf"), cache_modifier=".cg")
        all_l = tl.load(part_l + part, mask=valid, other=0.0, cache_modifier=".cg")
        all_acc = tl.load(
            part_acc + part[:, None] * DIM + d[None, :],
            mask=valid[:, None] & (d < DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )  # [PARTS, WIDTH]
        new_m = tl.maximum(m, tl.max(all_m, axis=0))
        share = tl.exp2(all_m - new_m)
        alpha = tl.exp2(m - new_m)
        l = l * alpha + tl.sum(share * all_l, axis=0)
        acc = acc * alpha + tl.sum(share[:, None] * all_acc, axis=0)
        m = new_m
    tl.store(out + query_head * DIM + d, (acc / l).to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def interval_begin(program, each, extra):
    """Return the first tile of a program; the first ``extra`` programs have ``each`` + 1 tiles."""
    return program * each + tl.minimum(program, extra)


@triton.jit
def program_of(tile, each, extra):
    """Return the program whose interval holds a tile; see `interval_begin`."""
    longer = extra * (each + 1)
    return tl.where(tile < longer, tile // (each + 1), extra + (tile - longer) // each)


@triton.jit(do_not_specialize=["sequences"])
def decode_kernel(
    q, k_pages, v_pages, page_stride, head_stride, page_table, table_stride, lengths, sequences,
    part_acc, part_m, part_l, counters, out, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr,
    MIN_TILES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attend over one interval of tiles per program, for the GROUP query heads of each KV head.

    Grid `(programs,)`. Every program finds its interval from the lengths of all sequences.

    Args:
        q: `[sequences, KV_HEADS * GROUP, DIM]`, bf16 or fp32.
        k_pages, v_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`, of equal strides.
        page_table: int32 `[sequences, pages]`, row stride ``table_stride``.
        lengths: int32 `[sequences]`.
        part_acc: fp32 `[programs, 2, GROUP, DIM]`, unnormalized outputs. The part with which a
            program's interval begins is in slot 0, the one with which it ends in slot 1.
        part_m, part_l: fp32 `[programs, 2, GROUP]`, maximum and sum of each part.
        counters: int32 `[sequences, KV_HEADS]`, zero before and after the launch.
        out: shaped as ``q``, written.
        scale: log2(e) / sqrt(DIM).
        ROWS, WIDTH: powers of two of at least 16, and at least GROUP and DIM respectively.
        BLOCK: keys of a tile.
        SEQUENCES: power of two, at least ``sequences``.
        MIN_TILES: minimum number of tiles of an interval; with little work, some programs get none.
        PARTS: parts that are merged per iteration.
    """
    s = tl.arange(0, SEQUENCES)
    tiles = tl.cdiv(tl.load(lengths + s, mask=s < sequences, other=0), BLOCK)  # of each KV head
    ends = tl.cumsum(tiles, axis=0) * KV_HEADS  # [SEQUENCES], the tile after each sequence
    total = tl.sum(tiles, axis=0) * KV_HEADS
    programs = tl.minimum(tl.num_programs(0), tl.cdiv(total, MIN_TILES))
    each, extra = total // programs, total % programs
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
        sequence = tl.sum((ends <= tile).to(tl.int32), axis=0)
        count = tl.sum(tl.where(s == sequence, tiles, 0), axis=0)  # of one KV head
        before = tl.sum(tl.where(s == sequence, ends, 0), axis=0) - count * KV_HEADS
        kv_head = (tile - before) // count
        head_begin = before + kv_head * count
        head_end = head_begin + count
        stop = tl.minimum(head_end, end)
        head = ((sequence * KV_HEADS + kv_head) * GROUP + row).to(tl.int64)  # [ROWS]
        at = head[:, None] * DIM + d[None, :]
        acc, m, l = attend_tiles(
            tl.load(q + at, mask=valid, other=0.0), kv_head, (tile - head_begin) * BLOCK,
            (stop - head_begin) * BLOCK, tl.load(lengths + sequence), k_pages, v_pages,
            page_stride, head_stride, page_table + sequence * table_stride, scale,
            ROWS, DIM, WIDTH, PAGE, BLOCK,
        )  # fmt: skip
        if stop - tile == count:
            tl.store(out + at, (acc / l[:, None]).to(out.dtype.element_ty), mask=valid)
        else:
            part = (program * 2 + (tile > begin).to(tl.int32)) * GROUP + row
            tl.store(part_acc + part[:, None] * DIM + d[None, :], acc, mask=valid)
            tl.store(part_m + part, m, mask=row < GROUP)
            tl.store(part_l + part, l, mask=row < GROUP)
            tl.debug_barrier()
            first = program_of(head_begin, each, extra)
            parts = program_of(head_end - 1, each, extra) - first + 1
            counter = counters + sequence * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                first_slot = (head_begin > interval_begin(first, each, extra)).to(tl.int32)
                for g in range(GROUP):
                    merge_parts(
                        (sequence * KV_HEADS + kv_head).to(tl.int64) * GROUP + g, g, first, parts,
                        first_slot, part_acc, part_m, part_l, out, GROUP, DIM, WIDTH, PARTS,
                    )  # fmt: skip
                tl.store(counter, 0)
        tile = stop
