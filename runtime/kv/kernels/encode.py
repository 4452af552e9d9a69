# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Encoding of exact pages into stored pages.

A format that encodes each vector on its own contributes one function, which has the bits of its
reference: ``ENCODE(keys, values, rows, planes, KV_HEADS, DIM)``.

- keys, values: fp32 `[PAGE, WIDTH]`, K after RoPE and V of one KV head; columns beyond DIM are 0.
- rows: int64 `[PAGE]`, where to write each token: row ``(page * KV_HEADS + kv_head) * PAGE + slot``
  of each plane.
- planes: pointers to the stored planes of the layer, and other inputs of the format.

Other formats contribute ``ENCODE_PAGE`` in place of `encode_vectors`, with the same parameters.
"""

import triton
import triton.language as tl

from runtime.kv.kernels.transforms import widened


@triton.jit
def encode_vectors(
    k_pages, v_pages, k_at, v_at, k_strides, v_strides, target, position, kv_head, planes,
    ENCODE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Encode one KV head of a page.

    Args:
        k_at, v_at: offsets of the page.
        k_strides, v_strides: strides of KV heads and of slots.
        target: stored page, int64.
        position: position of the first token of the page, 0 if it is not known.
        K_WIDTH, V_WIDTH: widths of the first two stored planes.
    """
    slot = tl.arange(0, PAGE)
    d = tl.arange(0, WIDTH)[None, :]
    at = k_at + kv_head * k_strides[0] + slot[:, None] * k_strides[1] + d
    keys = widened(tl.load(k_pages + at, mask=d < DIM, other=0.0))
    at = v_at + kv_head * v_strides[0] + slot[:, None] * v_strides[1] + d
    values = widened(tl.load(v_pages + at, mask=d < DIM, other=0.0))
    ENCODE(keys, values, (target * KV_HEADS + kv_head) * PAGE + slot, planes, KV_HEADS, DIM)


@triton.jit
def encode_kernel(
    keys, values, k_strides, v_strides, sources, targets, positions, planes,
    ENCODE_PAGE: tl.constexpr, ENCODE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Encode pages; grid `(pages, KV_HEADS)`.

    Args:
        keys, values: bf16 `[…, KV_HEADS, PAGE, DIM]`; the last stride is 1.
        k_strides, v_strides: their first three strides.
        sources: int64 `[pages]`, pages of ``keys`` and ``values``; None for the first ones.
        targets: int64 `[pages]`, stored pages.
        positions: int64 `[pages]`, position of the first token of each; None if not known.
        planes: see the head of this file.
        WIDTH: smallest power of two that is at least DIM.
    """
    page = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    target = tl.load(targets + page)
    position = 0
    if positions is not None:
        position = tl.load(positions + page).to(tl.int32)
    if sources is not None:
        page = tl.load(sources + page)
    ENCODE_PAGE(
        keys, values, page * k_strides[0], page * v_strides[0], (k_strides[1], k_strides[2]),
        (v_strides[1], v_strides[2]), target, position, head, planes, ENCODE, KV_HEADS, DIM, WIDTH,
        PAGE, K_WIDTH, V_WIDTH,
    )  # fmt: skip


@triton.jit
def encode_leaving_kernel(
    k_pages, v_pages, page_stride, head_stride, page_table, table_stride, stored_table,
    stored_stride, lengths, planes,
    ENCODE_PAGE: tl.constexpr, ENCODE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, SINK_PAGES: tl.constexpr,
):  # fmt: skip
    """Encode the page of each sequence that leaves the window in this step, if any.

    Grid `(sequences, KV_HEADS)`. A page leaves the window in the step in which ``length - WINDOW``
    becomes a multiple of PAGE.

    Args:
        k_pages, v_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`, of equal strides.
        page_table: int32 `[sequences, pages]`, exact pages, row stride ``table_stride``.
        stored_table: int32 `[sequences, pages]`, stored pages, row stride ``stored_stride``.
        lengths: int32 `[sequences]`.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    old = tl.load(lengths + sequence) - WINDOW  # tokens before the window
    index = old // PAGE - 1
    if (old % PAGE == 0) & (index >= SINK_PAGES):
        source = tl.load(page_table + sequence * table_stride + index).to(tl.int64)
        target = tl.load(stored_table + sequence * stored_stride + index).to(tl.int64)
        at = source * page_stride
        strides = (head_stride, DIM)
        ENCODE_PAGE(
            k_pages, v_pages, at, at, strides, strides, target, index * PAGE, head, planes, ENCODE,
            KV_HEADS, DIM, WIDTH, PAGE, K_WIDTH, V_WIDTH,
        )  # fmt: skip
