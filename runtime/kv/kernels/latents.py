# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Projections onto low-rank bases in Triton, for the formats `fdc`, `palu` and `shard`.

Bases are stored as bf16, `[2, …]`: the basis rounded to bf16, and the rounding error, also in bf16.
Encoding multiplies by both, with the precision of fp32. Attention multiplies by the first only.
"""

import triton
import triton.language as tl

from runtime.kernels.arith import INTERPRETED, matmul, power_of_2
from runtime.kv.kernels.transforms import round_to_bf16


@triton.jit
def to_bf16(x):
    """Round fp32 numbers to bf16, also in Triton's interpreter."""
    if INTERPRETED:
        return tl.where(x == x, round_to_bf16(x), x.to(tl.bfloat16))
    return x.to(tl.bfloat16)


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """Round fp32 numbers to bf16 or fp32, also in Triton's interpreter."""
    if dtype == tl.bfloat16:
        return to_bf16(x)
    return x.to(dtype)


@triton.jit
def basis_at(
    basis, first, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load `[ROWS, COLUMNS]` of a basis in bf16, with 0 beyond ``rows`` and ``columns``.

    Args:
        basis: pointer to bf16 `[…, stride]`.
        first: offset of the first element.
        rows, columns: numbers of rows and columns to read.
    """
    d = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    return tl.load(basis + first + d * stride + c, mask=(d < rows) & (c < columns), other=0.0)


@triton.jit
def store_rows(
    latents, plane, page, slot, head, rank, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Store the latents of one KV head, as `runtime.kv.fdc.rows.pack_rows` places them.

    Args:
        latents: fp32 `[TOKENS, COLUMNS]`.
        plane: bf16 `[page, KV_HEADS, PAGE, WIDTH]`, page stride STRIDE.
        page, slot: see `runtime.kv.kernels.encode`.
        rank: columns to store.
    """
    first = (page * STRIDE + head * (PAGE * WIDTH))[:, None]
    slot = slot[:, None]
    c = tl.arange(0, latents.shape[1])[None, :]
    tl.store(plane + first + slot * rank + c, to_bf16(latents), mask=c < rank)
    unused = slot * latents.shape[1] + c
    zeros = tl.zeros(latents.shape, tl.bfloat16)
    tl.store(plane + first + PAGE * rank + unused, zeros, mask=unused < PAGE * (WIDTH - rank))


@triton.jit
def project_head(
    pages, at, basis, rank, plane, page, slot, head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Project one KV head onto its basis and store the latents.

    Args:
        pages: bf16 K or V.
        at: offsets of the head's tokens, `[TOKENS]`.
        basis: bf16 `[2, KV_HEADS, DIM, WIDTH]`.
        rank: rank of the head.
        plane, page, slot, STRIDE: see `store_rows`.
    """
    DIMS: tl.constexpr = power_of_2(DIM)
    COLUMNS: tl.constexpr = power_of_2(WIDTH)
    d = tl.arange(0, DIMS)[None, :]
    x = tl.load(pages + at[:, None] + d, mask=d < DIM, other=0.0)
    first = head * (DIM * WIDTH)
    high = basis_at(basis, first, DIM, rank, WIDTH, DIMS, COLUMNS)
    low = basis_at(basis, first + KV_HEADS * (DIM * WIDTH), DIM, rank, WIDTH, DIMS, COLUMNS)
    latents = matmul(x, high, tl.zeros((x.shape[0], COLUMNS), tl.float32))
    latents = matmul(x, low, latents)
    store_rows(latents, plane, page, slot, head, rank, PAGE, WIDTH, STRIDE)


@triton.jit
def add_product(x, high, low, acc):
    """Return ``acc + x @ (high + low)`` with the precision of fp32, from products of bf16 numbers.

    Args:
        x: fp32 `[M, K]`. It is split into a bf16 number and a bf16 rounding error.
        high, low: bf16 `[K, N]`, a basis and its rounding error.
        acc: fp32 `[M, N]`.
    """
    rounded = to_bf16(x)
    rest = to_bf16(x - rounded.to(tl.float32))
    return matmul(rest, high, matmul(rounded, low, matmul(rounded, high, acc)))


@triton.jit
def restored(
    acc, basis, head, rank, DIM: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return outputs, fp32 `[1, DIMS]`, from a sum of latents of V.

    Args:
        acc: fp32 `[1, COLUMNS]`, sum of latents, weighted by attention.
        head: index of the KV head.
        basis: bf16 `[2, kv_heads, DIM, WIDTH]`.
        rank: rank of V of the head.
    """
    columns = basis_at(basis, head * (DIM * WIDTH), DIM, rank, WIDTH, DIMS, acc.shape[1])
    return tl.sum(columns.to(tl.float32) * acc, axis=1)[None, :]
