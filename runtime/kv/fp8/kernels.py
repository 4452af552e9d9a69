# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Encoding and attention of the formats `fp8` and `fp8-e5m2` in Triton."""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import no_keys
from runtime.kernels.arith import INTERPRETED, matmul, power_of_2
from runtime.kv.kernels.encode import plane_rows, vectors_at
from runtime.kv.kernels.transforms import (
    INFINITE,
    byte_pairs_at,
    interleaved,
    magnitude_bits,
    words_at,
)
from runtime.kv.kernels.windowed import rows_at, softmax_step


@triton.jit
def power_of_two(biased):
    """Return fp32 ``2 ** (biased - 127)`` of int32 numbers. 0 gives 0, and 255 infinity."""
    return (biased.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def on_grid(x, LEAST: tl.constexpr, MANTISSA: tl.constexpr):
    """Round fp32 numbers to MANTISSA bits of mantissa, to nearest, ties to even.

    The conversion to fp8 is then exact. Triton's interpreter would truncate in a conversion.

    Args:
        LEAST: exponent of the smallest normal number. Smaller numbers are rounded to multiples of
            the value of its last mantissa bit.
    """
    exponent = tl.maximum((magnitude_bits(x) >> 23).to(tl.int32), LEAST + 127)
    # `shift` is 1.5 * 2**23 units in the last place, so a sum with it is rounded to such units.
    shift = (((exponent + 23 - MANTISSA) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (tl.abs(x) + shift) - shift
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def write_fp8(
    x, page, row, codes, scales, STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Encode vectors; see `reference.quantize`.

    Args:
        x: fp32 `[ROWS, WIDTH]`; columns beyond DIM are 0.
        page: int64 `[ROWS]`, compressed page of each vector.
        row: int32 `[ROWS]`, row of each vector in its page.
        codes: fp8 plane, `[page, row, DIM]`.
        scales: uint8 plane, `[page, row]`.
    """
    E5M2: tl.constexpr = codes.dtype.element_ty == tl.float8e5
    # The largest number of the dtype is 0.875 * 2**TOP.
    TOP: tl.constexpr = 16 if E5M2 else 9
    largest = tl.max(magnitude_bits(x), axis=1)
    finite = largest < INFINITE
    # Whether the largest magnitude is above 0.875 times the next power of two.
    above = ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    biased = tl.maximum((largest >> 23).to(tl.int32) + 1 - TOP + above, 1)
    biased = tl.where(largest == 0, 127 - TOP, biased)
    inverse = power_of_two(254 - tl.where(finite, biased, 0))
    scaled = tl.where(finite[:, None], x * inverse[:, None], 0.0)
    scaled = on_grid(scaled, -14, 2) if E5M2 else on_grid(scaled, -6, 3)
    d = tl.arange(0, x.shape[1])[None, :]
    at = codes + (page * STRIDE + row * DIM)[:, None] + d
    tl.store(at, scaled.to(codes.dtype.element_ty), mask=d < DIM)
    biased = tl.where(finite, biased, 255)
    tl.store(scales + page * SCALE_STRIDE + row, biased.to(tl.uint8))


@triton.jit
def encode(
    k_pages, v_pages, k_at, v_at, k_stride, v_stride, page, slot, position, head, planes,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.encode`."""
    k, v, k_scale, v_scale = planes
    page, row = plane_rows(page, slot, head, HEADS, PAGE)
    keys = vectors_at(k_pages, k_at, k_stride, head, 0, DIM, HEADS, power_of_2(DIM))
    write_fp8(keys, page, row, k, k_scale, STRIDES[0], STRIDES[2], DIM)
    values = vectors_at(v_pages, v_at, v_stride, head, 0, DIM, HEADS, power_of_2(DIM))
    write_fp8(values, page, row, v, v_scale, STRIDES[1], STRIDES[3], DIM)


UNPACK_E4M3 = tl.constexpr("""{
.reg .b32 c;
.reg .b16 codes, unused;
prmt.b32 c, $2, 0, 0x4420;
mov.b32 {codes, unused}, c;
cvt.rn.f16x2.e4m3x2 $0, codes;
prmt.b32 c, $2, 0, 0x4431;
mov.b32 {codes, unused}, c;
cvt.rn.f16x2.e4m3x2 $1, codes;
}""")
"""PTX that converts the even and the odd bytes of two 16-bit words to fp16."""
UNPACK_E5M2 = tl.constexpr("""{
shl.b32 $0, $2, 8;
and.b32 $0, $0, 0xff00ff00;
and.b32 $1, $2, 0xff00ff00;
}""")
"""Like `UNPACK_E4M3`, for e5m2: a number is the high byte of the same number in fp16."""


@triton.jit
def unpack_fp8(pairs, E5M2: tl.constexpr):
    """Return the even and the odd codes of pairs of bytes, uint16, as fp16."""
    if INTERPRETED:
        kind: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
        even = (pairs & 255).to(tl.uint8).to(kind, bitcast=True)
        odd = (pairs >> 8).to(tl.uint8).to(kind, bitcast=True)
        return even.to(tl.float32), odd.to(tl.float32)
    UNPACK: tl.constexpr = UNPACK_E5M2 if E5M2 else UNPACK_E4M3
    return tl.inline_asm_elementwise(
        UNPACK, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def exponents_at(plane, page, row, mask, STRIDE: tl.constexpr):
    """Load the scales of n groups of four consecutive tokens, as biased exponents, int32 `[4 n]`.

    Args:
        plane: pointer to uint8 `[page, row]`; consecutive pages are STRIDE elements apart.
        page, row: int64 and int32 `[n]`, page and row of the first token of each group.
        mask: `[n]`, the groups to load.
    """
    words = words_at(plane, page, row, mask, STRIDE, 1)
    even = tl.join(words & 255, (words >> 16) & 255)
    odd = tl.join((words >> 8) & 255, words >> 24)
    return tl.reshape(tl.join(even, odd), (4 * words.shape[0],)).to(tl.int32)


@triton.jit
def fp16_queries(queries):
    """Convert queries to fp16, scaled by a power of two so that the largest is below 2**15.

    Args:
        queries: `[ROWS, WIDTH]`, bf16 or fp32.

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
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`.

    Codes are multiplied as fp16, in which they are exact and to which a GPU converts them fastest.
    Weights times scales might exceed the range of fp16. They are divided by the largest scale so
    far, 2**top, as in the online softmax, and multiplied by 2**14.

    A scale byte of 255 (NaN) becomes infinity. The codes of its vector are 0, so products are NaN.
    """
    k, v, k_scale, v_scale = planes
    E5M2: tl.constexpr = v.dtype.element_ty == tl.float8e5
    even, m, l = no_keys(queries.shape[0], queries.shape[1] // 2)
    odd = tl.zeros_like(even)
    q, factor = fp16_queries(queries)
    top = 0  # the largest scale so far, as a biased exponent
    d = tl.arange(0, queries.shape[1])[None, :]
    for first in range(begin, end, BLOCK):
        t, page, row = rows_at(first, kv_head, count, table, PAGE, BLOCK, 1)
        fourth, fourth_page, fourth_row = rows_at(first, kv_head, count, table, PAGE, BLOCK, 4)
        used, fourth_used = t < count, fourth < count
        at = (page * STRIDES[0] + row * DIM)[:, None] + d
        read = used[:, None] & (d < DIM)
        keys = tl.load(k + at, mask=read, other=0.0)  # [BLOCK, WIDTH]
        values = byte_pairs_at(v, page, row, used, STRIDES[1], DIM, queries.shape[1] // 2)
        zeros = tl.zeros((queries.shape[0], BLOCK), tl.float32)
        scores = matmul(q, tl.trans(keys.to(tl.float16)), zeros)
        k_exponents = exponents_at(k_scale, fourth_page, fourth_row, fourth_used, STRIDES[2])
        scores *= (power_of_two(k_exponents) * (factor * scale))[None, :]
        scores = tl.where(used[None, :], scores, float("-inf"))
        weights, alpha, m, l = softmax_step(scores, m, l)
        v_exponents = exponents_at(v_scale, fourth_page, fourth_row, fourth_used, STRIDES[3])
        finite = v_exponents < 255
        new_top = tl.maximum(top, tl.max(tl.where(finite, v_exponents, 0), axis=0))
        relative = tl.where(finite, tl.maximum(v_exponents - new_top + 141, 0), 255)
        alpha *= power_of_two(tl.maximum(top - new_top + 127, 0))
        top = new_top
        weights = (weights * power_of_two(relative)[None, :]).to(tl.float16)
        even_values, odd_values = unpack_fp8(values, E5M2)
        even = matmul(weights, even_values, even * alpha[:, None])
        odd = matmul(weights, odd_values, odd * alpha[:, None])
    return interleaved(even, odd) * power_of_two(tl.maximum(top, 15) - 14), m, l


@triton.jit
def finish(
    acc, kv_head, planes, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    return acc
