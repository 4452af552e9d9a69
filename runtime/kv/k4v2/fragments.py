# mypy: ignore-errors
# ruff: noqa: E741, RUF005 - `l` as in the literature; what Triton's compiler supports
"""Attention over `k4v2` by single warps; see `runtime.kv.kernels.fragments`.

Heads must have 128 dimensions. K is as in `int4`. Fragments of V hold ``c - 2`` of
codes c, and `levels_of` adds the sums of weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.kv.int4.fragments import (
    PAGES,
    add_weights,
    bias_products,
    load_keys,
    load_scales,
    scores,
    transformed_queries,
)
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
    sum_of_rows,
    token_of_value,
)

PARTS = 4
"""Parts of ``acc``: one for each position of a code in its byte."""
_HALVES = gl.constexpr(
    "prmt.b32 $0, $4, $5, 0x5410;\nprmt.b32 $1, $6, $7, 0x5410;\n"
    "prmt.b32 $2, $4, $5, 0x7632;\nprmt.b32 $3, $6, $7, 0x7632;"
)


_PLACES = (("0x3f803f80", "0xc302c302"), ("0x3e803e80", "0xc208c208"), ("0x3d803d80", "0xc120c120"))
"""Factor and offset, bf16, that convert 128 + c, 128 + 4 c and 128 + 16 c to ``c - 2``."""


def _unpack() -> str:
    """Return PTX that unpacks the codes of both halves of a word to ``c - 2``.

    Bits 0 to 5 of a half are three codes. As the mantissa of a bf16 number they give 128 to 191,
    from which `_PLACES` extracts the codes.
    """
    lines = [".reg .b32 s, x, f0, o0, f1, o1, f2, o2;"]
    for place, (factor, offset) in enumerate(_PLACES):
        lines += [f"mov.b32 f{place}, {factor};", f"mov.b32 o{place}, {offset};"]
    for code in range(8):
        place = code % 3
        if not place:
            lines.append(f"shr.u32 s, $8, {2 * code};")
        lines.append(f"lop3.b32 x, s, {0x00030003 << 2 * place:#x}, 0x43004300, 0xea;")
        lines.append(f"fma.rn.bf16x2 ${code}, x, f{place}, o{place};")
    return "{\n" + "\n".join(lines) + "\n}"


UNPACK_VALUES = gl.constexpr(_unpack())


@gluon.jit
def halves_of_tokens(words):
    """Return words with the low halves of tokens 0 and 1, 2 and 3, and then their high halves."""
    return gl.inline_asm_elementwise(
        _HALVES, "=&r,=&r,=&r,=&r,r,r,r,r", [words[0], words[1], words[2], words[3]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack_values(word):
    """Unpack the eight codes in each half of a word.

    Returns:
        Eight words of A, ``c - 2`` of two tokens.
    """
    return gl.inline_asm_elementwise(
        UNPACK_VALUES, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [word],
        dtype=(
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
        ),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load_values(v, pages, row, g, t, STRIDE: gl.constexpr, DIM: gl.constexpr):
    """Load codes of V of the four tokens that a lane holds in A, for each page.

    Args:
        v: pointer to the plane of V, bytes; a page has STRIDE bytes, a token ``DIM / 4``.
        pages: int32 page ids, one tensor for each page of a tile.
        row: index of the KV head's first token among the tokens of a page.

    Returns:
        For each page, four words, in the order of `token_of_value`: bytes ``4 g`` to ``4 g + 3``.
    """
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
    """Return the norm of token g, fp32.

    Args:
        pair: word with the bf16 norms of an even token and the next one, one of which is g.
    """
    return gl.where(g % 2 == 0, low_half(pair), high_half(pair))


@gluon.jit
def load_tile(planes, pages, row, g, t, STRIDES: gl.constexpr, DIM: gl.constexpr):
    """Load the codes and scales of K, and the norms and codes of V, of a tile."""
    k, v, k_scale, v_norm = planes
    keys = load_keys(k, pages, row, g, t, STRIDES[0], DIM)
    values = load_values(v, pages, row, g, t, STRIDES[1], DIM)
    scales = load_scales(k_scale, pages, row, g, STRIDES[2])
    return keys, scales, load_norms(v_norm, pages, row, g, STRIDES[3]), values


@gluon.jit
def add_values(acc, words, b):
    """Add the products of a page's codes of V, as ``c - 2``, and its weights to ``acc``.

    Args:
        acc: eight fragments of C: rows are dimensions, columns are heads.
        words: codes of V of the page, see `load_values`.
        b: weights times norms as B, bf16; see `as_operand`.
    """
    halves = halves_of_tokens(words)
    x0, x1 = unpack_values(halves[0]), unpack_values(halves[1])
    x2, x3 = unpack_values(halves[2]), unpack_values(halves[3])
    made = ()
    for i in gl.static_range(4):
        c = multiply(x0[i], x0[4 + i], x1[i], x1[4 + i], b[0], b[1], acc[2 * i], False)
        made = made + (c,)
        c = multiply(x2[i], x2[4 + i], x3[i], x3[4 + i], b[0], b[1], acc[2 * i + 1], False)
        made = made + (c,)
    return made


@gluon.jit
def levels_of(acc, sums):
    """Return weighted sums of ``2 c - 3``.

    Args:
        acc: fragments of C, weighted sums of ``c - 2``.
        sums: sums of the weights of the lane's two heads, over the tokens of its own rows.
    """
    even, odd = sum_of_rows(sums[0]), sum_of_rows(sums[1])
    found = ()
    for n in gl.static_range(len(acc)):
        c = acc[n]
        found = found + ((2 * c[0] + even, 2 * c[1] + odd, 2 * c[2] + even, 2 * c[3] + odd),)
    return found


@gluon.jit
def attend(
    q, kv_head, begin, end, count, planes, table, scale, _shared,
    GROUP: gl.constexpr, DIM: gl.constexpr, STRIDES: gl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed_fragments`."""
    lane, g, t = lane_numbers()
    queries, factor = transformed_queries(q + gl.minimum(g, GROUP - 1) * DIM, DIM)
    scale *= factor
    bias = bias_products(queries, lane)
    acc, m, l = no_tokens(lane, DIM // 16)
    sums = l  # sums of weights times norms, which start at 0 as `l` does
    STEP: gl.constexpr = PAGES * PAGE
    pages = pages_of_tile(table, begin, count, PAGES)
    for first in range(begin, end, STEP):
        keys, k_scales, norms, values = load_tile(planes, pages, kv_head * PAGE, g, t, STRIDES, DIM)
        pages = pages_of_tile(table, first + STEP, count, PAGES)
        s = scores(keys, k_scales, queries, bias, first, count, scale, DIM)
        weights, factors, m, l = softmax(s, m, l, PAGES)
        acc = scaled(acc, factors)
        sums = (sums[0] * factors[0], sums[1] * factors[1])
        for i in gl.static_range(PAGES):
            one, two = norm_of(norms[2 * i], g), norm_of(norms[2 * i + 1], g)
            sums = add_weights(sums, weights[i], one, two)
            acc = add_values(acc, values[i], as_operand(weights[i], one, two, False))
    return levels_of(acc, sums), m, l
