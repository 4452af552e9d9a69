# mypy: ignore-errors
# ruff: noqa: E741 - `l` as in the literature; what Triton's compiler supports
"""`windowed_decode_kernel` in Gluon, with operands in registers; see `fragments`.

A format contributes a function, in place of ATTEND::

    ATTEND(q, kv_head, begin, end, count, planes, table, scale, shared, GROUP, DIM, STRIDES)

- q: pointer to the first query head of the KV head, bf16.
- shared: address of shared memory, if the program has four warps; see `splits.shared_memory`.
- the other arguments are those of ATTEND of `windowed`; ``begin`` is a multiple of BLOCK.

It returns ``acc`` as in `splits.write_split`, and ``m`` and ``l`` as in `fragments.no_tokens`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.attention.kernels.balance import divide, head_of_tile, interval_begin
from runtime.kv.kernels.fragments import (
    NO_SCORE,
    arange_over_threads,
    as_operand,
    high_halves,
    lane_numbers,
    load16,
    low_halves,
    multiply,
    no_sum,
    no_tokens,
    scaled,
    softmax,
    token_of_value,
    warp_number,
)
from runtime.kv.kernels.splits import shared_memory, write_split
from runtime.kv.kernels.windowed import stored_tokens


@gluon.jit
def exact_scores(k, queries, lane, g, t, DIM: gl.constexpr):
    """Return the products of a page's keys and the queries, a fragment of C.

    Args:
        k: pointer to the key in slot 0 of the page, bf16.
        queries: for each 32 dimensions, words of dimensions 8 t to 8 t + 7 of query head g.
    """
    s = no_sum(lane)
    for c in gl.static_range(DIM // 32):
        x = load16(k + g * DIM + 32 * c + 8 * t)
        y = load16(k + (g + 8) * DIM + 32 * c + 8 * t)
        b = queries[c]
        s = multiply(x[0], y[0], x[1], y[1], b[0], b[1], s, False)
        s = multiply(x[2], y[2], x[3], y[3], b[2], b[3], s, False)
    return s


@gluon.jit
def add_exact_values(acc, v, b, first, end, g, t, DIM: gl.constexpr):
    """Add the products of a page's values and weights to ``acc``.

    Values of tokens from ``end`` on are replaced by 0, because unused slots may hold NaN.

    Args:
        acc: ``DIM / 16`` fragments of C: rows are dimensions, columns are heads.
        v: pointer to the value in slot 0 of the page, bf16.
        b: weights as B, bf16; see `fragments.as_operand`.
        first: index of the page's first token.
    """
    made = ()
    for c in gl.static_range(DIM // 64):
        words = ()
        for which in gl.static_range(4):
            token = token_of_value(t, which)
            loaded = load16(v + token * DIM + g * (DIM // 8) + 8 * c)
            used = first + token < end
            words = words + (
                (
                    gl.where(used, loaded[0], 0),
                    gl.where(used, loaded[1], 0),
                    gl.where(used, loaded[2], 0),
                    gl.where(used, loaded[3], 0),
                ),
            )
        for n in gl.static_range(4):
            a0 = low_halves(words[0][n], words[1][n])
            a1 = high_halves(words[0][n], words[1][n])
            a2 = low_halves(words[2][n], words[3][n])
            a3 = high_halves(words[2][n], words[3][n])
            made = made + (multiply(a0, a1, a2, a3, b[0], b[1], acc[4 * c + n], False),)
    return made


@gluon.jit
def attend_exact(
    q, end, gap, k_pages, v_pages, page_stride, head_offset, table, scale,
    GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, SINK_PAGES: gl.constexpr,
    WARPS: gl.constexpr = 1,
):  # fmt: skip
    """Attend over the full-precision tokens of one KV head, numbered without the compressed ones.

    Args:
        end: number of full-precision tokens.
        gap: number of compressed tokens, which follow the first SINK_PAGES pages.
        head_offset: elements from a page to slot 0 of the KV head.
        table: pointer to the page table of the sequence.
    """
    lane, g, t = lane_numbers(WARPS)
    warp = warp_number(WARPS)
    own = q + gl.minimum(g, GROUP - 1) * DIM
    queries = ()
    for c in gl.static_range(DIM // 32):
        queries = queries + (load16(own + 32 * c + 8 * t),)
    acc, m, l = no_tokens(lane, DIM // 16)
    for tile in range(0, end, WARPS * PAGE):
        first = tile + warp * PAGE
        known = gl.minimum(first, end - 1)  # a warp may have no page left
        index = (known + gl.where(known >= SINK_PAGES * PAGE, gap, 0)) // PAGE
        at = gl.load(table + index).to(gl.int64) * page_stride + head_offset
        s = exact_scores(k_pages + at, queries, lane, g, t, DIM)
        low = first + g < end
        high = first + g + 8 < end
        masked = (
            gl.where(low, s[0] * scale, NO_SCORE),
            gl.where(low, s[1] * scale, NO_SCORE),
            gl.where(high, s[2] * scale, NO_SCORE),
            gl.where(high, s[3] * scale, NO_SCORE),
        )
        weights, factors, m, l = softmax((masked,), m, l, 1)
        b = as_operand(weights[0], 1.0, 1.0, False)
        acc = add_exact_values(scaled(acc, factors), v_pages + at, b, first, end, g, t, DIM)
    return acc, m, l


@gluon.jit(do_not_specialize=["sequences"])
def windowed_fragments_kernel(
    q, k_pages, v_pages, page_stride, head_stride, page_table, table_stride, planes, stored_table,
    stored_stride, lengths, sequences, split_acc, split_m, split_l, scale,
    ATTEND: gl.constexpr, PARTS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr,
    SINK_PAGES: gl.constexpr, BLOCK: gl.constexpr, SEQUENCES: gl.constexpr,
    MIN_TILES: gl.constexpr, PROGRAMS: gl.constexpr, STRIDES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Attend over an interval of compressed tiles, or the full-precision tokens of one KV head.

    The arguments are those of `windowed_decode_kernel`, with bf16 ``q``.

    Args:
        ATTEND: see the head of this file.
        PARTS: number of parts of the format's ``acc``; see `splits.write_split`.
    """
    program = gl.program_id(0) - sequences * KV_HEADS
    shared = 0
    if WARPS > 1:
        shared = shared_memory(arange_over_threads(32 * WARPS, WARPS))
    if program < 0:
        index = gl.program_id(0)
        sequence = index // KV_HEADS
        length = gl.load(lengths + sequence)
        gap = stored_tokens(length, PAGE, WINDOW, SINK_PAGES)
        acc, m, l = attend_exact(
            q + index.to(gl.int64) * GROUP * DIM, length - gap, gap, k_pages, v_pages, page_stride,
            index % KV_HEADS * head_stride, page_table + sequence * table_stride, scale,
            GROUP, DIM, PAGE, SINK_PAGES, WARPS,
        )  # fmt: skip
        split = 2 * (PROGRAMS + index) + 1
        write_split(
            acc, m, l, split, split_acc, split_m, split_l, GROUP, DIM, WIDTH, 1, shared, WARPS
        )
    else:
        s = arange_over_threads(SEQUENCES, WARPS)
        all_lengths = gl.load(lengths + s, mask=s < sequences, other=0)
        tiles = gl.cdiv(stored_tokens(all_lengths, PAGE, WINDOW, SINK_PAGES), BLOCK)
        ends, programs, each, extra = divide(tiles, PROGRAMS, KV_HEADS, MIN_TILES)
        begin = interval_begin(program, each, extra)
        end = gl.where(program < programs, interval_begin(program + 1, each, extra), begin)
        tile = begin
        while tile < end:
            sequence, kv_head, head_begin, count = head_of_tile(s, tile, tiles, ends, KV_HEADS)
            stop = gl.minimum(head_begin + count, end)
            head = sequence * KV_HEADS + kv_head
            acc, m, l = ATTEND(
                q + head.to(gl.int64) * GROUP * DIM, kv_head,
                (tile - head_begin) * BLOCK, (stop - head_begin) * BLOCK,
                stored_tokens(gl.load(lengths + sequence), PAGE, WINDOW, SINK_PAGES), planes,
                stored_table + sequence * stored_stride + SINK_PAGES, scale, shared, GROUP, DIM,
                STRIDES,
            )  # fmt: skip
            of_program = program * 2 + (tile > begin).to(gl.int32)
            split = gl.where(stop - tile == count, 2 * (PROGRAMS + head), of_program)
            write_split(
                acc,
                m,
                l,
                split,
                split_acc,
                split_m,
                split_l,
                GROUP,
                DIM,
                WIDTH,
                PARTS,
                shared,
                WARPS,
            )
            tile = stop
