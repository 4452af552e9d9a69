# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Encoding of full-precision pages into compressed pages.

A program encodes HEADS KV heads of some pages. Each format contributes one function::

    ENCODE(
        k_pages, v_pages, k_at, v_at, k_stride, v_stride, page, slot, position, head, planes,
        KV_HEADS, HEADS, DIM, PAGE, K_WIDTH, V_WIDTH, STRIDES,
    )

- k_pages, v_pages: bf16 K (after RoPE) and V.
- k_at, v_at: int64 `[TOKENS]`, offset of KV head 0 of each token in ``k_pages`` and ``v_pages``.
- k_stride, v_stride: strides of KV heads.
- page: int64 `[TOKENS]`, compressed page of each token.
- slot: int32 `[TOKENS]`, slot of each token in its page.
- position: int32 `[TOKENS]`; undefined if positions are not known.
- head: first KV head to encode.
- planes: pointers to the compressed planes of the layer, `[page, KV_HEADS, PAGE, width]` with
  contiguous pages, and then other inputs of the format.
- K_WIDTH, V_WIDTH: widths of the first two compressed planes.
- STRIDES: for each compressed plane, elements from a page to the next one.

What a program stores for a token depends on this token alone, and not on the number of tokens and
heads of the program. Quantized formats store the bits of their reference.
"""

import triton
import triton.language as tl

from runtime.kv.kernels.transforms import COLUMNS, MAX_STAGES, widened


@triton.jit
def vectors_at(
    pages, at, stride, head, first, DIM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Load elements ``first`` to ``first + WIDTH`` of all vectors of the program.

    Args:
        pages: K or V; ``at`` and ``stride`` belong to it.
        DIM: elements of a vector; those beyond are 0.
        WIDTH: a power of two.

    Returns:
        fp32 `[HEADS * TOKENS, WIDTH]`.
    """
    heads = head + tl.arange(0, HEADS)[:, None, None]
    c = first + tl.arange(0, WIDTH)[None, None, :]
    own = tl.load(pages + heads * stride + at[None, :, None] + c, mask=c < DIM, other=0.0)
    return widened(tl.reshape(own, (HEADS * at.shape[0], WIDTH)))


