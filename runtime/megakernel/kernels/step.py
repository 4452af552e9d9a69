# mypy: ignore-errors
"""The persistent kernel of a decode step: its compute warps, and the launch of all warps."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from runtime.kernels.arith import VECTOR
from runtime.kernels.compat import barrier, reinterpret
from runtime.megakernel.kernels.attention import attend_item
from runtime.megakernel.kernels.layouts import (
    COLUMNS,
    COPY_WARPS,
    FLAT,
    INPUT_CHUNK,
    LHS,
    MAX_DIM,
    MMA,
    PARTS,
    REGISTER_COLUMNS,
    RHS,
    ROWS,
    SHARED_COLUMNS,
    THREADS,
    TILE,
    UNSWIZZLED,
    WARPS,
    N,
    kept_input_layout,
    output_layout,
)
from runtime.megakernel.kernels.matmul import (
    load_operands,
    multiply_tile,
    run_epilogue,
    sum_of_ranks,
    sum_parts,
)
from runtime.megakernel.kernels.messages import (
    inverse_rms,
    keep_input,
    mma_operands,
    receive_fp32,
    receive_input,
    send_partial,
    send_residual,
    send_squares,
)
from runtime.megakernel.kernels.opcodes import (
    AFTER,
    ATTEND,
    BIAS,
    EMBEDDED,
    FIELDS,
    NORM,
    NORMED,
    OPCODE,
    RESIDUAL,
    SOURCE,
    STAGE,
    START,
    SUM_INNER,
    SUM_RESIDUAL,
    TALL,
    TARGET,
    TOTAL,
    UNIT,
    UNITS,
    WIDTH,
    field,
    past_tiles,
    prefetch,
    rows_of_program,
)
from runtime.megakernel.kernels.ring import as_wide_tile, copy_tiles, release, wait_full


@gluon.jit
def embed(
    token, b: gl.constexpr, norm, target, weights, messages, buffers, ranks, flag, pid, programs,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Initialize this program's columns of the residual stream with the embedding of ``token``.

    Send the columns, multiplied by the weights of the first norm, and their sum of squares before
    this multiplication. With several ranks, the rank that holds the token sends the embedding
    to all ranks. If the ranks divide the rows of the residual stream, each sends its rows to all
    that read them.

    Args:
        token: token id of sequence ``b``.
        norm, target: see `schedule.Pass`.
        flag: flag of stage 0.
    """
    HIDDEN: gl.constexpr = SHAPE.HIDDEN
    first = HIDDEN * pid // programs
    last = HIDDEN * (pid + 1) // programs
    begin = 0
    if SHAPE.HEIGHT > 0:
        for start in range(first, last, THREADS):
            i = start + gl.arange(0, THREADS, FLAT)
            send_embedding(token, b, i, i < last, weights, ranks, flag, SHAPE)
        begin = ranks.rank * SHAPE.HEIGHT
        rows = gl.maximum(gl.minimum(HIDDEN - begin, SHAPE.HEIGHT), 0)
        first = rows * pid // programs
        last = rows * (pid + 1) // programs
    square = gl.zeros([THREADS], gl.float32, FLAT)
    for start in range(first, last, THREADS):
        i = start + gl.arange(0, THREADS, FLAT)
        if SHAPE.RANKS == 1:
            row = weights.embedding + token * HIDDEN
            h = gl.load(row + i, mask=i < last, other=0.0).to(gl.float32)
        else:
            if SHAPE.HEIGHT == 0:
                send_embedding(token, b, i, i < last, weights, ranks, flag, SHAPE)
            place = (EMBEDDED * SHAPE.RANKS * SHAPE.B + b) * SHAPE.SUMS + begin
            found = ranks.partials + place + i
            h = receive_fp32(found, flag, i < last, 1, True)
        gl.store(buffers.hidden + b * HIDDEN + i, h, mask=i < last)
        weight = gl.load(weights.vectors + norm + i, mask=i < last, other=0.0)
        send_residual(messages, ranks, b, target, i, h * weight, flag, i < last, SHAPE)
        square += h * h
    thread = gl.arange(0, THREADS, FLAT)
    total = gl.zeros([THREADS], gl.float32, FLAT) + gl.sum(square, 0)
    mask = (thread < 1) & (first < last)
    send_squares(messages, ranks, pid, b + thread, total, flag, mask, True, SHAPE)


@gluon.jit
def send_embedding(token, b: gl.constexpr, i, mask, weights, ranks, flag, SHAPE: gl.constexpr):
    """Send columns ``i`` of the embedding of ``token`` to all ranks, if this rank holds it."""
    place = token - ranks.first_token
    held = mask & (place >= 0) & (place < SHAPE.VOCAB)
    row = weights.embedding + place * SHAPE.HIDDEN
    h = gl.load(row + i, mask=held, other=0.0).to(gl.float32)
    send_partial(ranks, EMBEDDED, 0, b, i, h, flag, held, SHAPE)


