# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""One decode step of a few sequences as one launch: what reads every weight once.

Programs stay for the whole step and go through its stages (`stages.py`) together, a grid barrier
between any two: a launch for each would cost more than the weights of a factor pair take to read.
"""

import triton
import triton.language as tl

from runtime.kernels.decode_attention import attend_part
from runtime.kernels.stages import gate_stage, heads_stage, inner_stage, residual_stage

GROUP_FIELDS = tl.constexpr(3)
"""Before a group's segments: where V of all of them starts, how many rows it has, and K."""
INPUT_NORM, POST_NORM = tl.constexpr(0), tl.constexpr(1)
QKV, OUT = tl.constexpr(2), tl.constexpr(20)
GATE_UP, DOWN = tl.constexpr(28), tl.constexpr(41)
LAYER_FIELDS = tl.constexpr(49)
"""Of a layer's row of the table: where its norms are in ``vectors``, and its groups."""
LOGITS, EMBED = tl.constexpr(9), tl.constexpr(10)
"""Stages after the last and before the first layer; a layer has nine, from 0 on."""


@triton.jit
def grid_barrier(counter, programs):
    """All programs have come here, and see what the others wrote. ``counter`` int64 only grows."""
    tl.debug_barrier()
    ticket = tl.atomic_add(counter, 1, sem="acq_rel")
    target = (ticket // programs + 1) * programs
    seen = ticket
    while seen < target:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u64 $0, [$1];", "=l,l", [counter], tl.int64, False, 1
        )
    tl.debug_barrier()


