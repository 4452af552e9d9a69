# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Encoding of the format `shard` in Triton; ``planes`` are those of `runtime.kv.shard.kernels`."""

import triton
import triton.language as tl

from runtime.kv.k4v2.kernels import write_values
from runtime.kv.kernels.transforms import NAN, widened
from runtime.kv.shard import codes
from runtime.kv.shard.kernels import rotated

LARGEST = tl.constexpr(codes.LARGEST)
ROUND = tl.constexpr(1.5 * 2**23)
"""Adding it to a small fp32 number and subtracting it again rounds to an integer, half to even."""


@triton.jit
def encode_page(
    k_pages, v_pages, k_at, v_at, k_strides, v_strides, target, position, kv_head, planes,
    ENCODE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Encode V of one KV head, and the bytes of K that this head's programs encode.

    These are K_WIDTH bytes of each token, of coefficients of all heads; see
    `runtime.kv.kernels.encode`.
    """
    k, v, v_norm, _, _, _, columns, mean, scales, cos, sin = planes
    BYTES: tl.constexpr = triton.next_power_of_2(K_WIDTH if K_WIDTH > 16 else 16)
    slot = tl.arange(0, PAGE)[:, None]
    i = tl.arange(0, DIM // 2)
    b = tl.arange(0, BYTES)
    own = (position + slot) * (DIM // 2) + i[None, :]
    cos = tl.load(cos + own)
    sin = tl.load(sin + own)
    low = tl.zeros((PAGE, BYTES), tl.float32)
    high = tl.zeros((PAGE, BYTES), tl.float32)
    finite = tl.full((PAGE, DIM // 2), 1, tl.int32)
    columns += kv_head * (KV_HEADS * DIM * 2 * BYTES) + b[None, :]
    for head in range(KV_HEADS):
        at = k_pages + k_at + head * k_strides[0] + slot * k_strides[1] + i[None, :]
        first, second = rotated(widened(tl.load(at)), widened(tl.load(at + DIM // 2)), cos, -sin)
        first -= tl.load(mean + head * DIM + i)[None, :]
        second -= tl.load(mean + head * DIM + DIM // 2 + i)[None, :]
        finite &= ((tl.abs(first) <= LARGEST) & (tl.abs(second) <= LARGEST)).to(tl.int32)
        rows = columns + (head * DIM + i[:, None]) * (2 * BYTES)
        low = product(first, tl.load(rows), low)
        high = product(first, tl.load(rows + BYTES), high)
        rows += DIM * BYTES
        low = product(second, tl.load(rows), low)
        high = product(second, tl.load(rows + BYTES), high)
    finite = tl.min(finite, axis=1)[:, None] > 0  # [PAGE, 1]
    used = b < K_WIDTH
    scale = scales + kv_head * K_WIDTH + b
    low = nibbles(low, tl.load(scale, mask=used, other=1.0))
    high = nibbles(high, tl.load(scale + KV_HEADS * K_WIDTH, mask=used, other=1.0))
    joint = tl.where(finite, low | (high << 4), 0).to(tl.uint8)
    page = target * (PAGE * KV_HEADS * K_WIDTH)
    at = page + slot * (KV_HEADS * K_WIDTH) + kv_head * K_WIDTH + b[None, :]
    tl.store(k + at, joint, mask=used[None, :])

    d = tl.arange(0, DIM)[None, :]
    at = v_at + kv_head * v_strides[0] + slot * v_strides[1] + d
    rows = (target * KV_HEADS + kv_head) * PAGE + tl.arange(0, PAGE)
    write_values(widened(tl.load(v_pages + at)), rows, v, v_norm, DIM)
    tl.debug_barrier()  # threads write the norms of others
    norm_at = v_norm + rows[:, None]
    tl.store(norm_at, tl.full((PAGE, 1), NAN, tl.uint16).to(tl.bfloat16, bitcast=True), ~finite)


@triton.jit
def product(a, b, acc):
    """Return ``acc + a @ b`` for fp32, with errors of about fp32 rounding."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def nibbles(coefficients, scale):
    """Quantize coefficients to codes 1 to 15, int32; see `codes.encode_coefficients`."""
    steps = tl.div_rn(coefficients, tl.zeros_like(coefficients) + scale[None, :])
    steps = tl.minimum(tl.maximum(steps, -8.0), 8.0)
    rounded = (steps + ROUND) - ROUND
    return tl.minimum(tl.maximum(rounded, -7.0), 7.0).to(tl.int32) + 8
