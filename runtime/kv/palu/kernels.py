# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 - `l` is the sum of an online softmax, as in the literature
"""Encoding and attention of the format `palu` in Triton; see its README for the maths.

After the compressed planes, all functions get

- the basis of K, bf16 `[2, groups, GROUP * DIM, GROUP * K_WIDTH]`, and the one of V, bf16 `[2,
  KV_HEADS, DIM, V_WIDTH]`, see `runtime.kv.kernels.latents`;
- cosines and sines of RoPE, fp32 `[context, DIM / 2]`;
- the number of KV heads of a group, for encoding. Attention has it as the constant GROUP.

Attention rebuilds the keys of a tile. RoPE of a key at position p is RoPE by p - p0 and then by p0,
where p0 is the first position of the tile. The rotation by p0 is undone on the queries instead. All
tiles then use the same cosines and sines for their keys, and these stay in registers.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import no_keys
from runtime.kernels.arith import matmul, power_of_2
from runtime.kv.kernels.latents import (
    add_product,
    project_head,
    restored,
    rounded_to,
    store_rows,
)
from runtime.kv.kernels.transforms import halves
from runtime.kv.kernels.windowed import softmax_step
from runtime.pages import window

SINK_PAGES = tl.constexpr(window.SINK_PAGES)
CHUNK = tl.constexpr(64)
"""Latents of K per matmul."""


@triton.jit
def encode(
    k_pages, v_pages, k_at, v_at, k_stride, v_stride, page, slot, position, head, planes,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.encode`. Each head stores a part of the K latents of its group."""
    k, v, k_basis, v_basis, cos, sin, group = planes
    tl.static_assert(HEADS == 1)
    HALF: tl.constexpr = DIM // 2
    COLUMNS: tl.constexpr = power_of_2(K_WIDTH)
    d = tl.arange(0, HALF)[None, :]
    angle = position[:, None] * HALF + d
    c = tl.load(cos + angle)  # [TOKENS, HALF]
    s = tl.load(sin + angle)
    # Rotate back: divide by the square of YaRN's factor, which both tables include.
    norm = c * c + s * s
    c /= norm
    s /= norm
    first_head = head // group * group
    basis_width = group * K_WIDTH
    column = tl.arange(0, COLUMNS)[None, :]
    valid = column < K_WIDTH
    row = tl.arange(0, HALF)[:, None]
    low_basis = k_basis + KV_HEADS * DIM * basis_width
    latents = tl.zeros((position.shape[0], COLUMNS), tl.float32)
    for member in range(group):
        from_page = k_pages + k_at[:, None] + (first_head + member) * k_stride + d
        first = tl.load(from_page).to(tl.float32)
        second = tl.load(from_page + HALF).to(tl.float32)
        # Rows of the member, columns of the head.
        at = ((first_head + member) * DIM + row) * basis_width
        at += (head - first_head) * K_WIDTH + column
        high = tl.load(k_basis + at, mask=valid, other=0.0)  # [HALF, COLUMNS]
        low = tl.load(low_basis + at, mask=valid, other=0.0)
        latents = add_product(first * c + second * s, high, low, latents)
        at += HALF * basis_width
        high = tl.load(k_basis + at, mask=valid, other=0.0)
        low = tl.load(low_basis + at, mask=valid, other=0.0)
        latents = add_product(second * c - first * s, high, low, latents)
    store_rows(latents, k, page, slot, head, K_WIDTH, PAGE, K_WIDTH, STRIDES[0])
    project_head(
        v_pages, v_at + head * v_stride, v_basis, V_WIDTH, v, page, slot, head, KV_HEADS, DIM, PAGE,
        V_WIDTH, STRIDES[1],
    )  # fmt: skip