@triton.jit
def run_stage(
    pid, programs, layer, table, weights, vectors, embedding, head, final_norm, eps,
    tokens, positions, lengths, page_table, table_stride, planes, page_stride, head_stride,
    cos, sin, hidden, inner, q, attended, gated, logits, sums, peaks, totals, arrived, scale,
    STAGE: tl.constexpr, B: tl.constexpr, HIDDEN_SIZE: tl.constexpr, GATED: tl.constexpr,
    INNER_MOST: tl.constexpr, VOCAB: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One stage of one layer, by all programs. TILES are rows and columns of weights that a
    program reads at a time, by stage."""
    row = table + layer * LAYER_FIELDS
    BN: tl.constexpr = TILES[STAGE][0]
    BK: tl.constexpr = TILES[STAGE][1]
    if STAGE == EMBED:
        for part in range(pid, B * HIDDEN_SIZE // BK + B, programs):
            i = part * BK + tl.arange(0, BK)
            inside = i < B * HIDDEN_SIZE
            token = tl.load(tokens + i // HIDDEN_SIZE, mask=inside, other=0)
            x = tl.load(embedding + token * HIDDEN_SIZE + i % HIDDEN_SIZE, mask=inside, other=0.0)
            tl.store(hidden + i, x.to(tl.float32), mask=inside)
    elif STAGE == 0 or STAGE == 5:  # V of q, k and v, or of gate and up
        group = row + (QKV if STAGE == 0 else GATE_UP)
        norm = vectors + tl.load(row + (INPUT_NORM if STAGE == 0 else POST_NORM))
        inner_stage(
            pid, programs, weights, tl.load(group), tl.load(group + 1).to(tl.int32), HIDDEN_SIZE,
            hidden, HIDDEN_SIZE, norm, eps, inner, INNER_MOST, B, BN, BK, True,
        )  # fmt: skip
    elif STAGE == 1:
        k_pages = tl.load(planes + 2 * layer).to(tl.pointer_type(tl.bfloat16))
        v_pages = tl.load(planes + 2 * layer + 1).to(tl.pointer_type(tl.bfloat16))
        heads_stage(
            pid, programs, weights, row + QKV + GROUP_FIELDS, vectors, hidden, HIDDEN_SIZE, inner,
            INNER_MOST, vectors + tl.load(row + INPUT_NORM), eps, cos, sin, positions, page_table,
            table_stride, q, k_pages, v_pages, page_stride, head_stride, HEADS, KV_HEADS, DIM,
            PAGE, B, BN, BK,
        )  # fmt: skip
    elif STAGE == 2:
        k_pages = tl.load(planes + 2 * layer).to(tl.pointer_type(tl.bfloat16))
        v_pages = tl.load(planes + 2 * layer + 1).to(tl.pointer_type(tl.bfloat16))
        for part in range(pid, B * KV_HEADS * SPLITS, programs):
            attend_part(
                part // (KV_HEADS * SPLITS), part // SPLITS % KV_HEADS, part % SPLITS, q, k_pages,
                v_pages, page_stride, head_stride, page_table, table_stride, lengths, sums, peaks,
                totals, arrived, attended, scale, KV_HEADS, HEADS // KV_HEADS, ROWS, DIM, WIDTH,
                PAGE, BLOCK, SPLITS,
            )  # fmt: skip
    elif STAGE == 3 or STAGE == 7:  # V of o, or of down
        group = row + (OUT if STAGE == 3 else DOWN)
        K: tl.constexpr = HEADS * DIM if STAGE == 3 else GATED
        inner_stage(
            pid, programs, weights, tl.load(group), tl.load(group + 1).to(tl.int32), K,
            attended if STAGE == 3 else gated, K, vectors, eps, inner, INNER_MOST, B, BN, BK,
            False,
        )  # fmt: skip
    elif STAGE == 4 or STAGE == 8:
        group = row + (OUT if STAGE == 4 else DOWN)
        residual_stage(
            pid, programs, weights, group + GROUP_FIELDS, HIDDEN_SIZE, vectors,
            attended if STAGE == 4 else gated, HEADS * DIM if STAGE == 4 else GATED, inner,
            INNER_MOST, hidden, B, BN, BK,
        )  # fmt: skip
    elif STAGE == 6:
        gate_stage(
            pid, programs, weights, row + GATE_UP + GROUP_FIELDS, GATED, vectors, hidden,
            HIDDEN_SIZE, inner, INNER_MOST, vectors + tl.load(row + POST_NORM), eps, gated, B, BN,
            BK,
        )  # fmt: skip
    else:
        inner_stage(
            pid, programs, head, 0, VOCAB, HIDDEN_SIZE, hidden, HIDDEN_SIZE, final_norm, eps,
            logits, VOCAB, B, BN, BK, True,
        )  # fmt: skip


@triton.jit
def stage_kernel(
    layer, table, weights, vectors, embedding, head, final_norm, eps,
    tokens, positions, lengths, page_table, table_stride, planes, page_stride, head_stride,
    cos, sin, hidden, inner, q, attended, gated, logits, sums, peaks, totals, arrived, scale,
    STAGE: tl.constexpr, B: tl.constexpr, HIDDEN_SIZE: tl.constexpr, GATED: tl.constexpr,
    INNER_MOST: tl.constexpr, VOCAB: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One stage as a launch of its own, for a device without a grid barrier: the interpreter."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    run_stage(
        pid, programs, layer, table, weights, vectors, embedding, head, final_norm, eps, tokens,
        positions, lengths, page_table, table_stride, planes, page_stride, head_stride, cos, sin,
        hidden, inner, q, attended, gated, logits, sums, peaks, totals, arrived, scale, STAGE, B,
        HIDDEN_SIZE, GATED, INNER_MOST, VOCAB, HEADS, KV_HEADS, DIM, PAGE, TILES, BLOCK, SPLITS,
        ROWS, WIDTH,
    )  # fmt: skip


@triton.jit
def step_kernel(
    counter, layers, table, weights, vectors, embedding, head, final_norm, eps,
    tokens, positions, lengths, page_table, table_stride, planes, page_stride, head_stride,
    cos, sin, hidden, inner, q, attended, gated, logits, sums, peaks, totals, arrived, scale,
    B: tl.constexpr, HIDDEN_SIZE: tl.constexpr, GATED: tl.constexpr,
    INNER_MOST: tl.constexpr, VOCAB: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The whole step. All programs must run at the same time: a cooperative launch.

    Args:
        counter: int64, see `grid_barrier`.
        table: int64 `[layers, LAYER_FIELDS]`.
        planes: int64 `[2 * layers]`, addresses of K and V.
        hidden, gated, attended, logits: fp32 `[B, …]`; ``inner`` fp32 `[B, INNER_MOST]`.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    run_stage(
        pid, programs, 0, table, weights, vectors, embedding, head, final_norm, eps, tokens,
        positions, lengths, page_table, table_stride, planes, page_stride, head_stride, cos, sin,
        hidden, inner, q, attended, gated, logits, sums, peaks, totals, arrived, scale, EMBED, B,
        HIDDEN_SIZE, GATED, INNER_MOST, VOCAB, HEADS, KV_HEADS, DIM, PAGE, TILES, BLOCK, SPLITS,
        ROWS, WIDTH,
    )  # fmt: skip
    grid_barrier(counter, programs)
    for layer in range(layers):
        row = table + layer * LAYER_FIELDS
        for stage in tl.static_range(9):
            if stage == 0:
                wanted = tl.load(row + QKV + 1) > 0
            elif stage == 3:
                wanted = tl.load(row + OUT + 1) > 0
            elif stage == 5:
                wanted = tl.load(row + GATE_UP + 1) > 0
            elif stage == 7:
                wanted = tl.load(row + DOWN + 1) > 0
            else:
                wanted = True
            if wanted:
                run_stage(
                    pid, programs, layer, table, weights, vectors, embedding, head, final_norm,
                    eps, tokens, positions, lengths, page_table, table_stride, planes,
                    page_stride, head_stride, cos, sin, hidden, inner, q, attended, gated, logits,
                    sums, peaks, totals, arrived, scale, stage, B, HIDDEN_SIZE, GATED, INNER_MOST,
                    VOCAB, HEADS, KV_HEADS, DIM, PAGE, TILES, BLOCK, SPLITS, ROWS, WIDTH,
                )  # fmt: skip
                grid_barrier(counter, programs)
    run_stage(
        pid, programs, 0, table, weights, vectors, embedding, head, final_norm, eps, tokens,
        positions, lengths, page_table, table_stride, planes, page_stride, head_stride, cos, sin,
        hidden, inner, q, attended, gated, logits, sums, peaks, totals, arrived, scale, LOGITS, B,
        HIDDEN_SIZE, GATED, INNER_MOST, VOCAB, HEADS, KV_HEADS, DIM, PAGE, TILES, BLOCK, SPLITS,
        ROWS, WIDTH,
    )  # fmt: skip
