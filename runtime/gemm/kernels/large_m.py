# mypy: ignore-errors
"""Products with many tokens at a time: those of `kernels.linear`, by warp groups of a Hopper GPU.

One warp only copies: tokens and rows of weights, through a ring in shared memory. One or two groups
of four warps multiply 64 tokens each, with the same rows. A program has one block of products after
the other, and copies for the next one while it stores what it found.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from runtime.kernels.compat import barrier, load_block

PLAIN, RESIDUAL, GATED = (gl.constexpr(n) for n in range(3))
TOKENS, COLUMNS = gl.constexpr(64), gl.constexpr(64)
"""Of a group of warps, and of one step."""
BAND = gl.constexpr(2048)
"""Tokens that have the same rows of weights at about the same time, from the L2."""
PIECE = gl.constexpr(64)
"""Columns that a group of warps stores at a time."""
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def of_matrix(which, each):
    """One of three numbers, of which each is a matrix's."""
    zero, one, two = each
    return gl.where(which == 0, zero, gl.where(which == 1, one, two))


@gluon.jit
def block_of(
    item, tokens, rows, widths,
    BM: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """An item's first token, its matrix, the first row of that, the first column of the output, and
    which of the matrix's columns are added up: the first, and after the last. With GATED, BN rows
    are half of the first matrix and half of the second, which have one input."""
    EACH: gl.constexpr = BN // 2 if KIND == GATED else BN
    TALL: gl.constexpr = BAND // BM
    rows0, rows1, rows2 = rows
    blocks0 = gl.cdiv(rows0 * 8, EACH)
    blocks1 = 0 if KIND == GATED else gl.cdiv(rows1 * 8, EACH)
    blocks = blocks0 + blocks1 + (0 if KIND == GATED else gl.cdiv(rows2 * 8, EACH))
    block = item // SPLITS
    band = block // (TALL * blocks)
    tall = gl.minimum(TALL, gl.cdiv(tokens, BM) - band * TALL)
    in_band = block % (TALL * blocks)
    m = (band * TALL + in_band % tall) * BM
    n = in_band // tall
    which = gl.where(n < blocks0, 0, gl.where(n < blocks0 + blocks1, 1, 2))
    row = (n - gl.where(which > 0, blocks0, 0) - gl.where(which > 1, blocks1, 0)) * EACH
    column = row + (gl.where(which > 0, rows0, 0) + gl.where(which > 1, rows1, 0)) * 8
    width = of_matrix(which, widths) * 8
    part = gl.cdiv(width, COLUMNS * SPLITS) * COLUMNS
    begin = item % SPLITS * part
    return m, which, row, column, begin, gl.minimum(begin + part, width)


@gluon.jit
def copy(
    sources, ring, items, tokens, rows, widths, firsts,
    GROUPS: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies."""
    BM: gl.constexpr = GROUPS * TOKENS
    HALF: gl.constexpr = BN // 2
    x, weights0, weights1, weights2, residual = sources
    left, right, full, empty = ring
    step = gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        m, which, row, column, begin, end = block_of(
            item, tokens, rows, widths, BM, BN, KIND, SPLITS
        )
        first = of_matrix(which, firsts) * 8
        for k in range(begin, end, COLUMNS):
            slot = step % STAGES
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(ready, (BM + BN) * COLUMNS * 2)
            load_block(x, [m, first + k], ready, left.index(slot))
            own = right.index(slot)
            if KIND == GATED:
                load_block(weights0, [row, k], ready, own.slice(0, HALF))
                load_block(weights1, [row, k], ready, own.slice(HALF, HALF))
            elif which == 0:
                load_block(weights0, [row, k], ready, own)
            elif which == 1:
                load_block(weights1, [row, k], ready, own)
            else:
                load_block(weights2, [row, k], ready, own)
            step += 1
        if KIND == RESIDUAL:
            for piece in range(0, BN, PIECE):
                slot = step % STAGES
                ready = full.index(slot)
                mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
                mbarrier.expect(ready, BM * PIECE * 2)
                load_block(residual, [m, column + piece], ready, left.index(slot))
                step += 1


@gluon.jit
def halves(y):
    """The first and the second half of the columns."""
    return gl.split(y.reshape([y.shape[0], 2, y.shape[1] // 2]).permute([0, 2, 1]))


@gluon.jit
def store(
    found, y, y_stride, ring, step, tokens, m, column, last,
    PART: gl.constexpr, KIND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Some tokens' columns from ``column`` on, up to ``last``, PIECE of them at a time."""
    if found.shape[1] > PIECE:
        HALF: gl.constexpr = found.shape[1] // 2
        early, late = halves(found)
        step = store(
            early, y, y_stride, ring, step, tokens, m, column, last, PART, KIND, STAGES
        )  # fmt: skip
        step = store(
            late, y, y_stride, ring, step, tokens, m, column + HALF, last, PART, KIND, STAGES
        )  # fmt: skip
    else:
        left, _, full, empty = ring
        i = m + gl.arange(0, found.shape[0], gl.SliceLayout(1, STORE))
        j = column + gl.arange(0, found.shape[1], gl.SliceLayout(0, STORE))
        place = gl.expand_dims(i.to(gl.int64) * (y_stride * 8), 1) + gl.expand_dims(j, 0)
        here = gl.expand_dims(i < tokens, 1) & gl.expand_dims(j < last, 0)
        if KIND == RESIDUAL:
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            before = left.index(slot).slice(PART * TOKENS, TOKENS).load(STORE)
            mbarrier.arrive(empty.index(slot), count=1)
            found = gl.convert_layout(found, STORE) + before.to(gl.float32)
            gl.store(y + place, found.to(gl.bfloat16), mask=here)
            step += 1
        else:
            gl.store(y + place, gl.convert_layout(found.to(gl.bfloat16), STORE), mask=here)
    return step


@gluon.jit
def biased(total, biases, column, last):
    j = column + gl.arange(0, total.shape[1], gl.SliceLayout(0, total.type.layout))
    return total + gl.expand_dims(gl.load(biases + j, mask=j < last, other=0.0), 0)


@gluon.jit
def added_up(total, sums, arrived, item, SPLITS: gl.constexpr):
    """The parts of a product together, for whoever is last to have one; in the order of the parts,
    whoever is last."""
    SIZE: gl.constexpr = total.shape[0] * total.shape[1]
    layout: gl.constexpr = total.type.layout
    i = gl.expand_dims(gl.arange(0, total.shape[0], gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, total.shape[1], gl.SliceLayout(0, layout)), 0)
    own = sums + (item // SPLITS * SPLITS).to(gl.int64) * SIZE + i * total.shape[1] + j
    gl.store(own + item % SPLITS * SIZE, total)
    barrier()
    last = gl.atomic_add(arrived + item // SPLITS, 1, sem="acq_rel") == SPLITS - 1
    if last:
        total = gl.zeros_like(total)
        for part in range(SPLITS):
            total += gl.load(own + part * SIZE, cache_modifier=".cg")
        gl.store(arrived + item // SPLITS, 0)
    return total, last


@gluon.jit
def multiply(
    outputs, ring, items, tokens, rows, widths,
    PART: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr,
    BIAS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group of warps: the PART-th 64 tokens of every block."""
    BM: gl.constexpr = GROUPS * TOKENS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    y, y_stride, biases, sums, arrived = outputs
    left, right, full, empty = ring
    step = gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        m, which, row, column, begin, end = block_of(
            item, tokens, rows, widths, BM, BN, KIND, SPLITS
        )
        m += PART * TOKENS
        total = gl.zeros([TOKENS, BN], gl.float32, MMA)
        for k in range(begin, end, COLUMNS):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            x = left.index(slot).slice(PART * TOKENS, TOKENS)
            total = warpgroup_mma(x, right.index(slot).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > begin)
            step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        if begin < end:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        here = True
        if SPLITS > 1:
            place = arrived + PART * items
            total, here = added_up(
                total, sums + PART * items.to(gl.int64) * (TOKENS * BN), place, item, SPLITS
            )
        if here:
            last = column - row + of_matrix(which, rows) * 8
            if KIND == GATED:
                gate, up = halves(total)
                if BIAS:
                    gate = biased(gate, biases, row, last)
                    up = biased(up, biases + of_matrix(0, rows) * 8, row, last)
                found = gate / (1.0 + gl.exp(-gate)) * up
                store(
                    found, y, y_stride, ring, step, tokens, m, column, last, PART, KIND, STAGES
                )  # fmt: skip
            else:
                if BIAS:
                    total = biased(total, biases, column, last)
                step = store(
                    total, y, y_stride, ring, step, tokens, m, column, last, PART, KIND, STAGES
                )  # fmt: skip


_COUNTS = [
    "y_stride",
    "items",
    "tokens",
    *(f"{name}{n}" for name in ("rows", "width", "first") for n in range(3)),
]


@gluon.jit(do_not_specialize=_COUNTS)
def large_linear_kernel(
    x, weights0, weights1, weights2, residual, y, y_stride, biases, sums, arrived, items, tokens,
    rows0, rows1, rows2, width0, width1, width2, first0, first1, first2,
    GROUPS: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr, BIAS: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """At most a program for each multiprocessor; ``items`` are blocks of 64 GROUPS tokens and BN
    rows, times SPLITS.

    Args:
        x: descriptor of bf16 `[tokens, …]`, blocks `[64 GROUPS, 64]`.
        weights0, weights1, weights2: of bf16 `[8 rows, 8 width]`, blocks `[BN, 64]`, with GATED
            `[BN / 2, 64]`. Their inputs are the columns of ``x`` from ``8 first`` on.
        residual: of what RESIDUAL adds to, which may be ``y``; blocks `[64 GROUPS, 64]`.
        y: bf16 `[tokens, 8 rows of all]`, with GATED `[tokens, 8 rows0]`; rows are 8 y_stride
            apart.
        biases: fp32 `[8 rows of all]`.
        sums: fp32 `[GROUPS, items, 64, BN]`, and ``arrived`` int32 `[GROUPS, items]`, zeros before
            and after, for SPLITS > 1, which PLAIN alone has.
    """
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, GROUPS * TOKENS, COLUMNS], x.layout)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, COLUMNS], weights0.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    rows, widths = (rows0, rows1, rows2), (width0, width1, width2)
    firsts = (first0, first1, first2)
    sources = (x, weights0, weights1, weights2, residual)
    outputs = (y, y_stride, biases, sums, arrived)
    ring = (left, right, full, empty)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply, (
                    outputs, ring, items, tokens, rows, widths, 0, 2, BN, KIND, BIAS, SPLITS,
                    STAGES,
                )),
                (multiply, (
                    outputs, ring, items, tokens, rows, widths, 1, 2, BN, KIND, BIAS, SPLITS,
                    STAGES,
                )),
                (copy, (
                    sources, ring, items, tokens, rows, widths, firsts, 2, BN, KIND, SPLITS, STAGES,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (
                    outputs, ring, items, tokens, rows, widths, 0, 1, BN, KIND, BIAS, SPLITS,
                    STAGES,
                )),
                (copy, (
                    sources, ring, items, tokens, rows, widths, firsts, 1, BN, KIND, SPLITS, STAGES,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
