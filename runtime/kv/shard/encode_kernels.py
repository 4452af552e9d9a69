# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Encoding of the format `shard` in Triton; ``planes`` are those of `runtime.kv.shard.kernels`."""

import triton
import triton.language as tl

from runtime.kernels.arith import power_of_2
from runtime.kv.k4v2.kernels import write_values
from runtime.kv.kernels.encode import plane_rows, tiles_at
from runtime.kv.kernels.latents import add_product
from runtime.kv.kernels.transforms import NAN, ROUND, alternate, hadamard_tiles, widened
from runtime.kv.shard import codes
from runtime.kv.shard.kernels import rotated

LARGEST = tl.constexpr(codes.LARGEST)


@triton.jit
def encode(
    k_pages, v_pages, k_at, v_at, k_stride, v_stride, page, slot, position, head, planes,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """Encode V of some KV heads, and the bytes of K that are stored with these heads.

    The coefficients of a token depend on all heads; each head stores K_WIDTH of their bytes. See
    `runtime.kv.kernels.encode`.
    """
    k, v, v_norm, _, _, _, columns, mean, scales, cos, sin, _, _, _ = planes
    BYTES: tl.constexpr = power_of_2(K_WIDTH)
    OWN: tl.constexpr = HEADS * BYTES * 2
    ROW: tl.constexpr = KV_HEADS * BYTES * 2  # elements of a row of `columns`
    i = tl.arange(0, DIM // 2)
    own = position[:, None] * (DIM // 2) + i[None, :]
    cos = tl.load(cos + own)  # [TOKENS, DIM / 2]
    sin = tl.load(sin + own)
    acc = tl.zeros((position.shape[0], OWN), tl.float32)
    finite = tl.full((position.shape[0], DIM // 2), 1, tl.int32)
    high = columns + head * (BYTES * 2) + i[:, None] * ROW + tl.arange(0, OWN)[None, :]
    low = high + KV_HEADS * DIM * ROW
    for member in range(KV_HEADS):
        at = k_pages + k_at[:, None] + member * k_stride + i[None, :]
        first, second = rotated(widened(tl.load(at)), widened(tl.load(at + DIM // 2)), cos, -sin)
        first -= tl.load(mean + member * DIM + i)[None, :]
        second -= tl.load(mean + member * DIM + DIM // 2 + i)[None, :]
        finite &= ((tl.abs(first) <= LARGEST) & (tl.abs(second) <= LARGEST)).to(tl.int32)
        row = member * DIM * ROW
        acc = add_product(first, tl.load(high + row), tl.load(low + row), acc)
        row += DIM // 2 * ROW
        acc = add_product(second, tl.load(high + row), tl.load(low + row), acc)
    finite = tl.min(finite, axis=1) > 0  # [TOKENS]
    even, odd = alternate(acc)
    b = tl.arange(0, HEADS * BYTES)
    byte = (head + b // BYTES) * K_WIDTH + b % BYTES
    used = b % BYTES < K_WIDTH
    even = nibbles(even, tl.load(scales + byte, mask=used, other=1.0))
    odd = nibbles(odd, tl.load(scales + KV_HEADS * K_WIDTH + byte, mask=used, other=1.0))
    joint = tl.where(finite[:, None], even | (odd << 4), 0).to(tl.uint8)
    first_byte = page * STRIDES[0] + slot * (KV_HEADS * K_WIDTH)
    tl.store(k + first_byte[:, None] + byte[None, :], joint, mask=used[None, :])

    page, row = plane_rows(page, slot, head, HEADS, PAGE)
    values = tiles_at(v_pages, v_at, v_stride, head, DIM, HEADS)
    values = hadamard_tiles(values)
    write_values(values, page, row, v, v_norm, STRIDES[1], STRIDES[2], DIM)
    # Wait, because the thread that overwrites a norm may not be the one that wrote it.
    tl.debug_barrier()
    finite = tl.reshape(tl.broadcast_to(finite[None, :], (HEADS, position.shape[0])), row.shape)
    nan = tl.full(row.shape, NAN, tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(v_norm + page * STRIDES[2] + row, nan, mask=~finite)


@triton.jit
def nibbles(coefficients, scale):
    """Quantize coefficients to codes 1 to 15, int32; see `codes.encode_coefficients`."""
    steps = tl.div_rn(coefficients, tl.zeros_like(coefficients) + scale[None, :])
    steps = tl.minimum(tl.maximum(steps, -8.0), 8.0)
    rounded = (steps + ROUND) - ROUND
    return tl.minimum(tl.maximum(rounded, -7.0), 7.0).to(tl.int32) + 8
