# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

"""Encoding and attention of the format `int4` in Triton; see its README for the maths."""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import no_keys
from runtime.kernels.arith import INTERPRETED, matmul
from runtime.kv.kernels.encode import plane_rows, tiles_at
from runtime.kv.kernels.transforms import (
    INFINITE,
    ROUND,
    alternate,
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
    widened,
    words_at,
)
from runtime.kv.kernels.windowed import rows_at, transposed_softmax_step


@triton.jit
def quantize_half(x, largest, finite):
    """Quantize one half of transformed vectors; see `reference.quantize`.

    Args:
        x: fp32 `[ROWS, DIM / 2]`.
        largest: `[ROWS]`, bits of the largest magnitude of each row.
        finite: `[ROWS]`, whether the whole vector is finite.

    Returns:
        Codes, uint8, and scales, bf16 `[ROWS]`.
    """
    eighth = tl.where(finite, largest, 0).to(tl.float32, bitcast=True) * 0.125
    scale = round_to_bf16(eighth)
    step = widened(scale)
    # The inverse of a subnormal step is infinite: scale the step and the vector.
    factor = tl.where(step < 2.0**-100, 2.0**100, 1.0)
    step *= factor
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), tl.where(step > 0, step, 1.0))
    x *= factor[:, None]
    # Quotients of at most 2**-150 are rounded to 0. `limit` is the largest x with such a quotient.
    limit = step * 2.0**-100 * 2.0**-50
    # Not 2.0**-149: Triton makes constants below the normal fp32 numbers fp64.
    limit -= tl.where(limit * 2.0**100 * 2.0**50 > step, 2.0**-100, 0.0) * 2.0**-49
    limit = tl.where(step > 0, limit, float("inf"))  # with scale 0, all codes are 8
    x = tl.where(tl.abs(x) <= limit[:, None], 0.0, x)
    # `whole` is the quotient rounded down. `near` is `whole` or `whole + 1`, and its product with a
    # bf16 number is exact.
    near = (x * inverse[:, None] + ROUND) - ROUND
    whole = near - (x < near * step[:, None]).to(tl.float32)
    codes = tl.minimum(tl.maximum(whole, -8.0), 7.0).to(tl.int32) + 8
    codes = tl.where(finite[:, None], codes, 8)
    return codes.to(tl.uint8), tl.where(finite, scale, bf16_nan(scale))