@gluon.jit
def load_pass(row):
    """Load the fields of a pass that the compute warps need."""
    return (
        field(row, OPCODE), field(row, STAGE), field(row, AFTER), field(row, WIDTH),
        field(row, START), field(row, UNITS), field(row, TOTAL), field(row, UNIT),
        field(row, SOURCE), gl.load(row + TARGET), field(row, BIAS), field(row, NORM),
        field(row, NORMED), field(row, TALL),
    )  # fmt: skip


@gluon.jit
def compute(
    ring, kept, sums, pid, programs, schedule, weights, batch, pages, rope, messages, buffers,
    attention, ranks, SHAPE: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Compute warps: run all passes, reading tiles from the ring.

    Args:
        ring: shared-memory ring of weight tiles, see `runtime.megakernel.kernels.ring`.
        kept: shared memory, bf16 `[SHARED_COLUMNS / MAX_DIM, N, MAX_DIM]`, the input of tall tiles.
        sums: shared memory, fp32 `[WARPS, ROWS, N]`, for sums over warps.

    The other arguments are those of `step_kernel`.
    """
    OUTPUT: gl.constexpr = output_layout(ROWS)
    B: gl.constexpr = SHAPE.B
    KV_HEADS: gl.constexpr = SHAPE.KV_HEADS
    SPLITS: gl.constexpr = SHAPE.SPLITS
    SLOTS: gl.constexpr = RING.SLOTS
    table, passes = schedule.table, schedule.passes
    base = gl.load(schedule.flags + pid)
    tile = gl.to_tensor(0)
    end = table + passes * FIELDS
    first_norm = field(end, NORM)
    if first_norm >= 0:
        for s in gl.static_range(B):
            embed(
                gl.load(batch.tokens + s), s, first_norm, gl.load(end + TARGET), weights, messages,
                buffers, ranks, base, pid, programs, SHAPE,
            )  # fmt: skip

    # With the most sequences, there are no registers for the fields of the next pass.
    HOLDS: gl.constexpr = SHAPE.BL < N
    coming = load_pass(table)
    for n in tl.range(0, passes, disable_licm=True):
        if HOLDS:
            fields = coming
            coming = load_pass(table + (n + 1) * FIELDS)
        else:
            fields = load_pass(table + n * FIELDS)
            prefetch(table + (n + 1) * FIELDS)
        (
            opcode, stage, after, width, start, units, total, unit, source, target, bias, norm,
            normed, tall,
        ) = fields  # fmt: skip
        flag = base + stage
        if opcode == ATTEND:
            for item in tl.range(pid, B * KV_HEADS * SPLITS, programs, disable_licm=True):
                _, splits, _, _ = past_tiles(item, batch.lengths, KV_HEADS, SPLITS)
                if item % SPLITS < splits:
                    tile = attend_item(
                        ring, tile, kept, item, splits, batch.lengths, messages, attention,
                        base + after, flag, SHAPE, SLOTS,
                    )  # fmt: skip
        elif tall > 0:
            TALL_ROWS: gl.constexpr = WARPS * ROWS
            TALL_OUTPUT: gl.constexpr = output_layout(TALL_ROWS)
            first, last = rows_of_program(start, units, total, unit, pid, programs)
            tall_square = gl.zeros([N], gl.float32, gl.SliceLayout(0, TALL_OUTPUT))
            for row in tl.range(first, last, TALL_ROWS, disable_licm=True):
                one, two, added = load_operands(
                    opcode, row, last, bias, norm, weights, batch, rope, buffers, TALL_ROWS, SHAPE
                )
                if row == first:
                    found = receive_input(
                        messages, source * VECTOR, width * VECTOR, base + after, SHAPE,
                        SHARED_COLUMNS,
                    )  # fmt: skip
                    keep_input(kept, found)
                chunks = reinterpret(
                    kept, gl.bfloat16, [SHARED_COLUMNS // MAX_DIM, N, MAX_DIM], INPUT_CHUNK
                )
                acc = gl.zeros([WARPS, ROWS, N], gl.float32, MMA)
                for k in range(0, width * VECTOR, MAX_DIM):
                    rows = as_wide_tile(wait_full(ring, tile, SLOTS)).load(LHS)
                    x = chunks.index(k // MAX_DIM).permute([1, 0]).load(gl.SliceLayout(0, RHS))
                    every = gl.zeros([WARPS, MAX_DIM, N], gl.bfloat16, RHS)
                    release(ring, tile, SLOTS)
                    acc = mma_v2(rows, every + gl.expand_dims(x, 0), acc)
                    tile += 1
                factor = gl.full([N], 1.0, gl.float32, gl.SliceLayout(0, OUTPUT))
                if normed > 0:
                    squared = after
                    if SHAPE.HEIGHT > 0:
                        squared = gl.where(opcode == SUM_INNER, norm, after)
                    factor = inverse_rms(messages, base, squared, programs, weights.eps, SHAPE)
                factor = gl.convert_layout(factor, gl.SliceLayout(0, TALL_OUTPUT))
                y = gl.convert_layout(acc.reshape([TALL_ROWS, N]), TALL_OUTPUT)
                if SHAPE.RANKS > 1:
                    if opcode >= SUM_INNER:
                        y = sum_of_ranks(ranks, source, row, last, base + after, TALL_ROWS, SHAPE)
                y = y * gl.expand_dims(factor, 0) + added
                tall_square += run_epilogue(
                    y, one, two, opcode, row, last, target, flag, batch, pages, messages, buffers,
                    ranks, attention.query_offset, SHAPE,
                )  # fmt: skip
            if SHAPE.RANKS > 1:
                if (opcode == SUM_RESIDUAL) & (first < last):
                    sequence = gl.arange(0, N, gl.SliceLayout(0, TALL_OUTPUT))
                    send_squares(
                        messages, ranks, pid, sequence, tall_square, flag, sequence < B, False,
                        SHAPE,
                    )  # fmt: skip
        else:
            columns = width * VECTOR
            first, last = rows_of_program(start, units, total, unit, pid, programs)
            factor = gl.full([N], 1.0, gl.float32, gl.SliceLayout(0, OUTPUT))
            square = gl.zeros([N], gl.float32, gl.SliceLayout(0, OUTPUT))
            x0 = gl.zeros([PARTS, 64, N], gl.bfloat16, RHS)
            x1 = gl.zeros([PARTS, 64, N], gl.bfloat16, RHS)
            x2 = gl.zeros([PARTS, 64, N], gl.bfloat16, RHS)
            x3 = gl.zeros([PARTS, 64, N], gl.bfloat16, RHS)
            for row in tl.range(first, last, ROWS, disable_licm=True):
                one, two, added = load_operands(
                    opcode, row, last, bias, norm, weights, batch, rope, buffers, ROWS, SHAPE
                )
                acc = gl.zeros([PARTS, ROWS, N], gl.float32, MMA)
                for block in range(0, columns, REGISTER_COLUMNS):
                    # An input that fits in registers is received once, and kept there for all rows.
                    if (row == first) | (columns > REGISTER_COLUMNS):
                        found = receive_input(
                            messages, source * VECTOR + block, columns - block, base + after,
                            SHAPE, REGISTER_COLUMNS,
                        )  # fmt: skip
                        x0, x1, x2, x3 = mma_operands(found)
                    acc = multiply_tile(ring, tile, x0, acc, SLOTS)
                    tile += 1
                    if block + COLUMNS < columns:
                        acc = multiply_tile(ring, tile, x1, acc, SLOTS)
                        tile += 1
                        if block + 2 * COLUMNS < columns:
                            acc = multiply_tile(ring, tile, x2, acc, SLOTS)
                            tile += 1
                            if block + 3 * COLUMNS < columns:
                                acc = multiply_tile(ring, tile, x3, acc, SLOTS)
                                tile += 1
                if (normed > 0) & (row == first):
                    factor = inverse_rms(messages, base, after, programs, weights.eps, SHAPE)
                y = sum_parts(acc, sums)
                y = gl.convert_layout(y, OUTPUT) * gl.expand_dims(factor, 0) + added
                square += run_epilogue(
                    y, one, two, opcode, row, last, target, flag, batch, pages, messages, buffers,
                    ranks, attention.query_offset, SHAPE,
                )  # fmt: skip
            if (opcode == RESIDUAL) & (first < last):
                sequence = gl.arange(0, N, gl.SliceLayout(0, OUTPUT))
                send_squares(
                    messages, ranks, pid, sequence, square, flag, sequence < B, False, SHAPE
                )
    last_stage = field(table + passes * FIELDS, STAGE)
    barrier()
    gl.store(schedule.flags + pid, base + last_stage)


@gluon.jit
def step_kernel(
    schedule, weights, batch, pages, rope, messages, buffers, attention, ranks,
    SHAPE: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Compute one decode step of up to eight sequences, or a part of it.

    It is a cooperative launch of at most 256 programs, all of which must be resident.

    Args:
        schedule, weights, batch, pages, rope, messages, buffers, attention, ranks: named tuples of
            `arguments`, which documents their shapes and dtypes.
        SHAPE, RING: `arguments.Shape` and `arguments.Ring`.
    """
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    SLOTS: gl.constexpr = RING.SLOTS
    tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, PARTS, ROWS, 64], TILE)
    kept = gl.allocate_shared_memory(
        gl.bfloat16, [SHARED_COLUMNS // MAX_DIM, N, MAX_DIM], kept_input_layout(N)
    )  # fmt: skip
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS, N], UNSWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=32 * COPY_WARPS)
        mbarrier.init(empty.index(slot), count=1)
    ring = (tiles, full, empty)
    gl.warp_specialize(
        [
            (compute, (
                ring, kept, sums, pid, programs, schedule, weights, batch, pages, rope, messages,
                buffers, attention, ranks, SHAPE, RING,
            )),
            (copy_tiles, (
                ring, pid, programs, schedule, weights, batch, pages, SHAPE, RING,
            )),
        ],
        [COPY_WARPS],
        [72],
    )  # fmt: skip
