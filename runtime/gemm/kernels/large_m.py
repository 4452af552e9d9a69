# mypy: ignore-errors
"""Grouped GEMM on a Hopper GPU, with specialized warps.

One producer warp copies tiles of activations and weights by TMA into a ring in shared memory. One
or two consumer warp groups multiply 64 tokens each by the same weight rows. The kernel is
persistent: the producer loads the tiles of the next block while the consumers store the current
one. With one consumer warp group, the first tiles of weights are loaded while the previous kernel
still runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from runtime.kernels.arith import VECTOR
from runtime.kernels.compat import barrier, load_block
from runtime.kernels.overlap import start_next, wait_for_previous

PLAIN, RESIDUAL, GATED = (gl.constexpr(n) for n in range(3))
"""Values of `runtime.gemm.epilogues.Epilogue` as constexprs, the same as in `small_m`."""
TOKENS, COLUMNS = gl.constexpr(64), gl.constexpr(64)
"""Tokens per consumer warp group, and columns (the K dimension) per ring slot."""
BAND_TOKENS = gl.constexpr(2048)
"""Tokens per band. The blocks of a band that share weight rows run at about the same time, so that
the rows are read from the L2 cache."""
STORE_COLUMNS = gl.constexpr(64)
"""Output columns that a warp group stores at a time."""
STORE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def select(which, values):
    """Return ``values[which]``, where ``values`` has one value for each of three matrices."""
    zero, one, two = values
    return gl.where(which == 0, zero, gl.where(which == 1, one, two))


@gluon.jit
def block_of(
    item, tokens, rows, widths,
    BM: gl.constexpr, BN: gl.constexpr, EPILOGUE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Locate the output block of a work item, and the input columns that it sums.

    With GATED, the BN rows of a block are BN / 2 rows of the first matrix and BN / 2 of the second.

    Returns:
        Index of the block's first token; index of the matrix; index of the block's first row in the
        matrix; index of its first column in the output; begin and end of the input columns to sum.
    """
    EACH: gl.constexpr = BN // 2 if EPILOGUE == GATED else BN
    BAND: gl.constexpr = BAND_TOKENS // BM
    rows0, rows1, rows2 = rows
    blocks0 = gl.cdiv(rows0 * VECTOR, EACH)
    blocks1 = 0 if EPILOGUE == GATED else gl.cdiv(rows1 * VECTOR, EACH)
    blocks = blocks0 + blocks1 + (0 if EPILOGUE == GATED else gl.cdiv(rows2 * VECTOR, EACH))
    block = item // SPLITS
    band = block // (BAND * blocks)
    band_blocks = gl.minimum(BAND, gl.cdiv(tokens, BM) - band * BAND)
    in_band = block % (BAND * blocks)
    m = (band * BAND + in_band % band_blocks) * BM
    n = in_band // band_blocks
    which = gl.where(n < blocks0, 0, gl.where(n < blocks0 + blocks1, 1, 2))
    row = (n - gl.where(which > 0, blocks0, 0) - gl.where(which > 1, blocks1, 0)) * EACH
    column = row + (gl.where(which > 0, rows0, 0) + gl.where(which > 1, rows1, 0)) * VECTOR
    width = select(which, widths)
    if EPILOGUE == GATED:
        width = gl.maximum(width, widths[1])
    width *= VECTOR
    part = gl.cdiv(width, COLUMNS * SPLITS) * COLUMNS
    begin = item % SPLITS * part
    return m, which, row, column, begin, gl.minimum(begin + part, width)


@gluon.jit
def load_weights(sources, row, which, k, ready, own, BN: gl.constexpr, EPILOGUE: gl.constexpr):
    """Copy BN weight rows of COLUMNS columns into a slot of the ring."""
    HALF: gl.constexpr = BN // 2
    _, weights0, weights1, weights2, _ = sources
    if EPILOGUE == GATED:
        load_block(weights0, [row, k], ready, own.slice(0, HALF))
        load_block(weights1, [row, k], ready, own.slice(HALF, HALF))
    elif which == 0:
        load_block(weights0, [row, k], ready, own)
    elif which == 1:
        load_block(weights1, [row, k], ready, own)
    else:
        load_block(weights2, [row, k], ready, own)


