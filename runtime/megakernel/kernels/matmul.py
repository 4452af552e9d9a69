# mypy: ignore-errors
"""Rows of a product: what they are put together with, and where they go."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from runtime.kernels.compat import barrier
from runtime.megakernel.kernels.layouts import LEFT, LINE, ROWS, WARPS, N, finished, of_warps
from runtime.megakernel.kernels.messages import send_input
from runtime.megakernel.kernels.opcodes import GATE, INNER, QUERY, RESIDUAL, UP, VALUE
from runtime.megakernel.kernels.ring import full_slot, give_back


@gluon.jit
def multiply(ring, full, empty, tile, x, y, SLOTS: gl.constexpr):
    weights = full_slot(ring, full, tile, SLOTS).load(LEFT)
    give_back(empty, tile, SLOTS)
    return mma_v2(weights, x, y)


@gluon.jit
def added_up(y, sums):
    """The parts of a product, `[PARTS, 16, n]`, together."""
    layout: gl.constexpr = of_warps()
    sums.store(gl.sum(y.reshape([2, WARPS, ROWS, N]), axis=0))
    return gl.sum(sums.load(layout), axis=0)


@gluon.jit
def turn(y, c, s):
    """RoPE of rows of a head: eight, and their partners, and so on. bf16, as pages have it."""
    blocks: gl.constexpr = y.shape[0] // 16
    sequences: gl.constexpr = y.shape[1]
    first, second = gl.split(y.reshape([blocks, 2, 8, sequences]).permute([0, 2, 3, 1]))
    cos, _ = gl.split(c.reshape([blocks, 2, 8, sequences]).permute([0, 2, 3, 1]))
    sin, _ = gl.split(s.reshape([blocks, 2, 8, sequences]).permute([0, 2, 3, 1]))
    both = gl.join(first * cos - second * sin, second * cos + first * sin)
    both = both.permute([0, 3, 1, 2]).reshape([16 * blocks, sequences])
    return gl.convert_layout(both, y.type.layout).to(gl.bfloat16)


@gluon.jit
def wanted(
    kind, row, last, bias, norm, vectors, hidden, gates, cos, sin, positions,
    R: gl.constexpr, B: gl.constexpr, HIDDEN: gl.constexpr,
    GATED: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """What R rows of a product will be put together with, asked for before they are computed."""
    layout: gl.constexpr = finished(R)
    r = row + gl.expand_dims(gl.arange(0, R, gl.SliceLayout(1, layout)), 1)
    b = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, layout)), 0)
    one = gl.zeros([R, N], gl.float32, layout)
    two = gl.zeros([R, N], gl.float32, layout)
    added = gl.zeros([R, N], gl.float32, layout)
    i = r
    inside = (r < last) & (b < B)
    if kind <= VALUE:
        # Rows n and n + 8 of 16 are partners in RoPE.
        d = r % DIM // 16 * 8 + r % 8
        i = r // DIM * DIM + d + r % 16 // 8 * (DIM // 2)
        angle = gl.load(positions + b, mask=b < B, other=0) * (DIM // 2) + d
        one = gl.load(cos + angle, mask=inside & (kind < VALUE), other=1.0)
        two = gl.load(sin + angle, mask=inside & (kind < VALUE), other=0.0)
    elif kind == RESIDUAL:
        one = gl.load(hidden + b * HIDDEN + r, mask=inside, other=0.0)
        two = gl.load(vectors + norm + r, mask=r < last, other=0.0) + two
    elif kind == UP:
        barrier()  # another thread may have stored it
        one = gl.load(gates + b * GATED + r, mask=inside, other=0.0)
    if bias >= 0:
        added = gl.load(vectors + bias + i, mask=inside, other=0.0)
    return one, two, added


@gluon.jit
def finish(
    y, one, two, kind, row, last, target, epoch, words, word_stride, hidden, gates, logits, pages,
    page_stride, head_stride, page_table, table_stride, positions, query_at,
    B: gl.constexpr, HIDDEN: gl.constexpr, GATED: gl.constexpr, VOCAB: gl.constexpr,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """What is done with some rows of a product; and the sum of their squares, if residual."""
    R: gl.constexpr = y.shape[0]
    layout: gl.constexpr = y.type.layout
    r = row + gl.expand_dims(gl.arange(0, R, gl.SliceLayout(1, layout)), 1)
    b = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, layout)), 0)
    inside = (r < last) & (b < B)
    own = words + b * word_stride
    square = gl.zeros([N], gl.float32, gl.SliceLayout(0, layout))
    if kind <= VALUE:
        turned = turn(y, one, two)
        dim = r % DIM // 16 * 8 + r % 8 + r % 16 // 8 * (DIM // 2)
        at = query_at + r // DIM * DIM + dim
        if kind != QUERY:
            at += (HEADS + gl.where(kind == VALUE, KV_HEADS, 0)) * DIM
            position = gl.load(positions + b, mask=b < B, other=0)
            page = gl.load(page_table + b * table_stride + position // PAGE, mask=b < B, other=0)
            slot = page.to(gl.int64) * (page_stride * LINE) + position % PAGE * DIM
            place = target.to(gl.int64) * LINE + r // DIM * (head_stride * LINE) + dim
            gl.store(pages + slot + place, turned, mask=inside)
        send_input(own + at, turned, epoch, inside)
    elif kind == INNER:
        send_input(own + target + r, y, epoch, inside)
    elif kind == GATE:
        gl.store(gates + b * GATED + r, y, mask=inside)
    elif kind == UP:
        send_input(own + target + r, one / (1.0 + gl.exp(-one)) * y, epoch, inside)
    elif kind == RESIDUAL:
        h = one + y
        gl.store(hidden + b * HIDDEN + r, h, mask=inside)
        send_input(own + r, h * two, epoch, inside)
        square = gl.sum(gl.where(inside, h * h, 0.0), axis=0)
    else:
        gl.store(logits + b.to(gl.int64) * VOCAB + r, y, mask=inside)
    return square
