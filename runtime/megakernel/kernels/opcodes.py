# mypy: ignore-errors
"""The pass table: a row of FIELDS int64 numbers for each pass of a step.

A pass multiplies one matrix, whose rows are divided among all programs, or computes the attention
of one layer; it is not a forward pass. `schedule.Pass` documents each field.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.megakernel.kernels.layouts import MIN_SPLIT_TILES, TOKENS

FIELDS = gl.constexpr(17)
"""Fields per row."""
OPCODE, STAGE, AFTER = (gl.constexpr(n) for n in range(3))
OFFSET, V_OFFSET, WIDTH = (gl.constexpr(n) for n in range(3, 6))
START, UNITS, TOTAL, UNIT = (gl.constexpr(n) for n in range(6, 10))
SOURCE, TARGET, BIAS, NORM, NORMED, TALL, STRIDE = (gl.constexpr(n) for n in range(10, 17))
"""Column numbers of the fields."""
ATTEND, QUERY, KEY, VALUE = (gl.constexpr(n) for n in range(4))
INNER, RESIDUAL, GATE, UP, LOGITS = (gl.constexpr(n) for n in range(4, 9))
"""Opcodes: attention, or the epilogue of a matmul."""
SCATTER, PARTIAL, SUM_INNER, SUM_RESIDUAL = (gl.constexpr(n) for n in range(9, 13))
"""Opcodes of several ranks. PARTIAL: a matmul whose outputs are addends for all ranks. SCATTER: a
matmul whose outputs are addends for the rank that computes the row of the residual stream.
SUM_INNER, SUM_RESIDUAL: no matmul, but the sum of these addends. The first sends the sums to the
programs of this rank, the second has the epilogue of RESIDUAL."""


EMBEDDED = gl.constexpr(4)
"""Group of `arguments.Ranks.partials` that has the embedding."""


@gluon.jit
def field(row, column):
    """Return a field of a pass that fits into 32 bits, as all but offsets and targets do.

    Only its low word is loaded, because a thread holds the fields of two passes.
    """
    words = row.to(gl.pointer_type(gl.int32), bitcast=True)
    return gl.load(words + 2 * column)


@gluon.jit
def prefetch(row):
    """Load a pass into the L1 cache.

    This takes fewer registers than its fields do, but a pass then begins with loads from the cache.
    """
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; prefetch.global.L1 [$1 + 128]; mov.b32 $0, 0;", "=r,l", [row],
        gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def is_residual(opcode, SHAPE: gl.constexpr):
    """Return whether a pass adds to the residual stream."""
    found = opcode == RESIDUAL
    if SHAPE.RANKS > 1:
        found = found | (opcode == SUM_RESIDUAL)
    return found


@gluon.jit
def rows_of_program(start, units, total, unit, pid, programs):
    """Return the begin and end (exclusive) of a program's rows of a matrix.

    Several matrices may be divided among the programs together. Their units, of ``unit`` rows each,
    are numbered consecutively, and each program gets the same number of units.

    Args:
        start, units: first unit and number of units of this matrix.
        total: number of units of all these matrices.
        pid, programs: index of the program, and number of programs.
    """
    first = gl.maximum(total * pid // programs - start, 0)
    last = gl.minimum(total * (pid + 1) // programs - start, units)
    return first * unit, last * unit


@gluon.jit
def past_tiles(item, lengths, KV_HEADS: gl.constexpr, SPLITS: gl.constexpr):
    """Divide the past of a sequence among splits.

    Short sequences have fewer splits, because messages between programs are slow.

    Args:
        item: `(sequence * KV_HEADS + kv_head) * SPLITS + split`.

    Returns:
        Number of tokens before this step; number of splits in use; begin and end (exclusive) of
        this split's range of tiles, which have TOKENS tokens each.
    """
    past = gl.load(lengths + item // (KV_HEADS * SPLITS)) - 1
    tiles = (past + TOKENS - 1) // TOKENS
    splits = gl.minimum(SPLITS, gl.maximum(1, (tiles + MIN_SPLIT_TILES - 1) // MIN_SPLIT_TILES))
    split = gl.minimum(item % SPLITS, splits)
    return past, splits, tiles * split // splits, tiles * gl.minimum(split + 1, splits) // splits