@gluon.jit
def produce(
    sources, ring, items, tokens, rows, widths, firsts,
    GROUPS: gl.constexpr, BN: gl.constexpr, EPILOGUE: gl.constexpr, APART: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer warp: copy the tiles of this program's work items into the ring.

    With one consumer warp group, the weights of the first slots are copied while the previous
    kernel may still run. The input tiles of a block are followed by its residual tiles, with
    RESIDUAL.
    """
    BM: gl.constexpr = GROUPS * TOKENS
    BYTES: gl.constexpr = ((2 if APART else 1) * BM + BN) * COLUMNS * 2
    x, _, _, _, residual = sources
    left, right, full, empty = ring
    early = 0
    if GROUPS == 1:
        _, which, row, _, begin, end = block_of(
            gl.program_id(0), tokens, rows, widths, BM, BN, EPILOGUE, SPLITS
        )
        early = gl.minimum(gl.cdiv(end - begin, COLUMNS), STAGES)
        for slot in range(early):
            ready = full.index(slot)
            mbarrier.expect(ready, BYTES)
            load_weights(
                sources, row, which, begin + slot * COLUMNS, ready, right.index(slot), BN, EPILOGUE
            )
    wait_for_previous()
    step = gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        m, which, row, column, begin, end = block_of(
            item, tokens, rows, widths, BM, BN, EPILOGUE, SPLITS
        )
        first = select(which, firsts) * VECTOR
        for k in range(begin, end, COLUMNS):
            slot = step % STAGES
            ready = full.index(slot)
            missing = step >= early if GROUPS == 1 else True
            if missing:
                mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
                mbarrier.expect(ready, BYTES)
            own = left.index(slot)
            load_block(x, [m, first + k], ready, own.slice(0, BM))
            if APART:
                load_block(x, [m, firsts[1] * VECTOR + k], ready, own.slice(BM, BM))
            if missing:
                load_weights(sources, row, which, k, ready, right.index(slot), BN, EPILOGUE)
            step += 1
        if EPILOGUE == RESIDUAL:
            for piece in range(0, BN, STORE_COLUMNS):
                slot = step % STAGES
                ready = full.index(slot)
                mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
                mbarrier.expect(ready, BM * STORE_COLUMNS * 2)
                load_block(residual, [m, column + piece], ready, left.index(slot).slice(0, BM))
                step += 1


@gluon.jit
def halves(y):
    """Split the columns of `[m, n]` into a left and a right half, `[m, n / 2]` each."""
    return gl.split(y.reshape([y.shape[0], 2, y.shape[1] // 2]).permute([0, 2, 1]))


@gluon.jit
def store(
    acc, y, y_stride, ring, step, tokens, m, column, last,
    GROUP: gl.constexpr, EPILOGUE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Store fp32 ``acc`` `[TOKENS, n]` as bf16, STORE_COLUMNS at a time.

    With RESIDUAL, add the residual tiles that the producer loaded.

    Args:
        step: index of the next tile in the ring.
        m, column: indices of the block's first token and of its first output column.
        last: end of the matrix's columns in the output, exclusive.

    Returns:
        ``step``, advanced past the residual tiles.
    """
    if acc.shape[1] > STORE_COLUMNS:
        HALF: gl.constexpr = acc.shape[1] // 2
        early, late = halves(acc)
        step = store(
            early, y, y_stride, ring, step, tokens, m, column, last, GROUP, EPILOGUE, STAGES
        )  # fmt: skip
        step = store(
            late, y, y_stride, ring, step, tokens, m, column + HALF, last, GROUP, EPILOGUE, STAGES
        )  # fmt: skip
    else:
        left, _, full, empty = ring
        i = m + gl.arange(0, acc.shape[0], gl.SliceLayout(1, STORE_LAYOUT))
        j = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, STORE_LAYOUT))
        at = gl.expand_dims(i.to(gl.int64) * (y_stride * VECTOR), 1) + gl.expand_dims(j, 0)
        valid = gl.expand_dims(i < tokens, 1) & gl.expand_dims(j < last, 0)
        if EPILOGUE == RESIDUAL:
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            before = left.index(slot).slice(GROUP * TOKENS, TOKENS).load(STORE_LAYOUT)
            mbarrier.arrive(empty.index(slot), count=1)
            acc = gl.convert_layout(acc, STORE_LAYOUT) + before.to(gl.float32)
            gl.store(y + at, acc.to(gl.bfloat16), mask=valid)
            step += 1
        else:
            gl.store(y + at, gl.convert_layout(acc.to(gl.bfloat16), STORE_LAYOUT), mask=valid)
    return step


