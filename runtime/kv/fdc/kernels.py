# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Encoding and attention of the format `fdc` in Triton; see its README for the maths.

After the compressed planes, both functions get

- the bases of K and of V, bf16 `[2, KV_HEADS, DIM, width]`, see `runtime.kv.kernels.latents`;
- the ranks of K and V in units of RANK_MULTIPLE, int32 `[2, KV_HEADS]`. Rows are therefore known to
  be aligned to 32 bytes.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import no_keys
from runtime.kernels.arith import matmul, power_of_2
from runtime.kv.calibration import bases
from runtime.kv.kernels.latents import basis_at, project_head, restored, rounded_to
from runtime.kv.kernels.windowed import softmax_step

RANK_MULTIPLE = tl.constexpr(bases.RANK_MULTIPLE)


@triton.jit
def encode(
    k_pages, v_pages, k_at, v_at, k_stride, v_stride, page, slot, position, head, planes,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.encode`."""
    k, v, k_basis, v_basis, ranks = planes
    tl.static_assert(HEADS == 1)
    k_rank = tl.load(ranks + head) * RANK_MULTIPLE
    v_rank = tl.load(ranks + KV_HEADS + head) * RANK_MULTIPLE
    project_head(
        k_pages, k_at + head * k_stride, k_basis, k_rank, k, page, slot, head, KV_HEADS, DIM, PAGE,
        K_WIDTH, STRIDES[0],
    )  # fmt: skip
    project_head(
        v_pages, v_at + head * v_stride, v_basis, v_rank, v, page, slot, head, KV_HEADS, DIM, PAGE,
        V_WIDTH, STRIDES[1],
    )  # fmt: skip


@triton.jit
def attend(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`.

    Columns beyond the head's rank are not read. Their lanes are 0 in matmuls of COLUMNS columns.
    """
    k, v, k_basis, _v_basis, ranks = planes
    K_COLUMNS: tl.constexpr = power_of_2(K_WIDTH)
    V_COLUMNS: tl.constexpr = power_of_2(V_WIDTH)
    k_rank = tl.load(ranks + kv_head) * RANK_MULTIPLE
    v_rank = tl.load(ranks + KV_HEADS + kv_head) * RANK_MULTIPLE
    basis = basis_at(
        k_basis, kv_head * (DIM * K_WIDTH), DIM, k_rank, K_WIDTH, queries.shape[1], K_COLUMNS
    )
    zeros = tl.zeros((queries.shape[0], K_COLUMNS), tl.float32)
    projected = matmul(queries, basis.to(queries.dtype), zeros)
    projected = rounded_to(projected, queries.dtype)
    acc, m, l = no_keys(queries.shape[0], V_COLUMNS)
    c = tl.arange(0, K_COLUMNS)[None, :]
    e = tl.arange(0, V_COLUMNS)[None, :]
    zeros = tl.zeros((queries.shape[0], BLOCK), tl.float32)
    for first in range(begin, end, BLOCK):
        t = first + tl.arange(0, BLOCK)
        used = t < count
        page = tl.load(table + t // PAGE, mask=used, other=0).to(tl.int64)
        slot = t % PAGE
        at = page * STRIDES[0] + kv_head * (PAGE * K_WIDTH) + slot * k_rank
        mask = used[:, None] & (c < k_rank)
        keys = tl.load(k + at[:, None] + c, mask=mask, other=0.0)  # [BLOCK, K_COLUMNS]
        at = page * STRIDES[1] + kv_head * (PAGE * V_WIDTH) + slot * v_rank
        mask = used[:, None] & (e < v_rank)
        values = tl.load(v + at[:, None] + e, mask=mask, other=0.0)
        scores = matmul(projected, tl.trans(keys.to(projected.dtype)), zeros) * scale
        scores = tl.where(used[None, :], scores, float("-inf"))
        weights, alpha, m, l = softmax_step(scores, m, l)
        acc = matmul(rounded_to(weights, values.dtype), values, acc * alpha[:, None])
    return acc, m, l


@triton.jit
def finish(
    acc, kv_head, planes, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    _k, _v, _k_basis, v_basis, ranks = planes
    v_rank = tl.load(ranks + KV_HEADS + kv_head) * RANK_MULTIPLE
    return restored(acc, v_basis, kv_head, v_rank, DIM, WIDTH, V_WIDTH)
