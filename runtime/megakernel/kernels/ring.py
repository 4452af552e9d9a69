# mypy: ignore-errors
"""What a step reads of weights, K and V, brought into shared memory ahead of its use.

What will be read is known before the step begins. The copying warps are ahead by as much as the
ring holds: memory goes on working while programs wait for one another. Of what is under way there
is only as much as keeps memory busy: more would queue, and all else that is read queue behind it.

A tile is 16 rows and 1024 columns of a matrix, or 128 of each where a program has many rows, or
128 tokens of K or V of a head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from runtime.kernels.compat import barrier, load_async, seen_as
from runtime.megakernel.kernels.layouts import (
    COLUMNS,
    COPY,
    KV_COPY,
    KV_SLOT,
    LINE,
    MOST_DIM,
    PARTS,
    ROWS,
    TOKENS,
    WARPS,
    along,
)
from runtime.megakernel.kernels.opcodes import (
    ATTEND,
    FIELDS,
    KIND,
    OFFSET,
    OTHER,
    START,
    STRIDE,
    TALL,
    TOTAL,
    UNIT,
    UNITS,
    WIDTH,
    past_tiles,
    share,
)


@gluon.jit
def free_slot(ring, empty, tile, SLOTS: gl.constexpr):
    mbarrier.wait(empty.index(tile % SLOTS), (tile // SLOTS & 1) ^ 1)
    return ring.index(tile % SLOTS)


@gluon.jit
def full_slot(ring, full, tile, SLOTS: gl.constexpr):
    mbarrier.wait(full.index(tile % SLOTS), tile // SLOTS & 1)
    return ring.index(tile % SLOTS)


@gluon.jit
def give_back(empty, tile, SLOTS: gl.constexpr):
    barrier()
    mbarrier.arrive(empty.index(tile % SLOTS), count=1)


@gluon.jit
def copy(slot, full, tile, source, mask, SLOTS: gl.constexpr, AHEAD: gl.constexpr):
    """Begins to fill a slot; then there are at most AHEAD that are not full yet."""
    load_async(slot, source, mask=mask)
    async_copy.mbarrier_arrive(full.index(tile % SLOTS), increment_count=False)
    async_copy.commit_group()
    async_copy.wait_group(AHEAD)


@gluon.jit
def reads_of(row):
    return (
        gl.load(row + KIND), gl.load(row + OFFSET), gl.load(row + OTHER), gl.load(row + WIDTH),
        gl.load(row + START), gl.load(row + UNITS), gl.load(row + TOTAL), gl.load(row + UNIT),
        gl.load(row + TALL), gl.load(row + STRIDE),
    )  # fmt: skip


@gluon.jit
def read_ahead(
    ring, full, empty, table, passes, pid, programs, weights, pages, page_table, table_stride,
    page_stride, head_stride, lengths,
    B: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    SPLITS: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr, TALL_AHEAD: gl.constexpr,
):  # fmt: skip
    """Copies all tiles of a program, in the order in which it will use them."""
    part = along(PARTS, 0, COPY) % WARPS * MOST_DIM + along(PARTS, 0, COPY) // WARPS * 64
    r = along(ROWS, 1, COPY)
    j = along(64, 2, COPY)
    eighth = along(WARPS, 0, KV_COPY) * ROWS
    token = along(ROWS, 1, KV_COPY)
    d = along(MOST_DIM, 2, KV_COPY)
    tile = gl.to_tensor(0)
    coming = reads_of(table)
    for n in range(passes):
        kind, offset, other, width, start, units, total, unit, tall, stride = coming
        coming = reads_of(table + (n + 1) * FIELDS)
        if kind == ATTEND:
            for item in range(pid, B * KV_HEADS * SPLITS, programs):
                past, _, first, last = past_tiles(item, lengths, KV_HEADS, SPLITS)
                row_of_pages = page_table + item // (KV_HEADS * SPLITS) * table_stride
                head = item // SPLITS % KV_HEADS * head_stride * LINE
                for number in range(first, last):
                    t = number * TOKENS + eighth
                    page = gl.load(row_of_pages + t // PAGE, mask=t < past, other=0).to(gl.int64)
                    place = page * (page_stride * LINE) + head + (t % PAGE + token) * DIM + d
                    here = (t + token < past) & (d < DIM)
                    for which in gl.static_range(2):
                        plane = offset if which == 0 else other
                        slot = free_slot(ring, empty, tile, SLOTS)
                        copy(
                            seen_as(slot, gl.bfloat16, [WARPS, ROWS, MOST_DIM], KV_SLOT), full,
                            tile, pages + plane.to(gl.int64) * LINE + place, here, SLOTS, AHEAD,
                        )  # fmt: skip
                        tile += 1
        else:
            begin, end = share(start, units, total, unit, pid, programs)
            matrix = weights + offset.to(gl.int64) * LINE + begin.to(gl.int64) * (stride * 8)
            if tall > 0:
                for row in range(begin, end, WARPS * ROWS):
                    for k in range(0, width * 8, MOST_DIM):
                        here = (row + eighth + token < end) & (k + d < width * 8)
                        slot = free_slot(ring, empty, tile, SLOTS)
                        slot = seen_as(slot, gl.bfloat16, [WARPS, ROWS, MOST_DIM], KV_SLOT)
                        source = matrix + ((eighth + token) * (stride * 8) + k + d)
                        copy(slot, full, tile, source, here, SLOTS, TALL_AHEAD)
                        tile += 1
                    matrix += WARPS * ROWS * stride * 8
                end = begin  # nothing is left
            for row in range(begin, end, ROWS):
                for k in range(0, width * 8, COLUMNS):
                    column = k + part + j
                    here = (row + r < end) & (column < width * 8)
                    slot = free_slot(ring, empty, tile, SLOTS)
                    copy(slot, full, tile, matrix + (r * (stride * 8) + column), here, SLOTS, AHEAD)
                    tile += 1
                matrix += ROWS * stride * 8
    async_copy.wait_group(0)
