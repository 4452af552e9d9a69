# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""One decode step of a few sequences as one launch: what reads every weight once.

Programs stay for the whole step and go through its stages together, a grid barrier between any two:
a launch for each would cost more than the weights of a factor pair take to read. In a stage each
program has whole rows of a product, spread evenly, so that nothing but finished numbers is shared.

A stage's weights `[rows, K]` are bf16 in one buffer, rows padded with zeros to multiples of eight
elements; activations are fp32. `runtime/decode_step.py` lays them out.
"""

import triton
import triton.language as tl

from runtime.kernels.decode_attention import attend_part

SEGMENT = tl.constexpr(5)
"""Fields of a segment: where its weights start, K, which input it has, where in it, its bias."""
HIDDEN, INNER = tl.constexpr(0), tl.constexpr(1)
"""A segment's input: what the group's first product reads, or what that wrote."""


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
def root_scale(source, K, eps, BK: tl.constexpr):
    """1 / rms of a vector of K."""
    squares = tl.zeros((BK,), tl.float32)
    for k in range(0, K, BK):
        j = k + tl.arange(0, BK)
        x = tl.load(source + j, mask=j < K, other=0.0)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def inputs(source, norm, scale, k, K, BK: tl.constexpr, NORM: tl.constexpr):
    """BK elements of a stage's input from number k on, normed if it is."""
    j = k + tl.arange(0, BK)
    x = tl.load(source + j, mask=j < K, other=0.0)
    if NORM:
        x = x * scale * tl.load(norm + j, mask=j < K, other=0.0)
    return x


@triton.jit
def row_sums(weights, at, row, rows, k, width, x, BK: tl.constexpr):
    """What columns from k on add to some rows' products with ``x``; a row is ``width`` wide.

    The compiler is told here, where the numbers are made, that eight elements are one access.
    """
    j = k + tl.arange(0, BK)
    start = tl.multiple_of(at + row.to(tl.int64) * width, 8)
    inside = (row < rows)[:, None] & (j < width)[None, :]
    w = tl.load(weights + start[:, None] + j[None, :], mask=inside, other=0.0)
    return tl.sum(w.to(tl.float32) * x[None, :], axis=1)


