# mypy: ignore-errors
"""The ring of tiles in shared memory, and the copy warps that fill it.

The weights, K and V that a step reads are known before it begins. Copy warps run ahead of the
compute warps, by as many tiles as the ring has slots, so that memory is busy while programs wait
for messages. The number of copies in flight is bounded: more would delay the messages behind them.

There are three kinds of tiles: 16 rows and 1024 columns of a matrix; 128 rows and 128 columns of a
matrix (a tall tile, used if each program has many rows); and 128 tokens of K or V of one head. A
ring is a tuple: the tiles, bf16 `[SLOTS, PARTS, ROWS, 64]`, and the mbarriers ``full`` and
``empty`` `[SLOTS, 1]`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from runtime.kernels.arith import LINE, VECTOR
from runtime.kernels.compat import barrier, load_async, reinterpret
from runtime.megakernel.kernels.layouts import (
    COLUMNS,
    MAX_DIM,
    PARTS,
    ROWS,
    TILE_COPY,
    TOKENS,
    WARPS,
    WIDE_TILE,
    WIDE_TILE_COPY,
    N,
    index_along,
)
from runtime.megakernel.kernels.opcodes import (
    ATTEND,
    FIELDS,
    OFFSET,
    OPCODE,
    START,
    STRIDE,
    TALL,
    TOTAL,
    UNIT,
    UNITS,
    V_OFFSET,
    WIDTH,
    field,
    past_tiles,
    prefetch,
    rows_of_program,
)


@gluon.jit
def as_wide_tile(slot):
    """View a slot `[PARTS, ROWS, 64]` as a wide tile `[WARPS, ROWS, MAX_DIM]`."""
    return reinterpret(slot, gl.bfloat16, [WARPS, ROWS, MAX_DIM], WIDE_TILE)


@gluon.jit
def wait_empty(ring, tile, SLOTS: gl.constexpr):
    """Wait until the slot of tile ``tile`` may be overwritten; return the slot."""
    tiles, _, empty = ring
    mbarrier.wait(empty.index(tile % SLOTS), (tile // SLOTS & 1) ^ 1)
    return tiles.index(tile % SLOTS)


@gluon.jit
def wait_full(ring, tile, SLOTS: gl.constexpr):
    """Wait until the slot of tile ``tile`` has been filled; return the slot."""
    tiles, full, _ = ring
    mbarrier.wait(full.index(tile % SLOTS), tile // SLOTS & 1)
    return tiles.index(tile % SLOTS)


@gluon.jit
def release(ring, tile, SLOTS: gl.constexpr):
    """Wait until all compute warps have read a tile, then release its slot to the copy warps."""
    _, _, empty = ring
    barrier()
    mbarrier.arrive(empty.index(tile % SLOTS), count=1)


@gluon.jit
def copy(slot, ring, tile, source, mask, SLOTS: gl.constexpr, AHEAD: gl.constexpr):
    """Start to fill a slot; then wait until at most AHEAD copies are in flight."""
    _, full, _ = ring
    load_async(slot, source, mask=mask)
    async_copy.mbarrier_arrive(full.index(tile % SLOTS), increment_count=False)
    async_copy.commit_group()
    async_copy.wait_group(AHEAD)


@gluon.jit
def load_reads(row):
    """Load the fields of a pass that the copy warps need."""
    return (
        field(row, OPCODE), gl.load(row + OFFSET), gl.load(row + V_OFFSET), field(row, WIDTH),
        field(row, START), field(row, UNITS), field(row, TOTAL), field(row, UNIT),
        field(row, TALL), field(row, STRIDE),
    )  # fmt: skip


@gluon.jit
def copy_kv(
    ring, tile, offset, v_offset, pid, programs, batch, pages, SHAPE: gl.constexpr,
    RING: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of K and V of an attention pass; return the index of the next tile.

    Args:
        offset, v_offset: offsets of the planes of K and V, in lines.
    """
    group = index_along(WARPS, 0, WIDE_TILE_COPY) * ROWS
    token = index_along(ROWS, 1, WIDE_TILE_COPY)
    d = index_along(MAX_DIM, 2, WIDE_TILE_COPY)
    for item in range(pid, SHAPE.B * SHAPE.KV_HEADS * SHAPE.SPLITS, programs):
        past, _, first, last = past_tiles(item, batch.lengths, SHAPE.KV_HEADS, SHAPE.SPLITS)
        sequence = item // (SHAPE.KV_HEADS * SHAPE.SPLITS)
        own_pages = batch.page_table + sequence * batch.table_stride
        head = item // SHAPE.SPLITS % SHAPE.KV_HEADS * pages.head_stride * LINE
        for number in range(first, last):
            t = number * TOKENS + group
            page = gl.load(own_pages + t // SHAPE.PAGE, mask=t < past, other=0).to(gl.int64)
            at = page * (pages.page_stride * LINE) + head + (t % SHAPE.PAGE + token) * SHAPE.DIM + d
            valid = (t + token < past) & (d < SHAPE.DIM)
            for which in gl.static_range(2):
                plane = offset if which == 0 else v_offset
                slot = wait_empty(ring, tile, RING.SLOTS)
                copy(
                    as_wide_tile(slot), ring, tile, pages.base + plane * LINE + at,
                    valid, RING.SLOTS, RING.AHEAD,
                )  # fmt: skip
                tile += 1
    return tile


@gluon.jit
def copy_tiles(
    ring, pid, programs, schedule, weights, batch, pages, SHAPE: gl.constexpr, RING: gl.constexpr
):
    """Copy warps: copy all tiles of a program, in the order in which it uses them."""
    part = index_along(PARTS, 0, TILE_COPY)
    part = part % WARPS * MAX_DIM + part // WARPS * 64  # first column of each part
    r = index_along(ROWS, 1, TILE_COPY)
    j = index_along(64, 2, TILE_COPY)
    tall_row = index_along(WARPS, 0, WIDE_TILE_COPY) * ROWS + index_along(ROWS, 1, WIDE_TILE_COPY)
    tall_column = index_along(MAX_DIM, 2, WIDE_TILE_COPY)
    tile = gl.to_tensor(0)
    # Whether to hold the fields of the next pass: the faster way for each number of sequences.
    HOLDS: gl.constexpr = SHAPE.BL > 1 and SHAPE.BL < N
    coming = load_reads(schedule.table)
    for n in range(schedule.passes):
        if HOLDS:
            fields = coming
            coming = load_reads(schedule.table + (n + 1) * FIELDS)
        else:
            fields = load_reads(schedule.table + n * FIELDS)
            prefetch(schedule.table + (n + 1) * FIELDS)
        opcode, offset, v_offset, width, start, units, total, unit, tall, stride = fields
        if opcode == ATTEND:
            tile = copy_kv(ring, tile, offset, v_offset, pid, programs, batch, pages, SHAPE, RING)
        else:
            begin, end = rows_of_program(start, units, total, unit, pid, programs)
            matrix = weights.base + offset * LINE
            matrix += begin.to(gl.int64) * (stride * VECTOR)
            if tall > 0:
                for row in range(begin, end, WARPS * ROWS):
                    for k in range(0, width * VECTOR, MAX_DIM):
                        valid = (row + tall_row < end) & (k + tall_column < width * VECTOR)
                        slot = as_wide_tile(wait_empty(ring, tile, RING.SLOTS))
                        source = matrix + (tall_row * (stride * VECTOR) + k + tall_column)
                        copy(slot, ring, tile, source, valid, RING.SLOTS, RING.TALL_AHEAD)
                        tile += 1
                    matrix += WARPS * ROWS * stride * VECTOR
                end = begin  # no rows are left for ordinary tiles
            for row in range(begin, end, ROWS):
                for k in range(0, width * VECTOR, COLUMNS):
                    column = k + part + j
                    valid = (row + r < end) & (column < width * VECTOR)
                    slot = wait_empty(ring, tile, RING.SLOTS)
                    source = matrix + (r * (stride * VECTOR) + column)
                    copy(slot, ring, tile, source, valid, RING.SLOTS, RING.AHEAD)
                    tile += 1
                matrix += ROWS * stride * VECTOR
    async_copy.wait_group(0)
