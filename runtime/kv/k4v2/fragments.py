# mypy: ignore-errors
# ruff: noqa: E741, RUF005 - `l` as in the literature; what Triton's compiler supports
"""Attention over `k4v2` by single warps; see `runtime.kv.kernels.fragments`.

Heads must have 128 dimensions. K is that of `int4`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.kv.int4.fragments import (
    PAGES,
    bias_products,
    load_keys,
    load_scales,
    scores,
    transformed_queries,
)
from runtime.kv.k4v2.kernels import HIGH_BYTES, LOW_BYTES
from runtime.kv.kernels.fragments import (
    PAGE,
    as_operand,
    high_half,
    lane_numbers,
    load4,
    low_half,
    multiply,
    no_tokens,
    pages_of_tile,
    scaled,
    softmax,
    token_of_value,
)

PARTS = 4
"""Parts of ``acc``: one for each position of a code in its byte."""
_UNPACK = gl.constexpr(
    "{\n.reg .b32 s, low, high;\n"
    + f"mov.b32 low, {LOW_BYTES:#x};\nmov.b32 high, {HIGH_BYTES:#x};\n"
    + "".join(
        f"shr.u32 s, $8, {2 * n};\nand.b32 s, s, 0x03030303;\n"
        f"mad.lo.u32 s, s, 17, 0x40404040;\nprmt.b32 ${2 * n}, low, high, s;\n"
        f"shr.u32 s, s, 16;\nprmt.b32 ${2 * n + 1}, low, high, s;\n"
        for n in range(4)
    )
    + "}"
)
_TRANSPOSE = gl.constexpr(
    "{\n.reg .b32 x, y, z, w;\n"
    "prmt.b32 x, $4, $5, 0x5140;\nprmt.b32 y, $6, $7, 0x5140;\n"
    "prmt.b32 z, $4, $5, 0x7362;\nprmt.b32 w, $6, $7, 0x7362;\n"
    "prmt.b32 $0, x, y, 0x5410;\nprmt.b32 $1, x, y, 0x7632;\n"
    "prmt.b32 $2, z, w, 0x5410;\nprmt.b32 $3, z, w, 0x7632;\n}"
)


@gluon.jit
def unpack_levels(word):
    """Look up the levels of the codes of four tokens, one byte each; see `kernels.UNPACK`.

    Returns:
        For each position of a code in a byte, a word of A for the first and the last two tokens.
    """
    return gl.inline_asm_elementwise(
        _UNPACK, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [word],
        dtype=(
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
        ),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def transposed_bytes(words):
    """Return words with bytes 0, 1, 2 and 3 of four words."""
    return gl.inline_asm_elementwise(
        _TRANSPOSE, "=&r,=&r,=&r,=&r,r,r,r,r", [words[0], words[1], words[2], words[3]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load_values(v, pages, row, g, t, STRIDE: gl.constexpr, DIM: gl.constexpr):
    """Load codes of V: bytes 4 g to 4 g + 3 of the four tokens of A of each page."""
    values = ()
    own = v + (row + token_of_value(t, 0)) * (DIM // 4) + 4 * g
    for i in gl.static_range(len(pages)):
        words = ()
        for which in gl.static_range(4):
            at = own + pages[i].to(gl.int64) * STRIDE + token_of_value(0, which) * (DIM // 4)
            words = words + (load4(at),)
        values = values + (words,)
    return values


@gluon.jit
def load_norms(plane, pages, row, g, STRIDE: gl.constexpr):
    """Load the norms of tokens g and g + 8 of each page; see `norm_of`."""
    norms = ()
    own = plane + row + g // 2 * 2
    for i in gl.static_range(len(pages)):
        for r in gl.static_range(2):
            norms = norms + (load4(own + pages[i].to(gl.int64) * STRIDE + 8 * r),)
    return norms


@gluon.jit
def norm_of(pair, g):
    """Return the norm of token g from a word with those of tokens g and g + 1, or g - 1 and g."""
    return gl.where(g % 2 == 0, low_half(pair), high_half(pair))


@gluon.jit
def load_tile(planes, pages, row, g, t, STRIDES: gl.constexpr, DIM: gl.constexpr):
    """Load codes, scales and norms of a tile."""
    k, v, k_scale, v_norm = planes
    keys = load_keys(k, pages, row, g, t, STRIDES[0], DIM)
    values = load_values(v, pages, row, g, t, STRIDES[1], DIM)
    scales = load_scales(k_scale, pages, row, g, STRIDES[2])
    return keys, scales, load_norms(v_norm, pages, row, g, STRIDES[3]), values


@gluon.jit
def add_values(acc, words, b):
    """Add the products of a page's levels of V and its weights ``b``.

    Args:
        words: codes of the four tokens of A.
    """
    of_bytes = transposed_bytes(words)
    x0, x1 = unpack_levels(of_bytes[0]), unpack_levels(of_bytes[1])
    x2, x3 = unpack_levels(of_bytes[2]), unpack_levels(of_bytes[3])
    made = ()
    for i in gl.static_range(0, 8, 2):
        c = multiply(x0[i], x1[i], x0[i + 1], x1[i + 1], b[0], b[1], acc[i], False)
        made = made + (c,)
        c = multiply(x2[i], x3[i], x2[i + 1], x3[i + 1], b[0], b[1], acc[i + 1], False)
        made = made + (c,)
    return made


@gluon.jit
def attend(
    q, kv_head, begin, end, count, planes, table, scale,
    GROUP: gl.constexpr, DIM: gl.constexpr, STRIDES: gl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed_fragments`."""
    lane, g, t = lane_numbers()
    queries = transformed_queries(q + gl.minimum(g, GROUP - 1) * DIM, DIM)
    sums = bias_products(queries, lane)
    acc, m, l = no_tokens(lane, DIM // 16)
    STEP: gl.constexpr = PAGES * PAGE
    pages = pages_of_tile(table, begin, count, PAGES)
    for first in range(begin, end, STEP):
        keys, k_scales, norms, values = load_tile(planes, pages, kv_head * PAGE, g, t, STRIDES, DIM)
        pages = pages_of_tile(table, first + STEP, count, PAGES)
        s = scores(keys, k_scales, queries, sums, first, count, scale, DIM)
        weights, factors, m, l = softmax(s, m, l, PAGES)
        acc = scaled(acc, factors)
        for i in gl.static_range(PAGES):
            one, two = norm_of(norms[2 * i], g), norm_of(norms[2 * i + 1], g)
            acc = add_values(acc, values[i], as_operand(weights[i], one, two, False))
    return acc, m, l
