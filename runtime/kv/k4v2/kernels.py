# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

"""Encoding and attention of the format `k4v2` in Triton; see its README for the maths."""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import no_keys
from runtime.kernels.arith import INTERPRETED, matmul
from runtime.kv.int4.kernels import int4_scores, transformed_queries, write_int4
from runtime.kv.kernels.encode import plane_rows, tiles_at
from runtime.kv.kernels.transforms import (
    INFINITE,
    bf16_nan,
    bf16_pair,
    byte_pairs_at,
    hadamard,
    hadamard_tiles,
    halves,
    interleaved,
    joined,
    magnitude_bits,
    round_to_bf16,
    sum_by_halves,
    widened,
    words_at,
)
from runtime.kv.kernels.windowed import rows_at, transposed_softmax_step
from runtime.kv.two_bits import STEP

EDGE = tl.constexpr(STEP)
UNIT = tl.constexpr(STEP / 2)
"""Factor from ``2 c - 3`` to the level of code c."""


@triton.jit
def write_values(
    y, page, row, packed, norms, STRIDE: tl.constexpr, NORM_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Encode vectors; see `runtime.kv.two_bits`.

    Args:
        y: Hadamard-transformed vectors, fp32 `[ROWS, DIM]`.
        page: int64 `[ROWS]`, compressed page of each vector.
        row: int32 `[ROWS]`, row of each vector in its page.
        packed: uint8 plane, `[page, row, DIM / 4]`.
        norms: bf16 plane, `[page, row]`.
    """
    squared = sum_by_halves(y * y)  # [ROWS]
    finite = magnitude_bits(squared) < INFINITE
    norm = round_to_bf16(tl.sqrt_rn(tl.where(finite, squared, 0.0)))
    edge = (widened(norm) * (EDGE * DIM**-0.5))[:, None]
    codes = (y >= -edge).to(tl.uint8) + (y >= 0).to(tl.uint8) + (y >= edge).to(tl.uint8)
    low, high = halves(tl.where(finite[:, None], codes, 0))
    first, second = halves(low)
    third, fourth = halves(high)
    at = page * STRIDE + row * (DIM // 4)
    i = tl.arange(0, DIM // 4)
    joint = first | (second << 2) | (third << 4) | (fourth << 6)
    tl.store(packed + at[:, None] + i[None, :], joint.to(tl.uint8))
    tl.store(norms + page * NORM_STRIDE + row, tl.where(finite, norm, bf16_nan(norm)))


@triton.jit
def encode(
    k_pages, v_pages, k_at, v_at, k_stride, v_stride, page, slot, position, head, planes,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.encode`."""
    k, v, k_scale, v_norm = planes
    page, row = plane_rows(page, slot, head, HEADS, PAGE)
    # V first: in the other order, Triton 3.7 takes four times as long to compile the kernel.
    values = tiles_at(v_pages, v_at, v_stride, head, DIM, HEADS)
    values = hadamard_tiles(values)
    write_values(values, page, row, v, v_norm, STRIDES[1], STRIDES[3], DIM)
    keys = tiles_at(k_pages, k_at, k_stride, head, DIM, HEADS)
    write_int4(hadamard_tiles(keys), page, row, k, k_scale, STRIDES[0], STRIDES[2], DIM)


def _unpack_code(number: int, bit: int) -> str:
    """Return PTX that unpacks the 2-bit code at ``bit`` of each of two 16-bit words."""
    shift = f"shr.u32 c, $8, {bit - 1}" if bit else "shl.b32 c, $8, 1"
    return f"""
{shift};
lop3.b32 c, c, 0x00060006, 0x43004300, 0xea;
sub.rn.bf16x2 ${number}, c, bias;"""


UNPACK = tl.constexpr(
    "{\n.reg .b32 c, bias;\nmov.b32 bias, 0x43034303;"
    + "".join(_unpack_code(number, number // 2 * 2 + number % 2 * 8) for number in range(8))
    + "\n}"
)
"""PTX that unpacks two 16-bit words. A code is moved to bits 1 and 2 and joined with 0x4300, which
gives 128 + 2 c in bf16, and 131 is subtracted."""


@triton.jit
def unpack_values(pairs):
    """Unpack pairs of bytes, uint16.

    Returns:
        ``2 c - 3`` of codes c, bf16: for each quarter of the vectors, those of the even bytes, then
        those of the odd bytes.
    """
    if INTERPRETED:
        pairs = pairs.to(tl.int32)
        return (
            2.0 * (pairs & 3) - 3.0, 2.0 * ((pairs >> 8) & 3) - 3.0,
            2.0 * ((pairs >> 2) & 3) - 3.0, 2.0 * ((pairs >> 10) & 3) - 3.0,
            2.0 * ((pairs >> 4) & 3) - 3.0, 2.0 * ((pairs >> 12) & 3) - 3.0,
            2.0 * ((pairs >> 6) & 3) - 3.0, 2.0 * (pairs >> 14) - 3.0,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        UNPACK, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [pairs],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def norms_at(plane, page, row, mask, STRIDE: tl.constexpr):
    """Load the norms of n pairs of consecutive tokens, fp32 `[2 n]`.

    Args:
        plane: pointer to bf16 `[page, row]`; consecutive pages are STRIDE elements apart.
        page, row: int64 and int32 `[n]`, page and row of the first token of each pair.
        mask: `[n]`, the pairs to load.
    """
    first, second = bf16_pair(words_at(plane, page, row, mask, STRIDE, 2))
    return tl.reshape(tl.join(first, second), (2 * first.shape[0],))


@triton.jit
def attend(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    k, v, k_scale, v_norm = planes
    parts = transformed_queries(queries)
    acc1, m, _ = no_keys(queries.shape[0], DIM // 8)
    acc1 = tl.trans(acc1)  # [DIM / 8, ROWS]
    acc2 = tl.zeros_like(acc1)
    acc3 = tl.zeros_like(acc1)
    acc4 = tl.zeros_like(acc1)
    acc5 = tl.zeros_like(acc1)
    acc6 = tl.zeros_like(acc1)
    acc7 = tl.zeros_like(acc1)
    acc8 = tl.zeros_like(acc1)
    sums = tl.zeros((BLOCK, queries.shape[0]), tl.float32)
    for first in range(begin, end, BLOCK):
        t, page, row = rows_at(first, kv_head, count, table, PAGE, BLOCK, 1)
        pair, pair_page, pair_row = rows_at(first, kv_head, count, table, PAGE, BLOCK, 2)
        used = t < count  # unused lanes read page 0
        keys = byte_pairs_at(k, page, row, None, STRIDES[0], DIM // 2, DIM // 4)
        values = byte_pairs_at(v, page, row, None, STRIDES[1], DIM // 4, DIM // 8)
        k_scales = words_at(k_scale, page, row, used, STRIDES[2], 4)
        scores = int4_scores(parts, keys, k_scales, scale)
        scores = tl.where(used[:, None], scores, float("-inf"))
        weights, alpha, m, sums = transposed_softmax_step(scores, m, sums)
        norms = norms_at(v_norm, pair_page, pair_row, pair < count, STRIDES[3])
        weights = (weights * norms[:, None]).to(tl.bfloat16)
        v1, v2, v3, v4, v5, v6, v7, v8 = unpack_values(values)
        acc1 = matmul(tl.trans(v1), weights, acc1 * alpha)
        acc2 = matmul(tl.trans(v2), weights, acc2 * alpha)
        acc3 = matmul(tl.trans(v3), weights, acc3 * alpha)
        acc4 = matmul(tl.trans(v4), weights, acc4 * alpha)
        acc5 = matmul(tl.trans(v5), weights, acc5 * alpha)
        acc6 = matmul(tl.trans(v6), weights, acc6 * alpha)
        acc7 = matmul(tl.trans(v7), weights, acc7 * alpha)
        acc8 = matmul(tl.trans(v8), weights, acc8 * alpha)
    first = interleaved(tl.trans(acc1), tl.trans(acc2))
    second = interleaved(tl.trans(acc3), tl.trans(acc4))
    third = interleaved(tl.trans(acc5), tl.trans(acc6))
    fourth = interleaved(tl.trans(acc7), tl.trans(acc8))
    return joined(joined(first, second), joined(third, fourth)), m, tl.sum(sums, axis=0)


@triton.jit
def finish(
    acc, kv_head, planes, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    return hadamard(acc * (UNIT * DIM**-0.5))
