# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Division of decode attention over a fixed number of programs.

The KV of a batch is divided into tiles of consecutive keys of one KV head of one sequence. Tiles
are numbered by sequence, KV head and position, and each program attends over an equal interval of
them. A long sequence is therefore shared by many programs, and a program may attend over several
short ones.

The tiles of a KV head that are in one interval are a split. If a head has only one split, its
result is written at once. Otherwise, the last program to finish a split of the head merges all of
them, so that one launch suffices. Lengths are read on the device, so that a CUDA graph can be
replayed with other lengths.

Kernels that use these functions have a grid `(programs,)`, find their interval with `divide`, walk
through it from head to head with `head_of_tile`, and write results with `write_whole` or
`write_split`. What a tile contains is up to the kernel.

The kernels in "FDC: Fast KV Dimensionality Compression for Efficient LLM Inference", section 5.3,
have the same purpose, but divide queries and KV differently.
"""

import triton
import triton.language as tl


@triton.jit
def divide(tiles, most, KV_HEADS: tl.constexpr, MIN_TILES: tl.constexpr):
    """Divide the tiles of a batch into intervals.

    Args:
        tiles: int32 `[SEQUENCES]`, number of tiles of one KV head of each sequence.
        most: maximum number of intervals.
        MIN_TILES: minimum number of tiles of an interval; with little work, some programs get none.

    Returns:
        The number of the first tile after each sequence, `[SEQUENCES]`; the number of programs with
        an interval; and ``each`` and ``extra``, see `interval_begin`.
    """
    ends = tl.cumsum(tiles, axis=0) * KV_HEADS  # [SEQUENCES], the tile after each sequence
    total = tl.sum(tiles, axis=0) * KV_HEADS
    programs = tl.minimum(most, tl.cdiv(total, MIN_TILES))
    shared = tl.maximum(programs, 1)
    return ends, programs, total // shared, total % shared


@triton.jit
def interval_begin(program, each, extra):
    """Return the number of a program's first tile.

    The first ``extra`` programs have ``each + 1`` tiles, the others ``each``.
    """
    return program * each + tl.minimum(program, extra)


@triton.jit
def program_of(tile, each, extra):
    """Return the program whose interval holds a tile; see `interval_begin`."""
    longer = extra * (each + 1)
    return tl.where(tile < longer, tile // (each + 1), extra + (tile - longer) // each)


@triton.jit
def head_of_tile(s, tile, tiles, ends, KV_HEADS: tl.constexpr):
    """Return the sequence and KV head of a tile, the head's first tile and its number of tiles.

    Args:
        s: ``arange(0, SEQUENCES)``.
        tiles, ends: see `divide`.
    """
    sequence = tl.sum((ends <= tile).to(tl.int32), axis=0)
    count = tl.sum(tl.where(s == sequence, tiles, 0), axis=0)  # tiles of one KV head
    before = tl.sum(tl.where(s == sequence, ends, 0), axis=0) - count * KV_HEADS
    kv_head = (tile - before) // count
    return sequence, kv_head, before + kv_head * count, count


@triton.jit
def merge_splits(
    first_head, first, count, first_slot, split_acc, split_m, split_l, out,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MERGED: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of the query heads of one KV head and write their outputs.

    Args:
        first_head: index of the first of the GROUP query heads in ``out``.
        first, count: the first program with a split, and the number of programs with one.
        first_slot: slot (0 or 1) of the split of program ``first``. The splits of the other
            programs are in slot 0.
        MERGED: splits per iteration, of MERGED_HEADS query heads each; both are powers of two.
    """
    d = tl.arange(0, WIDTH)
    i = tl.arange(0, MERGED)
    for begin_head in tl.static_range(0, GROUP, MERGED_HEADS):
        row = begin_head + tl.arange(0, MERGED_HEADS)
        g = tl.minimum(row, GROUP - 1)[:, None]  # [MERGED_HEADS, 1]
        m = tl.full((MERGED_HEADS,), float("-inf"), tl.float32)
        l = tl.zeros((MERGED_HEADS,), tl.float32)
        acc = tl.zeros((MERGED_HEADS, WIDTH), tl.float32)
        for begin in range(0, count, MERGED):
            program = first + begin + i
            slot = program * 2 + tl.where(program == first, first_slot, 0)
            split = slot[None, :] * GROUP + g  # [MERGED_HEADS, MERGED]
            valid = (begin + i < count)[None, :]
            all_m = tl.load(split_m + split, mask=valid, other=float("-inf"), cache_modifier=".cg")
            all_l = tl.load(split_l + split, mask=valid, other=0.0, cache_modifier=".cg")
            all_acc = tl.load(
                split_acc + split[:, :, None] * DIM + d[None, None, :],
                mask=valid[:, :, None] & (d < DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )  # [MERGED_HEADS, MERGED, WIDTH]
            new_m = tl.maximum(m, tl.max(all_m, axis=1))
            share = tl.exp2(all_m - new_m[:, None])
            alpha = tl.exp2(m - new_m)
            l = l * alpha + tl.sum(share * all_l, axis=1)
            acc = acc * alpha[:, None] + tl.sum(share[:, :, None] * all_acc, axis=1)
            m = new_m
        at = (first_head + row)[:, None] * DIM + d[None, :]
        result = (acc / l[:, None]).to(out.dtype.element_ty)
        tl.store(out + at, result, mask=(row < GROUP)[:, None] & (d < DIM)[None, :])


@triton.jit
def head_splits(head_begin, count, each, extra):
    """Return the programs that have splits of a KV head.

    Returns:
        The first of these programs; their number, which is the number of splits; and the slot (0 or
        1) of the split in the first program.

    Args:
        head_begin, count: first tile of the head, and its number of tiles.
        each, extra: see `interval_begin`.
    """
    first = program_of(head_begin, each, extra)
    splits = program_of(head_begin + count - 1, each, extra) - first + 1
    return first, splits, (head_begin > interval_begin(first, each, extra)).to(tl.int32)


@triton.jit
def write_whole(
    acc, l, sequence, kv_head, out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the output of a KV head whose tiles are all in one interval; see `write_split`."""
    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    valid = (row < GROUP)[:, None] & (d < DIM)[None, :]
    head = ((sequence * KV_HEADS + kv_head) * GROUP + row).to(tl.int64)  # [ROWS]
    at = head[:, None] * DIM + d[None, :]
    tl.store(out + at, (acc / l[:, None]).to(out.dtype.element_ty), mask=valid)


@triton.jit
def write_split(
    acc, m, l, sequence, kv_head, slot, first, splits, first_slot, split_acc, split_m, split_l,
    counters, out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, MERGED: tl.constexpr, MERGED_HEADS: tl.constexpr,
):  # fmt: skip
    """Write one split of a KV head. The last program to write a split of the head merges them all.

    Args:
        acc: fp32 `[ROWS, WIDTH]`, unnormalized outputs; the first GROUP rows are query heads.
        m, l: fp32 `[ROWS]`, maximum and sum of the online softmax.
        slot: slot of this split, see ``split_acc``.
        first, splits, first_slot: see `head_splits`. The other splits are in slot 0 of the programs
            after ``first``.
        split_acc: fp32 `[programs, 2, GROUP, DIM]`, unnormalized outputs. The split with which a
            program's interval begins is in slot 0, the one with which it ends in slot 1.
        split_m, split_l: fp32 `[programs, 2, GROUP]`, maximum and sum of each split.
        counters: int32 `[sequences, KV_HEADS]`, zero before and after the launch.
        out: `[sequences, KV_HEADS * GROUP, DIM]`, written.
        MERGED, MERGED_HEADS: splits and query heads that are merged per iteration.
    """
    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    valid = (row < GROUP)[:, None] & (d < DIM)[None, :]
    split = (tl.program_id(0) * 2 + slot) * GROUP + row
    tl.store(split_acc + split[:, None] * DIM + d[None, :], acc, mask=valid)
    tl.store(split_m + split, m, mask=row < GROUP)
    tl.store(split_l + split, l, mask=row < GROUP)
    tl.debug_barrier()
    counter = counters + sequence * KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
        merge_splits(
            (sequence * KV_HEADS + kv_head).to(tl.int64) * GROUP, first, splits, first_slot,
            split_acc, split_m, split_l, out, GROUP, DIM, WIDTH, MERGED, MERGED_HEADS,
        )  # fmt: skip
        tl.store(counter, 0)
