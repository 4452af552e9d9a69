# mypy: ignore-errors
"""What a step's list says of a pass: a row of `FIELDS` numbers.

A pass is a matrix, of which every program multiplies its share of the rows, or the attention of a
layer. Offsets are counted in lines of 64 elements, widths, strides and sources in eights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.megakernel.kernels.layouts import LEAST, TOKENS

FIELDS = gl.constexpr(17)
"""Of a pass."""
KIND, STAGE, AFTER = (gl.constexpr(n) for n in range(3))
OFFSET, OTHER, WIDTH = (gl.constexpr(n) for n in range(3, 6))
START, UNITS, TOTAL, UNIT = (gl.constexpr(n) for n in range(6, 10))
SOURCE, TARGET, BIAS, NORM, NORMED, TALL, STRIDE = (gl.constexpr(n) for n in range(10, 17))
ATTEND, QUERY, KEY, VALUE = (gl.constexpr(n) for n in range(4))
INNER, RESIDUAL, GATE, UP, LOGITS = (gl.constexpr(n) for n in range(4, 9))
"""What is done with the product."""


@gluon.jit
def share(start, units, total, unit, pid, programs):
    """The rows of a pass that are this program's: the first, and after the last."""
    first = gl.maximum(total * pid // programs - start, 0)
    last = gl.minimum(total * (pid + 1) // programs - start, units)
    return first * unit, last * unit


@gluon.jit
def past_tiles(item, lengths, KV_HEADS: gl.constexpr, SPLITS: gl.constexpr):
    """What a sequence had before this step: tokens, the parts in which they are attended, and this
    part's tiles of them, the first and after the last. A short sequence has fewer parts: what they
    find has a long way."""
    past = gl.load(lengths + item // (KV_HEADS * SPLITS)) - 1
    tiles = (past + TOKENS - 1) // TOKENS
    parts = gl.minimum(SPLITS, gl.maximum(1, (tiles + LEAST - 1) // LEAST))
    split = gl.minimum(item % SPLITS, parts)
    return past, parts, tiles * split // parts, tiles * gl.minimum(split + 1, parts) // parts
