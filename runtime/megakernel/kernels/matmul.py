# mypy: ignore-errors
"""Matmuls of weight tiles, and the epilogues of the output rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from runtime.kernels.arith import LINE
from runtime.kernels.compat import barrier
from runtime.megakernel.kernels.layouts import (
    LHS,
    ROWS,
    WARPS,
    N,
    output_layout,
    warp_sums_layout,
)
from runtime.megakernel.kernels.messages import (
    send_bf16,
    send_gathered,
    send_partial,
    send_residual,
    send_to_owner,
    sum_partials,
)
from runtime.megakernel.kernels.opcodes import (
    GATE,
    INNER,
    PARTIAL,
    QUERY,
    SCATTER,
    SUM_INNER,
    UP,
    VALUE,
    is_residual,
)
from runtime.megakernel.kernels.ring import release, wait_full


@gluon.jit
def multiply_tile(ring, tile, x, acc, SLOTS: gl.constexpr):
    """Return ``acc + tile @ x`` for each part of 64 columns.

    Args:
        x: bf16 `[PARTS, 64, N]`.
        acc: fp32 `[PARTS, ROWS, N]`.
    """
    weights = wait_full(ring, tile, SLOTS).load(LHS)  # [PARTS, ROWS, 64]
    release(ring, tile, SLOTS)
    return mma_v2(weights, x, acc)


@gluon.jit
def sum_parts(acc, sums):
    """Sum `[PARTS, ROWS, N]` over the parts: within a warp, then over warps in shared memory.

    Args:
        sums: shared memory, fp32 `[WARPS, ROWS, N]`.

    Returns:
        `[ROWS, N]`, the same in every warp.
    """
    layout: gl.constexpr = warp_sums_layout()
    sums.store(gl.sum(acc.reshape([2, WARPS, ROWS, N]), axis=0))
    return gl.sum(sums.load(layout), axis=0)


@gluon.jit
def sum_of_ranks(ranks, group, row, last, flag, R: gl.constexpr, SHAPE: gl.constexpr):
    """Receive R rows that all ranks have sent with `send_partial`, and return their sums.

    Args:
        group: see `arguments.Ranks.partials`.
        row, last: first row, and end (exclusive) of the rows that were sent.

    Returns:
        fp32 `[R, N]`, 0 in rows from ``last`` on.
    """
    layout: gl.constexpr = output_layout(R)
    r = row + gl.expand_dims(gl.arange(0, R, gl.SliceLayout(1, layout)), 1)
    b = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, layout)), 0)
    return sum_partials(ranks, group, b, r, flag, (r < last) & (b < SHAPE.B), 4, SHAPE)


@gluon.jit
def apply_rope(y, c, s):
    """Apply RoPE to rows `[rows, N]` and round to bf16.

    Args:
        y: fp32 `[rows, N]`, rows in the order of `gemm.weights.by_halves`.
        c, s: cosines and sines, fp32 `[rows, N]`.
    """
    blocks: gl.constexpr = y.shape[0] // 16
    sequences: gl.constexpr = y.shape[1]
    first, second = gl.split(y.reshape([blocks, 2, 8, sequences]).permute([0, 2, 3, 1]))
    cos, _ = gl.split(c.reshape([blocks, 2, 8, sequences]).permute([0, 2, 3, 1]))
    sin, _ = gl.split(s.reshape([blocks, 2, 8, sequences]).permute([0, 2, 3, 1]))
    both = gl.join(first * cos - second * sin, second * cos + first * sin)
    both = both.permute([0, 3, 1, 2]).reshape([16 * blocks, sequences])
    return gl.convert_layout(both, y.type.layout).to(gl.bfloat16)


@gluon.jit
def load_operands(
    opcode, row, last, bias, norm, weights, batch, rope, buffers, R: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Load the operands of the epilogue of R rows, before the matmul is computed.

    Returns:
        Three tensors, fp32 `[R, N]`. The third has the biases. The first two depend on the opcode:
        cosines and sines for q, k and v; the residual stream and the next norm's weights for
        RESIDUAL; the gate's outputs and zeros for UP; zeros for other opcodes.
    """
    layout: gl.constexpr = output_layout(R)
    DIM: gl.constexpr = SHAPE.DIM
    r = row + gl.expand_dims(gl.arange(0, R, gl.SliceLayout(1, layout)), 1)
    b = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, layout)), 0)
    one = gl.zeros([R, N], gl.float32, layout)
    two = gl.zeros([R, N], gl.float32, layout)
    added = gl.zeros([R, N], gl.float32, layout)
    i = r
    inside = (r < last) & (b < SHAPE.B)
    if opcode <= VALUE:
        # Rows n and n + 8 of 16 are partners in RoPE.
        d = r % DIM // 16 * 8 + r % 8
        i = r // DIM * DIM + d + r % 16 // 8 * (DIM // 2)
        angle = gl.load(batch.positions + b, mask=b < SHAPE.B, other=0) * (DIM // 2) + d
        one = gl.load(rope.cos + angle, mask=inside & (opcode < VALUE), other=1.0)
        two = gl.load(rope.sin + angle, mask=inside & (opcode < VALUE), other=0.0)
    elif is_residual(opcode, SHAPE):
        one = gl.load(buffers.hidden + b * SHAPE.HIDDEN + r, mask=inside, other=0.0)
        two = gl.load(weights.vectors + norm + r, mask=r < last, other=0.0) + two
    elif opcode == UP:
        barrier()  # the gate's outputs may have been stored by another thread
        one = gl.load(buffers.gates + b * SHAPE.GATED + r, mask=inside, other=0.0)
    if bias >= 0:
        added = gl.load(weights.vectors + bias + i, mask=inside, other=0.0)
    return one, two, added


@gluon.jit
def run_epilogue(
    y, one, two, opcode, row, last, target, flag, batch, pages, messages, buffers, ranks,
    query_offset, SHAPE: gl.constexpr,
):  # fmt: skip
    """Apply the epilogue of a pass to output rows, and store or send the result.

    Args:
        y: fp32 `[R, N]`, biases added.
        one, two: the first two results of `load_operands`.
        target: offset of the output, see `schedule.Pass`.

    Returns:
        fp32 `[N]`. For RESIDUAL, the sum of squares of these rows of the new residual stream; 0 for
        other opcodes.
    """
    R: gl.constexpr = y.shape[0]
    layout: gl.constexpr = y.type.layout
    DIM: gl.constexpr = SHAPE.DIM
    PAGE: gl.constexpr = SHAPE.PAGE
    r = row + gl.expand_dims(gl.arange(0, R, gl.SliceLayout(1, layout)), 1)
    b = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, layout)), 0)
    inside = (r < last) & (b < SHAPE.B)
    own = messages.activations + b * messages.stride
    square = gl.zeros([N], gl.float32, gl.SliceLayout(0, layout))
    if opcode <= VALUE:
        rotated = apply_rope(y, one, two)  # V has cosine 1 and sine 0
        dim = r % DIM // 16 * 8 + r % 8 + r % 16 // 8 * (DIM // 2)
        at = query_offset + r // DIM * DIM + dim
        if opcode != QUERY:
            at += (SHAPE.HEADS + gl.where(opcode == VALUE, SHAPE.KV_HEADS, 0)) * DIM
            index = gl.load(batch.lengths + b, mask=b < SHAPE.B, other=1) - 1
            page = gl.load(
                batch.page_table + b * batch.table_stride + index // PAGE,
                mask=b < SHAPE.B, other=0,
            )  # fmt: skip
            slot = page.to(gl.int64) * (pages.page_stride * LINE) + index % PAGE * DIM
            place = target * LINE + r // DIM * (pages.head_stride * LINE) + dim
            gl.store(pages.base + slot + place, rotated, mask=inside)
        send_bf16(own + at, rotated, flag, inside)
    elif opcode == INNER:
        if SHAPE.RANKS > 1:
            send_gathered(ranks, b * messages.stride + target + r, y, flag, inside, SHAPE)
        else:
            send_bf16(own + target + r, y, flag, inside)
    elif opcode == GATE:
        gl.store(buffers.gates + b * SHAPE.GATED + r, y, mask=inside)
    elif opcode == UP:
        send_bf16(own + target + r, one / (1.0 + gl.exp(-one)) * y, flag, inside)
    elif is_residual(opcode, SHAPE):
        h = one + y
        gl.store(buffers.hidden + b * SHAPE.HIDDEN + r, h, mask=inside)
        send_residual(messages, ranks, b, target, r, h * two, flag, inside, SHAPE)
        square = gl.sum(gl.where(inside, h * h, 0.0), axis=0)
    elif SHAPE.RANKS == 1:
        gl.store(buffers.logits + b.to(gl.int64) * SHAPE.VOCAB + r, y, mask=inside)
    elif opcode == PARTIAL:
        send_partial(ranks, target, ranks.rank, b, r, y, flag, inside, SHAPE)
    elif opcode == SCATTER:
        if SHAPE.HEIGHT > 0:
            send_to_owner(ranks, target, b, r, y, flag, inside, SHAPE)
    elif opcode == SUM_INNER:
        send_bf16(own + target + r, y, flag, inside)
    else:
        gl.store(buffers.logits + b.to(gl.int64) * SHAPE.VOCAB + r, y, mask=inside)
    return square
