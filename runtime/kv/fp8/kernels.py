# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Encoding and attention of the formats `fp8` and `fp8-e5m2` in Triton."""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import no_keys
from runtime.kernels.arith import matmul
from runtime.kv.kernels.transforms import INFINITE, magnitude_bits, words_at
from runtime.kv.kernels.windowed import rows_at, softmax_step


@triton.jit
def power_of_two(biased):
    """Return ``2 ** (biased - 127)``. 0 gives 0, and 255 infinity."""
    return (biased.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def on_grid(x, LEAST: tl.constexpr, MANTISSA: tl.constexpr):
    """Round fp32 numbers to nearest even numbers with MANTISSA bits of mantissa.

    The conversion to fp8 is then exact. Triton's interpreter would truncate in a conversion.

    Args:
        LEAST: exponent of the smallest normal number; smaller numbers have its unit.
    """
    exponent = tl.maximum((magnitude_bits(x) >> 23).to(tl.int32), LEAST + 127)
    # 1.5 * 2**23 units: the last bit of sums near it counts one unit.
    shift = (((exponent + 23 - MANTISSA) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (tl.abs(x) + shift) - shift
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def write_fp8(x, rows, codes, scales, DIM: tl.constexpr):
    """Encode vectors; see `reference.quantize`.

    Args:
        x: fp32 `[PAGE, WIDTH]`; columns beyond DIM are 0.
        rows: int64 `[PAGE]`, rows of the planes.
        codes: fp8 plane, `[…, DIM]`.
        scales: uint8 plane, `[…, 1]`.
    """
    E5M2: tl.constexpr = codes.dtype.element_ty == tl.float8e5
    TOP: tl.constexpr = 16 if E5M2 else 9  # 0.875 * 2**TOP is the largest number
    largest = tl.max(magnitude_bits(x), axis=1)
    finite = largest < INFINITE
    above = ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)  # above 0.875 * 2**exponent
    biased = tl.maximum((largest >> 23).to(tl.int32) + 1 - TOP + above, 1)
    biased = tl.where(largest == 0, 127 - TOP, biased)
    inverse = power_of_two(254 - tl.where(finite, biased, 0))
    scaled = tl.where(finite[:, None], x * inverse[:, None], 0.0)
    scaled = on_grid(scaled, -14, 2) if E5M2 else on_grid(scaled, -6, 3)
    d = tl.arange(0, x.shape[1])[None, :]
    tl.store(codes + rows[:, None] * DIM + d, scaled.to(codes.dtype.element_ty), mask=d < DIM)
    tl.store(scales + rows, tl.where(finite, biased, 255).to(tl.uint8))


@triton.jit
def encode(keys, values, rows, planes, KV_HEADS: tl.constexpr, DIM: tl.constexpr):
    """See `runtime.kv.kernels.encode`."""
    k, v, k_scale, v_scale = planes
    write_fp8(keys, rows, k, k_scale, DIM)
    write_fp8(values, rows, v, v_scale, DIM)


@triton.jit
def exponents_at(plane, rows, mask):
    """Load the biased exponents of four tokens per row, int32 `[4 n]`.

    Args:
        plane: uint8 plane, `[…, 1]`.
        rows: int64 `[n]`, every fourth row.
    """
    words = words_at(plane, rows, mask, 1)
    even = tl.join(words & 255, (words >> 16) & 255)
    odd = tl.join((words >> 8) & 255, words >> 24)
    return tl.reshape(tl.join(even, odd), (4 * words.shape[0],)).to(tl.int32)


@triton.jit
def fp16_queries(queries):
    """Scale queries by a power of two so that the largest is below 2**15, for fp16.

    Returns:
        fp16 queries, and the factor that undoes the scale.
    """
    x = queries.to(tl.float32)
    exponent = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0).to(tl.int32) >> 23
    exponent = tl.maximum(exponent, 15)  # the scale is at most 2**126
    return (x * power_of_two(268 - exponent)).to(tl.float16), power_of_two(exponent - 14)


@triton.jit
def attend(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`.

    Codes are multiplied as fp16, in which they are exact and to which a GPU converts them fastest.
    Weights times scales might exceed the range of fp16. They are divided by the largest scale so
    far, 2**top, as in the online softmax, and multiplied by 2**14.

    A scale byte of 255 (NaN) becomes infinity, and its codes are 0: products with it are NaN.
    """
    k, v, k_scale, v_scale = planes
    acc, m, l = no_keys(queries.shape[0], queries.shape[1])
    q, factor = fp16_queries(queries)
    top = 0  # biased
    d = tl.arange(0, queries.shape[1])[None, :]
    for first in range(begin, end, BLOCK):
        t, rows = rows_at(first, kv_head, count, table, KV_HEADS, PAGE, BLOCK, 1)
        fourth, fourth_rows = rows_at(first, kv_head, count, table, KV_HEADS, PAGE, BLOCK, 4)
        used, fourth_used = t < count, fourth < count
        at = rows[:, None] * DIM + d
        read = used[:, None] & (d < DIM)
        keys = tl.load(k + at, mask=read, other=0.0)  # [BLOCK, WIDTH]
        values = tl.load(v + at, mask=read, other=0.0)
        zeros = tl.zeros((queries.shape[0], BLOCK), tl.float32)
        scores = matmul(q, tl.trans(keys.to(tl.float16)), zeros)
        k_scales = power_of_two(exponents_at(k_scale, fourth_rows, fourth_used))
        scores *= (k_scales * (factor * scale))[None, :]
        scores = tl.where(used[None, :], scores, float("-inf"))
        weights, alpha, m, l = softmax_step(scores, m, l)
        v_exponents = exponents_at(v_scale, fourth_rows, fourth_used)
        finite = v_exponents < 255
        new_top = tl.maximum(top, tl.max(tl.where(finite, v_exponents, 0), axis=0))
        relative = tl.where(finite, tl.maximum(v_exponents - new_top + 141, 0), 255)
        alpha *= power_of_two(tl.maximum(top - new_top + 127, 0))
        top = new_top
        weights *= power_of_two(relative)[None, :]
        acc = matmul(weights.to(tl.float16), values.to(tl.float16), acc * alpha[:, None])
    return acc * (power_of_two(tl.maximum(top, 15) - 14)), m, l