@gluon.jit
def add_bias(acc, biases, column, last):
    """Return ``acc`` `[m, n]` plus the biases of output columns ``column`` to ``column + n``."""
    j = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return acc + gl.expand_dims(gl.load(biases + j, mask=j < last, other=0.0), 0)


@gluon.jit
def reduce_splits(acc, partials, counters, item, SPLITS: gl.constexpr):
    """Split-K reduction: store a partial sum; the last program to arrive adds all of them.

    Partial sums are added in the order of the splits, whichever program is last.

    Returns:
        In the last program, the sum and True. In every other program, its own ``acc`` and False.
    """
    SIZE: gl.constexpr = acc.shape[0] * acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    i = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout)), 0)
    own = partials + (item // SPLITS * SPLITS).to(gl.int64) * SIZE + i * acc.shape[1] + j
    gl.store(own + item % SPLITS * SIZE, acc)
    barrier()
    last = gl.atomic_add(counters + item // SPLITS, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = gl.zeros_like(acc)
        for part in range(SPLITS):
            acc += gl.load(own + part * SIZE, cache_modifier=".cg")
        gl.store(counters + item // SPLITS, 0)
    return acc, last


@gluon.jit
def multiply(left, right, acc, GROUP: gl.constexpr, GROUPS: gl.constexpr, APART: gl.constexpr):
    """Start the multiplication of a slot's tiles; at most one step is in flight afterwards.

    Args:
        acc: fp32 `[TOKENS, BN]`. With APART, a pair of `[TOKENS, BN / 2]`: the first half of the
            weight rows is multiplied by the first tile of inputs, the second by the second.
    """
    x = left.slice(GROUP * TOKENS, TOKENS)  # [TOKENS, COLUMNS]
    if APART:
        HALF: gl.constexpr = right.shape[0] // 2
        y = left.slice((GROUPS + GROUP) * TOKENS, TOKENS)
        gate, up = acc
        gate = warpgroup_mma(x, right.slice(0, HALF).permute((1, 0)), gate, is_async=True)
        up = warpgroup_mma(y, right.slice(HALF, HALF).permute((1, 0)), up, is_async=True)
        gate, up = warpgroup_mma_wait(2, deps=[gate, up])
        acc = gate, up
    else:
        acc = warpgroup_mma(x, right.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
    return acc


@gluon.jit
def consume(
    outputs, ring, items, tokens, rows, widths,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr, EPILOGUE: gl.constexpr,
    APART: gl.constexpr, BIAS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer warp group GROUP: compute and store its 64 tokens of every block."""
    BM: gl.constexpr = GROUPS * TOKENS
    N: gl.constexpr = BN // 2 if APART else BN
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    y, y_stride, biases, partials, counters = outputs
    left, right, full, empty = ring
    wait_for_previous()
    step = gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        m, which, row, column, begin, end = block_of(
            item, tokens, rows, widths, BM, BN, EPILOGUE, SPLITS
        )
        m += GROUP * TOKENS
        acc = gl.zeros([TOKENS, N], gl.float32, MMA)
        if APART:
            acc = acc, gl.zeros([TOKENS, N], gl.float32, MMA)
        for k in range(begin, end, COLUMNS):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            acc = multiply(left.index(slot), right.index(slot), acc, GROUP, GROUPS, APART)
            # One step stays in flight, so the slot of the previous one is free now.
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > begin)
            step += 1
        if APART:
            acc = warpgroup_mma_wait(0, deps=[acc[0], acc[1]])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        if begin < end:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        complete = True
        if SPLITS > 1:
            group_counters = counters + GROUP * items
            acc, complete = reduce_splits(
                acc, partials + GROUP * items.to(gl.int64) * (TOKENS * BN), group_counters, item,
                SPLITS,
            )  # fmt: skip
        if complete:
            last = column - row + select(which, rows) * VECTOR
            if EPILOGUE == GATED:
                if APART:
                    gate, up = acc
                else:
                    gate, up = halves(acc)  # [TOKENS, BN / 2] each
                if BIAS:
                    gate = add_bias(gate, biases, row, last)
                    up = add_bias(up, biases + select(0, rows) * VECTOR, row, last)
                made = gate / (1.0 + gl.exp(-gate)) * up
                store(
                    made, y, y_stride, ring, step, tokens, m, column, last, GROUP, EPILOGUE, STAGES
                )  # fmt: skip
            else:
                if BIAS:
                    acc = add_bias(acc, biases, column, last)
                step = store(
                    acc, y, y_stride, ring, step, tokens, m, column, last, GROUP, EPILOGUE, STAGES
                )  # fmt: skip


_COUNTS = [
    "y_stride",
    "items",
    "tokens",
    *(f"{name}{n}" for name in ("rows", "width", "first") for n in range(3)),
]


@gluon.jit(do_not_specialize=_COUNTS)
def large_gemm_kernel(
    x, weights0, weights1, weights2, residual, y, y_stride, biases, partials, counters, items,
    tokens, rows0, rows1, rows2, width0, width1, width2, first0, first1, first2,
    GROUPS: gl.constexpr, BN: gl.constexpr, EPILOGUE: gl.constexpr, APART: gl.constexpr,
    BIAS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Persistent GEMM: each program loops over work items. There are at most as many as SMs.

    A work item is an output block of 64 GROUPS tokens and BN weight rows, summed over one of SPLITS
    parts of the input columns. ``y_stride``, ``rows*``, ``width*`` and ``first*`` are in units of 8
    elements.

    Args:
        x: TMA descriptor of bf16 `[tokens, …]`, block `[64 GROUPS, 64]`.
        weights0, weights1, weights2: TMA descriptors of bf16 `[8 rows, 8 width]`, block `[BN, 64]`,
            with GATED `[BN / 2, 64]`. Absent matrices have 0 rows.
        residual: TMA descriptor of bf16 `[tokens, 8 rows0]`, block `[64 GROUPS, 64]`, with
            RESIDUAL; it may refer to the memory of ``y``.
        y: bf16 `[tokens, 8 sum of rows]`, with GATED `[tokens, 8 rows0]`, written.
        y_stride: row stride of ``y``.
        biases: fp32 `[8 sum of rows]`, with BIAS.
        partials: fp32 `[GROUPS, items, 64, BN]`, with SPLITS > 1, which only PLAIN supports.
        counters: int32 `[GROUPS, items]`, with SPLITS > 1; zero before and after the launch.
        items: number of work items.
        tokens: rows of ``x``.
        rows0, rows1, rows2: rows of each matrix.
        width0, width1, width2: columns of each matrix.
        first0, first1, first2: first column of ``x`` that each matrix reads.
        APART: with GATED, whether the two matrices read different columns of ``x``.
        STAGES: slots of the ring in shared memory.
    """
    start_next()
    INPUTS: gl.constexpr = 2 if APART else 1
    left = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, INPUTS * GROUPS * TOKENS, COLUMNS], x.layout
    )
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, COLUMNS], weights0.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    rows, widths = (rows0, rows1, rows2), (width0, width1, width2)
    firsts = (first0, first1, first2)
    sources = (x, weights0, weights1, weights2, residual)
    outputs = (y, y_stride, biases, partials, counters)
    ring = (left, right, full, empty)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (
                    outputs, ring, items, tokens, rows, widths, 0, 2, BN, EPILOGUE, APART, BIAS,
                    SPLITS, STAGES,
                )),
                (consume, (
                    outputs, ring, items, tokens, rows, widths, 1, 2, BN, EPILOGUE, APART, BIAS,
                    SPLITS, STAGES,
                )),
                (produce, (
                    sources, ring, items, tokens, rows, widths, firsts, 2, BN, EPILOGUE, APART,
                    SPLITS, STAGES,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    outputs, ring, items, tokens, rows, widths, 0, 1, BN, EPILOGUE, APART, BIAS,
                    SPLITS, STAGES,
                )),
                (produce, (
                    sources, ring, items, tokens, rows, widths, firsts, 1, BN, EPILOGUE, APART,
                    SPLITS, STAGES,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
