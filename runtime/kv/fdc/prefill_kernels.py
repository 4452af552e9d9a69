# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Prefill attention on projected queries and keys in Triton; values are not projected.

Latents of keys, bf16 `[page, KV_HEADS, PAGE, K_WIDTH]`, have the page ids of the full-precision
pages. Rows are placed as in compressed pages, see `runtime.kv.fdc.rows`.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import tokens_at
from runtime.attention.kernels.prefill import block_of
from runtime.kernels.arith import matmul, power_of_2
from runtime.kv.fdc.kernels import RANK_MULTIPLE
from runtime.kv.kernels.latents import basis_at, project_head, rounded_to


@triton.jit
def project_keys_kernel(
    k_pages, page_stride, head_stride, page_table, table_stride, lengths, k_basis, ranks, latents,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, K_WIDTH: tl.constexpr,
):  # fmt: skip
    """Project the keys of all pages of each sequence to latents.

    Grid `(sequences, pages, KV_HEADS)`.

    Args:
        k_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`.
        page_table: int32 `[sequences, pages]`, row stride ``table_stride``.
        lengths: int32 `[sequences]`, tokens of each sequence.
        k_basis, ranks: see `runtime.kv.fdc.kernels`.
        latents: see the head of this file, written.
    """
    sequence = tl.program_id(0)
    index = tl.program_id(1)
    head = tl.program_id(2)
    if index * PAGE < tl.load(lengths + sequence):
        page = tl.load(page_table + sequence * table_stride + index).to(tl.int64)
        rank = tl.load(ranks + head) * RANK_MULTIPLE
        slot = tl.arange(0, PAGE)
        at = page * page_stride + head * head_stride + slot * DIM
        project_head(
            k_pages, at, k_basis, rank, latents, page + tl.zeros_like(at), slot, head, KV_HEADS,
            DIM, PAGE, K_WIDTH, KV_HEADS * PAGE * K_WIDTH,
        )  # fmt: skip


@triton.jit
def attend_latents(
    queries, m, l, acc, first, kv_head, end, position, table, latents, rank, v_pages, page_stride,
    head_stride, scale,
    CAUSAL: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do the same as `runtime.attention.kernels.prefill.attend_keys`, with latents of keys.

    Args:
        queries: `[BLOCK_Q, K_COLUMNS]`, projected.
        rank: rank of the KV head.
    """
    t, at = tokens_at(first, kv_head, end, 0, table, page_stride, head_stride, DIM, PAGE, BLOCK)
    page = tl.load(table + t // PAGE, mask=t < end, other=0).to(tl.int64)
    k_at = (page * KV_HEADS + kv_head) * (PAGE * K_WIDTH) + t % PAGE * rank
    c = tl.arange(0, queries.shape[1])[None, :]
    d = tl.arange(0, acc.shape[1])[None, :]
    read_k = c < rank
    read_v = d < DIM
    if CAUSAL:
        read_k = read_k & (t < end)[:, None]
        read_v = read_v & (t < end)[:, None]
    keys = tl.load(latents + k_at[:, None] + c, mask=read_k, other=0.0)  # [BLOCK, K_COLUMNS]
    zeros = tl.zeros((queries.shape[0], BLOCK), tl.float32)
    scores = matmul(queries, tl.trans(keys.to(queries.dtype)), zeros)  # [BLOCK_Q, BLOCK]
    if CAUSAL:
        visible = (t[None, :] <= position[:, None]) & (t < end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    values = tl.load(v_pages + at[:, None] + d, mask=read_v, other=0.0)
    l = l * alpha + tl.sum(weights, axis=1)
    acc = matmul(rounded_to(weights, values.dtype), values, acc * alpha[:, None])
    return new_m, l, acc


@triton.jit
def latent_prefill_kernel(
    q, latents, k_basis, ranks, v_pages, page_stride, head_stride, page_table, table_stride, starts,
    lengths, sequences, out, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`runtime.attention.kernels.prefill.prefill_kernel` with queries and keys projected by R.

    Grid `(tokens // BLOCK_Q + sequences, HEADS)`. Each program projects its queries.

    Args:
        q: `[tokens, HEADS, DIM]`, after RoPE.
        latents: see the head of this file.
        k_basis, ranks: see `runtime.kv.fdc.kernels`.
    """
    WIDTH: tl.constexpr = power_of_2(DIM)
    block, head = tl.program_id(0), tl.program_id(1)
    sequence, start, tokens, index, length = block_of(starts, lengths, sequences, block, BLOCK_Q)
    if index < tokens:
        kv_head = head // (HEADS // KV_HEADS)
        rank = tl.load(ranks + kv_head) * RANK_MULTIPLE
        row = index + tl.arange(0, BLOCK_Q)
        d = tl.arange(0, WIDTH)
        valid = (row < tokens)[:, None] & (d < DIM)[None, :]
        at = ((start + row).to(tl.int64) * HEADS + head) * DIM
        queries = tl.load(q + at[:, None] + d[None, :], mask=valid, other=0.0)  # [BLOCK_Q, WIDTH]
        basis = basis_at(
            k_basis, kv_head * (DIM * K_WIDTH), DIM, rank, K_WIDTH, WIDTH, power_of_2(K_WIDTH)
        )
        zeros = tl.zeros((BLOCK_Q, power_of_2(K_WIDTH)), tl.float32)
        projected = rounded_to(matmul(queries, basis.to(queries.dtype), zeros), queries.dtype)

        position = length - tokens + row
        m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
        end = tl.minimum(length, length - tokens + index + BLOCK_Q)
        unmasked = (length - tokens + index + 1) // BLOCK * BLOCK
        table = page_table + sequence * table_stride
        for first in range(0, unmasked, BLOCK):
            m, l, acc = attend_latents(
                projected, m, l, acc, first, kv_head, end, position, table, latents, rank, v_pages,
                page_stride, head_stride, scale, False, KV_HEADS, DIM, PAGE, K_WIDTH, BLOCK,
            )  # fmt: skip
        for first in range(unmasked, end, BLOCK):
            m, l, acc = attend_latents(
                projected, m, l, acc, first, kv_head, end, position, table, latents, rank, v_pages,
                page_stride, head_stride, scale, True, KV_HEADS, DIM, PAGE, K_WIDTH, BLOCK,
            )  # fmt: skip
        found = (acc / l[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] + d[None, :], found, mask=valid)