@triton.jit
def write_int4(
    y, page, row, codes, scales, STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Encode vectors.

    Args:
        y: Hadamard-transformed vectors, fp32 `[ROWS, DIM]`.
        page: int64 `[ROWS]`, compressed page of each vector.
        row: int32 `[ROWS]`, row of each vector in its page.
        codes: uint8 plane, `[page, row, DIM / 2]`.
        scales: bf16 plane, `[page, row, 2]`.
    """
    low, high = halves(y)
    low_largest = tl.max(magnitude_bits(low), axis=1)
    high_largest = tl.max(magnitude_bits(high), axis=1)
    finite = (low_largest < INFINITE) & (high_largest < INFINITE)
    low_codes, low_scale = quantize_half(low, low_largest, finite)
    high_codes, high_scale = quantize_half(high, high_largest, finite)
    at = page * STRIDE + row * (DIM // 2)
    i = tl.arange(0, DIM // 2)
    tl.store(codes + at[:, None] + i[None, :], low_codes | (high_codes << 4))
    scale_at = scales + page * SCALE_STRIDE + row * 2
    tl.store(scale_at, low_scale)
    tl.store(scale_at + 1, high_scale)


@triton.jit
def encode(
    k_pages, v_pages, k_at, v_at, k_stride, v_stride, page, slot, position, head, planes,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.encode`."""
    k, v, k_scale, v_scale = planes
    page, row = plane_rows(page, slot, head, HEADS, PAGE)
    keys = tiles_at(k_pages, k_at, k_stride, head, DIM, HEADS)
    write_int4(hadamard_tiles(keys), page, row, k, k_scale, STRIDES[0], STRIDES[2], DIM)
    values = tiles_at(v_pages, v_at, v_stride, head, DIM, HEADS)
    write_int4(hadamard_tiles(values), page, row, v, v_scale, STRIDES[1], STRIDES[3], DIM)


def _unpack_nibble(number: int, shift: str) -> str:
    """Return PTX that unpacks one nibble of each of two 16-bit words."""
    return f"""
{shift};
lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
sub.rn.bf16x2 ${number}, c, bias;"""


_SHIFTS = "shl.b32 c, $4, 1", "shr.u32 c, $4, 7", "shr.u32 c, $4, 3", "shr.u32 c, $4, 11"
UNPACK = tl.constexpr(
    "{\n.reg .b32 c, bias;\nmov.b32 bias, 0x430f430f;"
    + "".join(_unpack_nibble(number, shift) for number, shift in enumerate(_SHIFTS))
    + "\n}"
)
"""PTX that unpacks two 16-bit words. A nibble is moved to bits 1 to 4 and joined with 0x4300
(``c & mask | bits``), and 143 is subtracted. 0x4300 is 128 in bf16, whose last mantissa bit counts
1: the result is 128 + 2 code - 143."""


@triton.jit
def unpack_int4(pairs):
    """Unpack pairs of bytes, uint16.

    Returns:
        ``2 code - 15``, twice the value of a code, as bf16: low nibbles of the even bytes, low
        nibbles of the odd bytes, high nibbles of the even bytes, high nibbles of the odd bytes.
    """
    if INTERPRETED:
        low_even = 2.0 * (pairs & 15).to(tl.float32) - 15.0
        low_odd = 2.0 * ((pairs >> 8) & 15).to(tl.float32) - 15.0
        high_even = 2.0 * ((pairs >> 4) & 15).to(tl.float32) - 15.0
        return low_even, low_odd, high_even, 2.0 * (pairs >> 12).to(tl.float32) - 15.0
    return tl.inline_asm_elementwise(
        UNPACK, "=r,=r,=r,=r,r", [pairs],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def transformed_queries(queries):
    """Return four parts `[ROWS, DIM / 4]` of Hadamard-transformed queries; see `unpack_int4`."""
    low, high = halves(hadamard(queries.to(tl.float32)).to(queries.dtype))
    low_even, low_odd = alternate(low)
    high_even, high_odd = alternate(high)
    return low_even, low_odd, high_even, high_odd


@triton.jit
def int4_scores(queries, pairs, words, scale):
    """Return scaled scores, fp32 `[BLOCK, ROWS]`.

    Args:
        queries: see `transformed_queries`.
        pairs: uint16 `[BLOCK, DIM / 4]`, codes of K.
        words: uint32 `[BLOCK]`, both scales of each token.
    """
    q1, q2, q3, q4 = queries
    k1, k2, k3, k4 = unpack_int4(pairs)
    zeros = tl.zeros((pairs.shape[0], q1.shape[0]), tl.float32)
    low = matmul(k1.to(q1.dtype), tl.trans(q1), zeros)
    low = matmul(k2.to(q1.dtype), tl.trans(q2), low)
    high = matmul(k3.to(q1.dtype), tl.trans(q3), zeros)
    high = matmul(k4.to(q1.dtype), tl.trans(q4), high)
    low_scale, high_scale = bf16_pair(words)
    half = 0.5 * scale
    return low * (low_scale * half)[:, None] + high * (high_scale * half)[:, None]


@triton.jit
def attend(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`.

    Tokens and dimensions are rows of matmuls and queries are columns, since a matmul needs at
    least 16 rows, but only 8 columns.
    """
    k, v, k_scale, v_scale = planes
    parts = transformed_queries(queries)
    acc1, m, _ = no_keys(queries.shape[0], DIM // 4)
    acc1 = tl.trans(acc1)  # [DIM / 4, ROWS]
    acc2 = tl.zeros_like(acc1)
    acc3 = tl.zeros_like(acc1)
    acc4 = tl.zeros_like(acc1)
    sums = tl.zeros((BLOCK, queries.shape[0]), tl.float32)
    for first in range(begin, end, BLOCK):
        t, page, row = rows_at(first, kv_head, count, table, PAGE, BLOCK, 1)
        used = t < count  # unused lanes read page 0
        keys = byte_pairs_at(k, page, row, None, STRIDES[0], DIM // 2, DIM // 4)
        values = byte_pairs_at(v, page, row, None, STRIDES[1], DIM // 2, DIM // 4)
        k_scales = words_at(k_scale, page, row, used, STRIDES[2], 4)
        scores = int4_scores(parts, keys, k_scales, scale)
        scores = tl.where(used[:, None], scores, float("-inf"))
        weights, alpha, m, sums = transposed_softmax_step(scores, m, sums)
        low_scale, high_scale = bf16_pair(words_at(v_scale, page, row, used, STRIDES[3], 4))
        low_weights = (weights * low_scale[:, None]).to(tl.bfloat16)
        high_weights = (weights * high_scale[:, None]).to(tl.bfloat16)
        v1, v2, v3, v4 = unpack_int4(values)
        acc1 = matmul(tl.trans(v1), low_weights, acc1 * alpha)
        acc2 = matmul(tl.trans(v2), low_weights, acc2 * alpha)
        acc3 = matmul(tl.trans(v3), high_weights, acc3 * alpha)
        acc4 = matmul(tl.trans(v4), high_weights, acc4 * alpha)
    low = interleaved(tl.trans(acc1), tl.trans(acc2))
    high = interleaved(tl.trans(acc3), tl.trans(acc4))
    return joined(low, high), m, tl.sum(sums, axis=0)


@triton.jit
def finish(
    acc, kv_head, planes, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    return hadamard(acc * 0.5)
