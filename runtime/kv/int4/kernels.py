# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Encoding and attention of the format `int4` in Triton; see its README for the maths."""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import no_keys
from runtime.kernels.arith import INTERPRETED, matmul
from runtime.kv.kernels.transforms import (
    INFINITE,
    bf16_nan,
    bf16_pair,
    hadamard,
    halves,
    joined,
    magnitude_bits,
    round_to_bf16,
    widened,
    words_at,
)
from runtime.kv.kernels.windowed import rows_at, softmax_step


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
    step = widened(scale)[:, None]
    steps = tl.where(step > 0, tl.div_rn(x, tl.where(step > 0, step, 1.0)), 0.0)
    codes = tl.minimum(tl.maximum(tl.floor(steps) + 8, 0.0), 15.0)
    codes = tl.where(finite[:, None], codes, 8.0)
    return codes.to(tl.uint8), tl.where(finite, scale, bf16_nan(scale))


@triton.jit
def write_int4(x, rows, codes, scales, DIM: tl.constexpr):
    """Encode vectors.

    Args:
        x: fp32 `[PAGE, DIM]`.
        rows: int64 `[PAGE]`, rows of the planes.
        codes: uint8 plane, `[…, DIM / 2]`.
        scales: bf16 plane, `[…, 2]`.
    """
    low, high = halves(hadamard(x))
    low_largest = tl.max(magnitude_bits(low), axis=1)
    high_largest = tl.max(magnitude_bits(high), axis=1)
    finite = (low_largest < INFINITE) & (high_largest < INFINITE)
    low_codes, low_scale = quantize_half(low, low_largest, finite)
    high_codes, high_scale = quantize_half(high, high_largest, finite)
    i = tl.arange(0, DIM // 2)
    tl.store(codes + rows[:, None] * (DIM // 2) + i[None, :], low_codes | (high_codes << 4))
    tl.store(scales + rows * 2, low_scale)
    tl.store(scales + rows * 2 + 1, high_scale)


@triton.jit
def encode(keys, values, rows, planes, KV_HEADS: tl.constexpr, DIM: tl.constexpr):
    """See `runtime.kv.kernels.encode`."""
    k, v, k_scale, v_scale = planes
    write_int4(keys, rows, k, k_scale, DIM)
    write_int4(values, rows, v, v_scale, DIM)


UNPACK = tl.constexpr("""{
.reg .b32 a, b, c, bias;
mov.b32 bias, 0x430f430f;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 c, a, 1;
lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
sub.rn.bf16x2 $0, c, bias;
shl.b32 c, b, 1;
lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
sub.rn.bf16x2 $1, c, bias;
shr.u32 c, a, 3;
lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
sub.rn.bf16x2 $2, c, bias;
shr.u32 c, b, 3;
lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
sub.rn.bf16x2 $3, c, bias;
}""")
"""PTX that unpacks four bytes. Bytes are extended to 16 bits (`prmt`). A nibble is moved to bits 1
to 4 and joined with 0x4300 (``x & mask | bits``), and 143 is subtracted. 0x4300 is 128 in bf16,
whose last mantissa bit counts 1: the result is 128 + 2 code - 143."""


@triton.jit
def unpack_int4(packed):
    """Return ``2 code - 15`` of the low and the high nibbles, bf16: twice the value of a code."""
    if INTERPRETED:
        low = 2.0 * (packed & 15).to(tl.float32) - 15.0
        return low, 2.0 * (packed >> 4).to(tl.float32) - 15.0
    return tl.inline_asm_elementwise(
        UNPACK, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def transformed_queries(queries):
    """Return the halves of Hadamard-transformed queries, `[ROWS, DIM / 2]` each."""
    low, high = halves(hadamard(queries.to(tl.float32)))
    return low.to(queries.dtype), high.to(queries.dtype)


@triton.jit
def int4_scores(q_low, q_high, packed, words, scale):
    """Return scaled scores, fp32 `[ROWS, BLOCK]`.

    Args:
        q_low, q_high: see `transformed_queries`.
        packed: uint8 `[BLOCK, DIM / 2]`, codes of K.
        words: uint32 `[BLOCK]`, both scales of each token.
    """
    zeros = tl.zeros((q_low.shape[0], packed.shape[0]), tl.float32)
    low_scale, high_scale = bf16_pair(words)
    low_keys, high_keys = unpack_int4(packed)
    low = matmul(q_low, tl.trans(low_keys.to(q_low.dtype)), zeros)
    high = matmul(q_high, tl.trans(high_keys.to(q_low.dtype)), zeros)
    half = 0.5 * scale
    return low * (low_scale * half)[None, :] + high * (high_scale * half)[None, :]


@triton.jit
def attend(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    k, v, k_scale, v_scale = planes
    q_low, q_high = transformed_queries(queries)
    low, m, l = no_keys(queries.shape[0], DIM // 2)
    high = tl.zeros_like(low)
    i = tl.arange(0, DIM // 2)
    for first in range(begin, end, BLOCK):
        t, rows = rows_at(first, kv_head, count, table, KV_HEADS, PAGE, BLOCK, 1)
        used = t < count
        at = rows[:, None] * (DIM // 2) + i[None, :]
        keys = tl.load(k + at, mask=used[:, None], other=0)  # [BLOCK, DIM / 2]
        values = tl.load(v + at, mask=used[:, None], other=0)
        scores = int4_scores(q_low, q_high, keys, words_at(k_scale, rows, used, 4), scale)
        scores = tl.where(used[None, :], scores, float("-inf"))
        weights, alpha, m, l = softmax_step(scores, m, l)
        low_scale, high_scale = bf16_pair(words_at(v_scale, rows, used, 4))
        low_weights = (weights * low_scale[None, :]).to(tl.bfloat16)
        high_weights = (weights * high_scale[None, :]).to(tl.bfloat16)
        low_values, high_values = unpack_int4(values)
        low = matmul(low_weights, low_values, low * alpha[:, None])
        high = matmul(high_weights, high_values, high * alpha[:, None])
    return hadamard(joined(low, high) * 0.5), m, l
