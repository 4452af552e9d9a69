# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Encoding and attention of `stream8` and `stream4` in Triton; see the README for the maths.

``planes`` are the compressed planes, the levels, bf16 `[2 ** bits]`, and the edges between them,
fp32 `[2 ** bits - 1]`.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import no_keys
from runtime.kernels.arith import INTERPRETED, matmul
from runtime.kv.int4.kernels import transformed_queries
from runtime.kv.k4v2.kernels import norms_at
from runtime.kv.kernels.encode import plane_rows, tiles_at, vectors_at
from runtime.kv.kernels.transforms import (
    INFINITE,
    bf16_nan,
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
)
from runtime.kv.kernels.windowed import rows_at, softmax_step
from runtime.kv.stream.levels import bf16_magnitudes


@triton.jit
def write_codes(
    y, page, row, codes, norms, edges, STRIDE: tl.constexpr, NORM_STRIDE: tl.constexpr,
    DIM: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Encode vectors; see `reference.quantize`.

    Args:
        y: Hadamard-transformed vectors, fp32 `[ROWS, DIM]`.
        page: int64 `[ROWS]`, compressed page of each vector.
        row: int32 `[ROWS]`, row of each vector in its page.
        codes: uint8 plane, `[page, row, DIM * BITS / 8]`.
        norms: bf16 plane, `[page, row]`.
    """
    squared = sum_by_halves(y * y)  # [ROWS]
    finite = magnitude_bits(squared) < INFINITE
    norm = round_to_bf16(tl.sqrt_rn(tl.where(finite, squared, 0.0)))
    unit = (widened(norm) * DIM**-0.5)[:, None]
    scaled = tl.where(unit > 0, tl.div_rn(y, tl.where(unit > 0, unit, 1.0)), 0.0)
    found = tl.zeros(y.shape, tl.int32)  # number of edges below each element
    for bit in tl.static_range(BITS - 1, -1, -1):
        below = tl.load(edges + found + ((1 << bit) - 1)) < scaled
        found += below.to(tl.int32) << bit
    found = tl.where(finite[:, None], found, 0)
    if BITS == 4:
        low, high = halves(found)
        found = low | (high << 4)
    BYTES: tl.constexpr = DIM * BITS // 8
    at = (page * STRIDE + row * BYTES)[:, None] + tl.arange(0, BYTES)[None, :]
    tl.store(codes + at, found.to(tl.uint8))
    tl.store(norms + page * NORM_STRIDE + row, tl.where(finite, norm, bf16_nan(norm)))


@triton.jit
def encode4(
    k_pages, v_pages, k_at, v_at, k_stride, v_stride, page, slot, position, head, planes,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.encode`."""
    k, v, k_norm, v_norm, _, edges = planes
    page, row = plane_rows(page, slot, head, HEADS, PAGE)
    keys = tiles_at(k_pages, k_at, k_stride, head, DIM, HEADS)
    keys = hadamard_tiles(keys)
    write_codes(keys, page, row, k, k_norm, edges, STRIDES[0], STRIDES[2], DIM, 4)
    values = tiles_at(v_pages, v_at, v_stride, head, DIM, HEADS)
    values = hadamard_tiles(values)
    write_codes(values, page, row, v, v_norm, edges, STRIDES[1], STRIDES[3], DIM, 4)


@triton.jit
def encode8(
    k_pages, v_pages, k_at, v_at, k_stride, v_stride, page, slot, position, head, planes,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.encode`."""
    k, v, k_norm, v_norm, _, edges = planes
    page, row = plane_rows(page, slot, head, HEADS, PAGE)
    keys = vectors_at(k_pages, k_at, k_stride, head, 0, DIM, HEADS, DIM)
    keys = hadamard(keys)
    write_codes(keys, page, row, k, k_norm, edges, STRIDES[0], STRIDES[2], DIM, 8)
    values = vectors_at(v_pages, v_at, v_stride, head, 0, DIM, HEADS, DIM)
    values = hadamard(values)
    write_codes(values, page, row, v, v_norm, edges, STRIDES[1], STRIDES[3], DIM, 8)


def _bytes(shift: int) -> tuple[str, str]:
    """Return a byte of each of the eight magnitudes as two 32-bit numbers."""
    found = [magnitude >> shift & 255 for magnitude in bf16_magnitudes()]
    return hex(int.from_bytes(bytes(found[:4]), "little")), hex(
        int.from_bytes(bytes(found[4:]), "little")
    )


def _pair(number: int, selector: str, shift: str) -> str:
    """Return PTX that joins low and high bytes of two magnitudes and gives them their signs."""
    return f"""prmt.b32 o, l, h, {selector};
{shift}
not.b32 t, t;
and.b32 t, t, 0x80008000;
or.b32 ${number}, o, t;
"""


_LOOK_UP = "prmt.b32 l, l0, l1, i;\nprmt.b32 h, h0, h1, i;\n"
LEVELS = tl.constexpr(
    "{\n.reg .b32 t, f, i, l, h, o, l0, l1, h0, h1;\n"
    + "mov.b32 l0, {};\nmov.b32 l1, {};\n".format(*_bytes(0))
    + "mov.b32 h0, {};\nmov.b32 h1, {};\n".format(*_bytes(8))
    + "not.b32 t, $4;\nand.b32 t, t, 0x88888888;\nshr.u32 f, t, 3;\nsub.u32 f, t, f;\n"
    "xor.b32 i, $4, f;\nand.b32 i, i, 0x77777777;\nprmt.b32 i, i, 0, 0x3120;\n"
    + _LOOK_UP
    + _pair(0, "0x6240", "shl.b32 t, $4, 12;")
    + _pair(2, "0x7351", "shl.b32 t, $4, 8;")
    + "shr.u32 i, i, 16;\n"
    + _LOOK_UP
    + _pair(1, "0x6240", "shl.b32 t, $4, 4;")
    + _pair(3, "0x7351", "mov.b32 t, $4;")
    + "}"
)
"""PTX that unpacks two 16-bit words. Levels are symmetric: the low three bits of a code, which are
inverted in codes below 8, are the index of the magnitude. `prmt` looks up its low and high bytes.
"""


@triton.jit
def levels_of(pairs, levels):
    """Return the levels of codes of 4 bits, bf16, from pairs of bytes, uint16.

    Returns:
        Levels of low nibbles of the even bytes, low nibbles of the odd bytes, high nibbles of the
        even bytes, high nibbles of the odd bytes.
    """
    if INTERPRETED:
        pairs = pairs.to(tl.int32)
        return (
            tl.load(levels + (pairs & 15)), tl.load(levels + ((pairs >> 8) & 15)),
            tl.load(levels + ((pairs >> 4) & 15)), tl.load(levels + (pairs >> 12)),
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        LEVELS, "=&r,=&r,=&r,=&r,r", [pairs],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def attend4(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """`ATTEND` of ``stream4``; see `runtime.kv.kernels.windowed`."""
    k, v, k_norm, v_norm, levels, _ = planes
    q1, q2, q3, q4 = transformed_queries(queries)
    acc1, m, l = no_keys(queries.shape[0], DIM // 4)
    acc2 = tl.zeros_like(acc1)
    acc3 = tl.zeros_like(acc1)
    acc4 = tl.zeros_like(acc1)
    scale *= DIM**-0.5
    for first in range(begin, end, BLOCK):
        t, page, row = rows_at(first, kv_head, count, table, PAGE, BLOCK, 1)
        pair, pair_page, pair_row = rows_at(first, kv_head, count, table, PAGE, BLOCK, 2)
        used = t < count
        pairs = byte_pairs_at(k, page, row, used, STRIDES[0], DIM // 2, DIM // 4)
        k1, k2, k3, k4 = levels_of(pairs, levels)
        scores = tl.zeros((q1.shape[0], BLOCK), tl.float32)
        scores = matmul(q1, tl.trans(k1.to(q1.dtype)), scores)
        scores = matmul(q2, tl.trans(k2.to(q1.dtype)), scores)
        scores = matmul(q3, tl.trans(k3.to(q1.dtype)), scores)
        scores = matmul(q4, tl.trans(k4.to(q1.dtype)), scores)
        norms = norms_at(k_norm, pair_page, pair_row, pair < count, STRIDES[2])
        scores *= (norms * scale)[None, :]
        scores = tl.where(used[None, :], scores, float("-inf"))
        weights, alpha, m, l = softmax_step(scores, m, l)
        norms = norms_at(v_norm, pair_page, pair_row, pair < count, STRIDES[3])
        weights = (weights * norms[None, :]).to(tl.bfloat16)
        pairs = byte_pairs_at(v, page, row, used, STRIDES[1], DIM // 2, DIM // 4)
        v1, v2, v3, v4 = levels_of(pairs, levels)
        alpha = alpha[:, None]
        acc1 = matmul(weights, v1, acc1 * alpha)
        acc2 = matmul(weights, v2, acc2 * alpha)
        acc3 = matmul(weights, v3, acc3 * alpha)
        acc4 = matmul(weights, v4, acc4 * alpha)
    acc = joined(interleaved(acc1, acc2), interleaved(acc3, acc4))
    return acc, m, l


@triton.jit
def attend8(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`. Levels are read from the L1 cache."""
    k, v, k_norm, v_norm, levels, _ = planes
    q = hadamard(queries.to(tl.float32)).to(queries.dtype)
    acc, m, l = no_keys(queries.shape[0], DIM)
    scale *= DIM**-0.5
    d = tl.arange(0, DIM)[None, :]
    for first in range(begin, end, BLOCK):
        t, page, row = rows_at(first, kv_head, count, table, PAGE, BLOCK, 1)
        pair, pair_page, pair_row = rows_at(first, kv_head, count, table, PAGE, BLOCK, 2)
        used = t < count
        k_at = (page * STRIDES[0] + row * DIM)[:, None] + d
        v_at = (page * STRIDES[1] + row * DIM)[:, None] + d
        k_codes = tl.load(k + k_at, mask=used[:, None], other=0)
        v_codes = tl.load(v + v_at, mask=used[:, None], other=0)
        keys = tl.trans(tl.load(levels + k_codes.to(tl.int32)).to(q.dtype))
        scores = matmul(q, keys, tl.zeros((q.shape[0], BLOCK), tl.float32))
        norms = norms_at(k_norm, pair_page, pair_row, pair < count, STRIDES[2])
        scores *= (norms * scale)[None, :]
        scores = tl.where(used[None, :], scores, float("-inf"))
        weights, alpha, m, l = softmax_step(scores, m, l)
        norms = norms_at(v_norm, pair_page, pair_row, pair < count, STRIDES[3])
        weights = (weights * norms[None, :]).to(tl.bfloat16)
        values = tl.load(levels + v_codes.to(tl.int32))
        acc = matmul(weights, values, acc * alpha[:, None])
    return acc, m, l


@triton.jit
def finish(
    acc, kv_head, planes, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    return hadamard(acc * DIM**-0.5)