@triton.jit
def product_of(
    weights, at, row, rows, K, source, norm, scale,
    BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """fp32 `[BN]`: some rows of a product."""
    y = tl.zeros((BN,), tl.float32)
    width = (K + 7) // 8 * 8
    for k in range(0, width, BK):
        x = inputs(source, norm, scale, k, K, BK, NORM)
        y += row_sums(weights, at, row, rows, k, width, x, BK)
    return y


@triton.jit
def segment_of(segments, number, hidden, inner):
    """A segment's weights, K, input and bias (or none: below zero)."""
    fields = segments + number * SEGMENT
    at = tl.load(fields)
    K = tl.load(fields + 1).to(tl.int32)
    kind = tl.load(fields + 2)
    offset = tl.load(fields + 3)
    source = tl.where(kind == INNER, inner + offset, hidden)
    return at, K, source, kind, tl.load(fields + 4)


@triton.jit
def segment_rows(
    weights, segments, number, row, rows, hidden, inner, norm, scale, vectors,
    BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Some rows of a segment, its bias added."""
    at, K, source, kind, bias = segment_of(segments, number, hidden, inner)
    if kind == HIDDEN:
        y = product_of(weights, at, row, rows, K, source, norm, scale, BN, BK, NORM)
    else:
        y = product_of(weights, at, row, rows, K, source, norm, scale, BN, BK, False)
    if bias >= 0:
        y += tl.load(vectors + bias + row, mask=row < rows, other=0.0)
    return y


@triton.jit
def inner_stage(
    pid, programs, weights, at, rows, K, hidden, hidden_stride, norm, eps, target, target_stride,
    B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``target`` `[B, rows]` = one matrix times the inputs: V of a group, or the head."""
    for b in range(B):
        source = hidden + b * hidden_stride
        scale = 0.0
        if NORM:
            scale = root_scale(source, K, eps, BK)
        for group in range(pid, (rows + BN - 1) // BN, programs):
            row = group * BN + tl.arange(0, BN)
            y = product_of(weights, at, row, rows, K, source, norm, scale, BN, BK, NORM)
            tl.store(target + b * target_stride + row, y, mask=row < rows)


@triton.jit
def residual_stage(
    pid, programs, weights, segments, rows, vectors, hidden, hidden_stride, inner, inner_stride,
    target, B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds a projection to the residual stream ``target`` `[B, rows]`: o and down."""
    for group in range(pid, (rows + BN - 1) // BN, programs):
        row = group * BN + tl.arange(0, BN)
        for b in range(B):
            y = segment_rows(
                weights, segments, 0, row, rows, hidden + b * hidden_stride,
                inner + b * inner_stride, vectors, 0.0, vectors, BN, BK, False,
            )  # fmt: skip
            place = target + b * rows + row
            y += tl.load(place, mask=row < rows, other=0.0)
            tl.store(place, y, mask=row < rows)


@triton.jit
def gate_stage(
    pid, programs, weights, segments, rows, vectors, hidden, K, inner, inner_stride, norm, eps,
    target, B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``target`` `[B, rows]` = silu(gate) * up."""
    for b in range(B):
        source = hidden + b * K
        scale = root_scale(source, K, eps, BK)
        for group in range(pid, (rows + BN - 1) // BN, programs):
            row = group * BN + tl.arange(0, BN)
            gate = segment_rows(
                weights, segments, 0, row, rows, source, inner + b * inner_stride, norm, scale,
                vectors, BN, BK, True,
            )  # fmt: skip
            up = segment_rows(
                weights, segments, 1, row, rows, source, inner + b * inner_stride, norm, scale,
                vectors, BN, BK, True,
            )  # fmt: skip
            y = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(target + b * rows + row, y, mask=row < rows)


@triton.jit
def heads_stage(
    pid, programs, weights, segments, vectors, hidden, K, inner, inner_stride, norm, eps,
    cos, sin, positions, page_table, table_stride, q, k_pages, v_pages, page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """q after RoPE, `[B, HEADS, DIM]`; k after RoPE and v into the pages.

    A group is BN rows of the first half of a head and their partners in the second.
    """
    HALF: tl.constexpr = DIM // 2
    EACH: tl.constexpr = (HALF + BN - 1) // BN
    for b in range(B):
        source = hidden + b * K
        scale = root_scale(source, K, eps, BK)
        position = tl.load(positions + b)
        page = tl.load(page_table + b * table_stride + position // PAGE).to(tl.int64)
        slot = page * page_stride + (position % PAGE) * DIM
        for group in range(pid, (HEADS + 2 * KV_HEADS) * EACH, programs):
            head = group // EACH
            d = group % EACH * BN + tl.arange(0, BN)
            number = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
            own = head - tl.where(number == 0, 0, tl.where(number == 1, HEADS, HEADS + KV_HEADS))
            last = own * DIM + HALF
            first = segment_rows(
                weights, segments, number, own * DIM + d, last, source, inner + b * inner_stride,
                norm, scale, vectors, BN, BK, True,
            )  # fmt: skip
            second = segment_rows(
                weights, segments, number, last + d, last + HALF, source,
                inner + b * inner_stride, norm, scale, vectors, BN, BK, True,
            )  # fmt: skip
            here = d < HALF
            if number < 2:
                c = tl.load(cos + position * HALF + d, mask=here, other=0.0)
                s = tl.load(sin + position * HALF + d, mask=here, other=0.0)
                turned = first * c - second * s
                second = second * c + first * s
                first = turned
            if number == 0:
                place = q + (b * HEADS + own) * DIM + d
                kind = q.dtype.element_ty
                tl.store(place, first.to(kind), mask=here)
                tl.store(place + HALF, second.to(kind), mask=here)
            else:
                at = slot + own * head_stride + d
                if number == 1:
                    tl.store(k_pages + at, first.to(tl.bfloat16), mask=here)
                    tl.store(k_pages + at + HALF, second.to(tl.bfloat16), mask=here)
                else:
                    tl.store(v_pages + at, first.to(tl.bfloat16), mask=here)
                    tl.store(v_pages + at + HALF, second.to(tl.bfloat16), mask=here)


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