@triton.jit
def tiles_at(pages, at, stride, head, DIM: tl.constexpr, HEADS: tl.constexpr):
    """Load all vectors of the program in the tiles of `transforms.hadamard_tiles`, fp32.

    The arguments are those of `vectors_at`. Each tile is loaded on its own, since a thread must
    hold both operands of `tl.join`.
    """
    tiles = ()
    for first in tl.static_range(0, DIM, COLUMNS):
        own = vectors_at(pages, at, stride, head, first, DIM, HEADS, COLUMNS)
        tiles = tiles + (own,)  # type: ignore[assignment]
    for _stage in tl.static_range(MAX_STAGES):
        if len(tiles) > 1:
            pairs = ()
            for j in tl.static_range(len(tiles) // 2):
                both = tl.join(tiles[j], tiles[j + len(tiles) // 2])
                pairs = pairs + (both,)
            tiles = pairs
    return tl.reshape(tiles[0], (HEADS * at.shape[0], COLUMNS, DIM // COLUMNS))  # type: ignore[misc]


@triton.jit
def plane_rows(page, slot, head, HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Return the page, int64, and the row in it, int32, of each vector of `vectors_at`.

    Args:
        page, slot: page and slot of each token, `[TOKENS]`.
        head: first KV head of the program.
    """
    COUNT: tl.constexpr = HEADS * page.shape[0]
    heads = head + tl.arange(0, HEADS)[:, None]
    pages = tl.broadcast_to(page[None, :], (HEADS, page.shape[0]))
    return tl.reshape(pages, (COUNT,)), tl.reshape(heads * PAGE + slot[None, :], (COUNT,))


@triton.jit
def of_layer(keys, values, planes, offsets, layer):
    """Add the offsets of layer ``layer`` to the pointers of the first layer.

    The arguments are those of `encode_kernel`.

    Returns:
        The pointers ``keys``, ``values`` and ``planes`` of the layer.
    """
    row = offsets + layer * (2 + len(planes))
    moved = ()
    for i in tl.static_range(len(planes)):
        plane = planes[i]
        if plane.dtype.is_ptr():
            plane += tl.multiple_of(tl.load(row + 2 + i), 16)
        moved = moved + (plane,)  # type: ignore[assignment]
    keys += tl.multiple_of(tl.load(row), 16)
    values += tl.multiple_of(tl.load(row + 1), 16)
    return keys, values, moved


@triton.jit(
    do_not_specialize=["pages"],
    do_not_specialize_on_alignment=["sources", "targets", "positions"],
)
def encode_kernel(
    keys, values, k_strides, v_strides, pages, sources, targets, positions, planes, offsets,
    ENCODE: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, PAGES: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    STRIDES: tl.constexpr,
):  # fmt: skip
    """Encode pages of one or several layers.

    Grid `(cdiv(pages, PAGES), KV_HEADS / HEADS, layers)`. Programs at the end of the first axis may
    encode the last page more than once.

    Args:
        keys, values: bf16 `[…, KV_HEADS, PAGE, DIM]`; the last stride is 1.
        k_strides, v_strides: their first three strides.
        sources: int64 `[pages]`, pages of ``keys`` and ``values`` to encode; None: the first ones.
        targets: int64 `[pages]`, compressed pages.
        positions: int64 `[pages]`, position of the first token of each page; None if not known.
        planes: see the head of this file.
        offsets: int64 `[layers, 2 + len(planes)]`, distance of ``keys``, ``values`` and each of
            ``planes`` of a layer from those of the first one, in elements, multiples of 16. None
            for one layer.
    """
    t = tl.arange(0, PAGES * PAGE)
    index = tl.minimum(tl.program_id(0) * PAGES + t // PAGE, pages - 1)
    slot = t % PAGE
    page = tl.load(targets + index)
    position = slot
    if positions is not None:
        position += tl.load(positions + index).to(tl.int32)
    source = index.to(tl.int64)
    if sources is not None:
        source = tl.load(sources + index)
    if offsets is not None:
        keys, values, planes = of_layer(keys, values, planes, offsets, tl.program_id(2))
    ENCODE(
        keys, values, source * k_strides[0] + slot * k_strides[2],
        source * v_strides[0] + slot * v_strides[2], k_strides[1], v_strides[1], page, slot,
        position, tl.program_id(1) * HEADS, planes, KV_HEADS, HEADS, DIM, PAGE, K_WIDTH, V_WIDTH,
        STRIDES,
    )  # fmt: skip


@triton.jit
def encode_leaving_kernel(
    k_pages, v_pages, page_stride, head_stride, page_table, table_stride, stored_table,
    stored_stride, lengths, planes, offsets,
    ENCODE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr, WINDOW: tl.constexpr,
    SINK_PAGES: tl.constexpr,
):  # fmt: skip
    """Encode the page of each sequence that leaves the window in this step, if any.

    Grid `(sequences, KV_HEADS, layers)`. A page leaves the window in the step in which
    ``length - WINDOW`` becomes a multiple of PAGE.

    Args:
        k_pages, v_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`, of equal strides.
        page_table: int32 `[sequences, pages]`, full-precision pages, row stride ``table_stride``.
        stored_table: int32 `[sequences, pages]`, compressed pages, row stride ``stored_stride``.
        lengths: int32 `[sequences]`.
        offsets: see `encode_kernel`.
    """
    if offsets is not None:
        k_pages, v_pages, planes = of_layer(k_pages, v_pages, planes, offsets, tl.program_id(2))
    sequence = tl.program_id(0)
    old = tl.load(lengths + sequence) - WINDOW  # number of tokens before the window
    index = old // PAGE - 1
    if (old % PAGE == 0) & (index >= SINK_PAGES):
        source = tl.load(page_table + sequence * table_stride + index).to(tl.int64)
        target = tl.load(stored_table + sequence * stored_stride + index).to(tl.int64)
        slot = tl.arange(0, PAGE)
        at = source * page_stride + slot * DIM
        ENCODE(
            k_pages, v_pages, at, at, head_stride, head_stride, target + tl.zeros_like(at), slot,
            index * PAGE + slot, tl.program_id(1), planes, KV_HEADS, 1, DIM, PAGE, K_WIDTH, V_WIDTH,
            STRIDES,
        )  # fmt: skip