@triton.jit
def basis_chunks(
    basis, kv_head, first_row,
    DIM: tl.constexpr, LATENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Load half of the rows that a KV head has in the basis of K.

    Args:
        first_row: first dimension of the half, 0 or DIM / 2.

    Returns:
        Tuple of chunks of CHUNK latents each, `[CHUNK, DIM / 2]`.
    """
    chunks = ()
    row = kv_head * DIM + first_row + tl.arange(0, DIM // 2)
    for begin in tl.static_range(0, LATENTS, CHUNK):
        x = begin + tl.arange(0, CHUNK)
        at = row[None, :] * LATENTS + x[:, None]
        loaded = tl.load(basis + at, mask=(x < LATENTS)[:, None], other=0.0)
        chunks = chunks + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit
def attend_groups(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`; GROUP is the number of KV heads of a group."""
    k, v, k_basis, _v_basis, cos, sin, _group = planes
    HALF: tl.constexpr = DIM // 2
    LATENTS: tl.constexpr = GROUP * K_WIDTH
    ROWS: tl.constexpr = queries.shape[0]
    V_COLUMNS: tl.constexpr = power_of_2(V_WIDTH)
    first_basis = basis_chunks(k_basis, kv_head, 0, DIM, LATENTS, GROUP)
    second_basis = basis_chunks(k_basis, kv_head, HALF, DIM, LATENTS, GROUP)
    q1, q2 = halves(queries.to(tl.float32))
    d = tl.arange(0, HALF)
    offset = tl.arange(0, BLOCK)
    c = tl.load(cos + offset[:, None] * HALF + d[None, :])  # [BLOCK, HALF]
    s = tl.load(sin + offset[:, None] * HALF + d[None, :])
    acc, m, l = no_keys(ROWS, V_COLUMNS)
    e = tl.arange(0, V_COLUMNS)[None, :]
    zeros = tl.zeros((BLOCK, ROWS), tl.float32)
    for first in range(begin, end, BLOCK):
        t = first + offset
        used = t < count
        page = tl.load(table + t // PAGE, mask=used, other=0).to(tl.int64)
        slot = t % PAGE
        at = page * STRIDES[1] + (kv_head * PAGE + slot) * V_WIDTH
        mask = used[:, None] & (e < V_WIDTH)
        values = tl.load(v + at[:, None] + e, mask=mask, other=0.0)
        k1 = tl.zeros((BLOCK, HALF), tl.float32)
        k2 = tl.zeros((BLOCK, HALF), tl.float32)
        first_head = kv_head // GROUP * GROUP
        of_group = page * STRIDES[0] + (first_head * PAGE + slot) * K_WIDTH
        for chunk in tl.static_range(0, LATENTS, CHUNK):
            x = (chunk + tl.arange(0, CHUNK))[None, :]
            at = of_group[:, None] + x // K_WIDTH * (PAGE * K_WIDTH) + x % K_WIDTH
            latents = tl.load(k + at, mask=used[:, None] & (x < LATENTS), other=0.0)
            k1 = matmul(latents, first_basis[chunk // CHUNK], k1)
            k2 = matmul(latents, second_basis[chunk // CHUNK], k2)

        at = (SINK_PAGES * PAGE + first) * HALF + d
        tile_c = tl.load(cos + at)
        tile_s = tl.load(sin + at)
        # `c` and `s` include YaRN's factor, so the cosines and sines of the tile must not.
        length = tl.sqrt(tile_c * tile_c + tile_s * tile_s)
        tile_c = (tile_c / length)[None, :]
        tile_s = (tile_s / length)[None, :]
        dtype: tl.constexpr = queries.dtype
        turned1 = tl.trans(rounded_to(q1 * tile_c + q2 * tile_s, dtype))  # [HALF, ROWS]
        turned2 = tl.trans(rounded_to(q2 * tile_c - q1 * tile_s, dtype))
        scores = matmul(rounded_to(k1 * c - k2 * s, dtype), turned1, zeros)
        scores = matmul(rounded_to(k2 * c + k1 * s, dtype), turned2, scores)
        scores = tl.where(used[None, :], tl.trans(scores) * scale, float("-inf"))
        weights, alpha, m, l = softmax_step(scores, m, l)
        acc = matmul(rounded_to(weights, values.dtype), values, acc * alpha[:, None])
    return acc, m, l


@triton.jit
def attend_1(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """`attend_groups` with groups of 1 KV head."""
    return attend_groups(
        queries, kv_head, begin, end, count, planes, table, scale, KV_HEADS, DIM, PAGE, BLOCK,
        K_WIDTH, V_WIDTH, STRIDES, 1,
    )  # fmt: skip


@triton.jit
def attend_2(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """`attend_groups` with groups of 2 KV heads."""
    return attend_groups(
        queries, kv_head, begin, end, count, planes, table, scale, KV_HEADS, DIM, PAGE, BLOCK,
        K_WIDTH, V_WIDTH, STRIDES, 2,
    )  # fmt: skip


@triton.jit
def attend_3(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """`attend_groups` with groups of 3 KV heads."""
    return attend_groups(
        queries, kv_head, begin, end, count, planes, table, scale, KV_HEADS, DIM, PAGE, BLOCK,
        K_WIDTH, V_WIDTH, STRIDES, 3,
    )  # fmt: skip


@triton.jit
def attend_4(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """`attend_groups` with groups of 4 KV heads."""
    return attend_groups(
        queries, kv_head, begin, end, count, planes, table, scale, KV_HEADS, DIM, PAGE, BLOCK,
        K_WIDTH, V_WIDTH, STRIDES, 4,
    )  # fmt: skip


@triton.jit
def finish(
    acc, kv_head, planes, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    _k, _v, _k_basis, v_basis, _cos, _sin, _group = planes
    return restored(acc, v_basis, kv_head, V_WIDTH, DIM, WIDTH, V_WIDTH)


ATTEND = {1: attend_1, 2: attend_2, 3: attend_3, 4: attend_4}
"""Attention by the number of KV heads of a group."""
