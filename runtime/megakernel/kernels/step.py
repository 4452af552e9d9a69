# mypy: ignore-errors
"""The step itself: the warps that compute, and the launch."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from runtime.kernels.compat import barrier, seen_as
from runtime.megakernel.kernels.attention import attend_item
from runtime.megakernel.kernels.layouts import (
    BLOCK,
    CHUNK,
    COLUMNS,
    COPIERS,
    FLAT,
    KV_SLOT,
    LEFT,
    MMA,
    MOST_DIM,
    PARTS,
    PLAIN,
    RIGHT,
    ROWS,
    SLOT,
    TALLEST,
    THREADS,
    WARPS,
    N,
    finished,
    kept_layout,
)
from runtime.megakernel.kernels.matmul import added_up, finish, multiply, wanted
from runtime.megakernel.kernels.messages import (
    input_of,
    keep,
    operands,
    root_scale,
    send,
    send_input,
)
from runtime.megakernel.kernels.opcodes import (
    AFTER,
    ATTEND,
    BIAS,
    FIELDS,
    KIND,
    NORM,
    NORMED,
    RESIDUAL,
    SOURCE,
    STAGE,
    START,
    TALL,
    TARGET,
    TOTAL,
    UNIT,
    UNITS,
    WIDTH,
    past_tiles,
    share,
)
from runtime.megakernel.kernels.ring import full_slot, give_back, read_ahead


@gluon.jit
def embed(
    token, b, embedding, vectors, norm, words, hidden, squares, epoch, pid, programs,
    HIDDEN: gl.constexpr,
):  # fmt: skip
    """A program's share of a token's embedding."""
    first = HIDDEN * pid // programs
    last = HIDDEN * (pid + 1) // programs
    square = gl.zeros([THREADS], gl.float32, FLAT)
    for start in range(first, last, THREADS):
        i = start + gl.arange(0, THREADS, FLAT)
        h = gl.load(embedding + token * HIDDEN + i, mask=i < last, other=0.0).to(gl.float32)
        gl.store(hidden + b * HIDDEN + i, h, mask=i < last)
        weight = gl.load(vectors + norm + i, mask=i < last, other=0.0)
        send_input(words + i, h * weight, epoch, i < last)
        square += h * h
    only = gl.arange(0, THREADS, FLAT)
    total = gl.zeros([THREADS], gl.float32, FLAT) + gl.sum(square, 0)
    send(squares + pid * N + b + only, total, epoch, (only < 1) & (first < last))


@gluon.jit
def fields_of(row):
    return (
        gl.load(row + KIND), gl.load(row + STAGE), gl.load(row + AFTER), gl.load(row + WIDTH),
        gl.load(row + START), gl.load(row + UNITS), gl.load(row + TOTAL), gl.load(row + UNIT),
        gl.load(row + SOURCE), gl.load(row + TARGET), gl.load(row + BIAS), gl.load(row + NORM),
        gl.load(row + NORMED), gl.load(row + TALL),
    )  # fmt: skip


@gluon.jit
def compute(
    ring, kept, sums, full, empty, pid, programs,
    table, passes, flags, vectors, embedding, eps,
    tokens, positions, lengths, page_table, table_stride, pages, page_stride, head_stride,
    cos, sin, words, word_stride, parts, squares, hidden, gates, logits, scale,
    query_at, attended_at,
    B: gl.constexpr, BL: gl.constexpr, HIDDEN: gl.constexpr,
    GATED: gl.constexpr, VOCAB: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, PAGE: gl.constexpr, SPLITS: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """The step, over tiles that come through the ring."""
    DONE: gl.constexpr = finished(ROWS)
    base = gl.load(flags + pid)
    tile = gl.to_tensor(0)
    norm_at = gl.load(table + passes * FIELDS + NORM)
    for s in gl.static_range(B):
        embed(
            gl.load(tokens + s), s, embedding, vectors, norm_at, words + s * word_stride, hidden,
            squares, base, pid, programs, HIDDEN,
        )  # fmt: skip

    coming = fields_of(table)
    for n in tl.range(0, passes, disable_licm=True):
        (
            kind, stage, after, width, start, units, total, unit, source, target, bias, norm,
            normed, tall,
        ) = coming  # fmt: skip
        coming = fields_of(table + (n + 1) * FIELDS)
        epoch = base + stage
        if kind == ATTEND:
            for item in tl.range(pid, B * KV_HEADS * SPLITS, programs, disable_licm=True):
                _, split_in, _, _ = past_tiles(item, lengths, KV_HEADS, SPLITS)
                if item % SPLITS < split_in:
                    tile = attend_item(
                        ring, full, empty, tile, kept, item, split_in, lengths, scale, words,
                        word_stride, parts, query_at, attended_at, base + after, epoch, HEADS,
                        KV_HEADS, DIM, SPLITS, SLOTS,
                    )  # fmt: skip
        elif tall > 0:
            TALL_ROWS: gl.constexpr = WARPS * ROWS
            first, last = share(start, units, total, unit, pid, programs)
            for row in tl.range(first, last, TALL_ROWS, disable_licm=True):
                one, two, added = wanted(
                    kind, row, last, bias, norm, vectors, hidden, gates, cos, sin, positions,
                    TALL_ROWS, B, HIDDEN, GATED, DIM,
                )  # fmt: skip
                if row == first:
                    found = input_of(
                        words, word_stride, source * 8, width * 8, base + after, B, BL, TALLEST
                    )
                    keep(kept, found)
                chunks = seen_as(kept, gl.bfloat16, [TALLEST // MOST_DIM, N, MOST_DIM], CHUNK)
                y3 = gl.zeros([WARPS, ROWS, N], gl.float32, MMA)
                for k in range(0, width * 8, MOST_DIM):
                    slot = full_slot(ring, full, tile, SLOTS)
                    slot = seen_as(slot, gl.bfloat16, [WARPS, ROWS, MOST_DIM], KV_SLOT)
                    weights = slot.load(LEFT)
                    x = chunks.index(k // MOST_DIM).permute([1, 0]).load(gl.SliceLayout(0, RIGHT))
                    every = gl.zeros([WARPS, MOST_DIM, N], gl.bfloat16, RIGHT)
                    give_back(empty, tile, SLOTS)
                    y3 = mma_v2(weights, every + gl.expand_dims(x, 0), y3)
                    tile += 1
                factor = gl.full([N], 1.0, gl.float32, gl.SliceLayout(0, DONE))
                if normed > 0:
                    factor = root_scale(squares, base + after, programs, eps, B, BL, HIDDEN)
                OF_TALL: gl.constexpr = finished(TALL_ROWS)
                factor = gl.convert_layout(factor, gl.SliceLayout(0, OF_TALL))
                y = y3.reshape([TALL_ROWS, N])
                y = gl.convert_layout(y, OF_TALL) * gl.expand_dims(factor, 0) + added
                finish(
                    y, one, two, kind, row, last, target, epoch, words, word_stride, hidden, gates,
                    logits, pages, page_stride, head_stride, page_table, table_stride, positions,
                    query_at, B, HIDDEN, GATED, VOCAB, HEADS, KV_HEADS, DIM, PAGE,
                )  # fmt: skip
        else:
            columns = width * 8
            first, last = share(start, units, total, unit, pid, programs)
            factor = gl.full([N], 1.0, gl.float32, gl.SliceLayout(0, DONE))
            square = gl.zeros([N], gl.float32, gl.SliceLayout(0, DONE))
            x0 = gl.zeros([PARTS, 64, N], gl.bfloat16, RIGHT)
            x1 = gl.zeros([PARTS, 64, N], gl.bfloat16, RIGHT)
            x2 = gl.zeros([PARTS, 64, N], gl.bfloat16, RIGHT)
            x3 = gl.zeros([PARTS, 64, N], gl.bfloat16, RIGHT)
            for row in tl.range(first, last, ROWS, disable_licm=True):
                one, two, added = wanted(
                    kind, row, last, bias, norm, vectors, hidden, gates, cos, sin, positions, ROWS,
                    B, HIDDEN, GATED, DIM,
                )  # fmt: skip
                y3 = gl.zeros([PARTS, ROWS, N], gl.float32, MMA)
                for block in range(0, columns, BLOCK):
                    if (row == first) | (columns > BLOCK):
                        found = input_of(
                            words, word_stride, source * 8 + block, columns - block, base + after,
                            B, BL, BLOCK,
                        )  # fmt: skip
                        x0, x1, x2, x3 = operands(found)
                    y3 = multiply(ring, full, empty, tile, x0, y3, SLOTS)
                    tile += 1
                    if block + COLUMNS < columns:
                        y3 = multiply(ring, full, empty, tile, x1, y3, SLOTS)
                        tile += 1
                        if block + 2 * COLUMNS < columns:
                            y3 = multiply(ring, full, empty, tile, x2, y3, SLOTS)
                            tile += 1
                            if block + 3 * COLUMNS < columns:
                                y3 = multiply(ring, full, empty, tile, x3, y3, SLOTS)
                                tile += 1
                if (normed > 0) & (row == first):
                    factor = root_scale(squares, base + after, programs, eps, B, BL, HIDDEN)
                y = added_up(y3, sums)
                y = gl.convert_layout(y, DONE) * gl.expand_dims(factor, 0) + added
                square += finish(
                    y, one, two, kind, row, last, target, epoch, words, word_stride, hidden, gates,
                    logits, pages, page_stride, head_stride, page_table, table_stride, positions,
                    query_at, B, HIDDEN, GATED, VOCAB, HEADS, KV_HEADS, DIM, PAGE,
                )  # fmt: skip
            if (kind == RESIDUAL) & (first < last):
                sequence = gl.arange(0, N, gl.SliceLayout(0, DONE))
                send(squares + pid * N + sequence, square, epoch, sequence < B)
    last_stage = gl.load(table + passes * FIELDS + STAGE)
    barrier()
    gl.store(flags + pid, base + last_stage)


@gluon.jit
def step_kernel(
    table, passes, flags, weights, vectors, embedding, eps,
    tokens, positions, lengths, page_table, table_stride, pages, page_stride, head_stride,
    cos, sin, words, word_stride, parts, squares, hidden, gates, logits, scale,
    query_at, attended_at,
    B: gl.constexpr, BL: gl.constexpr, HIDDEN: gl.constexpr,
    GATED: gl.constexpr, VOCAB: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, PAGE: gl.constexpr, SPLITS: gl.constexpr,
    SLOTS: gl.constexpr, AHEAD: gl.constexpr, TALL_AHEAD: gl.constexpr,
):  # fmt: skip
    """All programs must run at the same time: a cooperative launch of at most 256.

    Args:
        table: int32 `[passes + 1, FIELDS]`.
        flags: int32 `[programs]`, the first stage's number of the next launch; never 0.
        page_stride, head_stride: of ``pages``, bf16 `[page, kv_head, PAGE, DIM]`, in lines.
        words: int64 `[B, word_stride]`; ``parts`` int64 `[B, HEADS, SPLITS, MOST_DIM + 2]`;
            ``squares`` int64 `[programs, N]`.
        hidden, gates, logits: fp32 `[B, …]`.
        scale: of attention, log2(e) in it.
    """
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, PARTS, ROWS, 64], SLOT)
    kept = gl.allocate_shared_memory(
        gl.bfloat16, [TALLEST // MOST_DIM, N, MOST_DIM], kept_layout(N)
    )  # fmt: skip
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS, N], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=32 * COPIERS)
        mbarrier.init(empty.index(slot), count=1)
    gl.warp_specialize(
        [
            (compute, (
                ring, kept, sums, full, empty, pid, programs, table, passes, flags, vectors,
                embedding, eps, tokens, positions, lengths, page_table, table_stride, pages,
                page_stride, head_stride, cos, sin, words, word_stride, parts, squares, hidden,
                gates, logits, scale, query_at, attended_at, B, BL, HIDDEN, GATED, VOCAB,
                HEADS, KV_HEADS, DIM, PAGE, SPLITS, SLOTS,
            )),
            (read_ahead, (
                ring, full, empty, table, passes, pid, programs, weights, pages, page_table,
                table_stride, page_stride, head_stride, lengths, B, KV_HEADS, DIM, PAGE, SPLITS,
                SLOTS, AHEAD, TALL_AHEAD,
            )),
        ],
        [COPIERS],
        [72],
    )  # fmt: skip
