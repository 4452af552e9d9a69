# mypy: ignore-errors
# ruff: noqa: E741, RUF005, SIM108 - `l` as in the literature; what Triton's compiler supports
"""Attention over `fp8` and `fp8-e5m2` by single warps; see `runtime.kv.kernels.fragments`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.kv.kernels.fragments import (
    PAGE,
    as_operand,
    fp16_words,
    high_half,
    lane_numbers,
    largest_of_rows,
    load4,
    load8,
    load16,
    low_half,
    multiply,
    no_sum,
    no_tokens,
    pages_of_tile,
    power_of_two,
    scaled,
    softmax,
    token_of_value,
)

PAGES = gl.constexpr(2)
"""Pages per tile."""
PARTS = 1
_E4M3 = gl.constexpr(
    "{\n.reg .b16 a, b;\nmov.b32 {a, b}, $2;\n"
    "cvt.rn.f16x2.e4m3x2 $0, a;\ncvt.rn.f16x2.e4m3x2 $1, b;\n}"
)
_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404;\nprmt.b32 $1, $2, 0, 0x3424;")
_INTERLEAVE = gl.constexpr("prmt.b32 $0, $2, $3, 0x5140;\nprmt.b32 $1, $2, $3, 0x7362;")


@gluon.jit
def unpack(word, E5M2: gl.constexpr):
    """Convert the four codes of a word to fp16.

    Returns:
        Two words: the numbers of bytes 0 and 1, and those of bytes 2 and 3.
    """
    return gl.inline_asm_elementwise(
        _E5M2 if E5M2 else _E4M3, "=&r,=&r,r", [word],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def interleaved(x, y):
    """Interleave the bytes of two words.

    Returns:
        Two words, from the lowest byte: x0, y0, x1, y1, and x2, y2, x3, y3.
    """
    return gl.inline_asm_elementwise(
        _INTERLEAVE, "=&r,=&r,r,r", [x, y], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def fp16_queries(q, t, DIM: gl.constexpr):
    """Load queries as B in fp16, scaled by a power of two.

    Returns the words of B and the factor that undoes the scale; see `fp16_words`.

    Lane ``4 g + t`` has dimensions ``64 c + 16 t + i`` of head g.

    Args:
        q: pointer of each lane to its query head.
    """
    x = ()
    for c in gl.static_range(DIM // 64):
        for part in gl.static_range(2):
            words = load16(q + 64 * c + 16 * t + 8 * part)
            for i in gl.static_range(4):
                x = x + (low_half(words[i]), high_half(words[i]))
    return fp16_words(x)


@gluon.jit
def load_keys(k, pages, row, g, t, STRIDE: gl.constexpr, DIM: gl.constexpr):
    """Load codes of K of tokens g and g + 8 of each page.

    Args:
        k: pointer to the plane of K, bytes; a page has STRIDE bytes, a token DIM.
        pages: int32 page ids, one tensor for each page of a tile.
        row: index of the KV head's first token among the tokens of a page.

    Returns:
        For each page and each of the two tokens, a tuple of ``DIM / 64`` groups of four words:
        group c has bytes ``64 c + 16 t`` to ``64 c + 16 t + 15`` of the token.
    """
    keys = ()
    own = k + (row + g) * DIM + 16 * t
    for i in gl.static_range(len(pages)):
        for r in gl.static_range(2):
            words = ()
            at = own + pages[i].to(gl.int64) * STRIDE + 8 * r * DIM
            for c in gl.static_range(DIM // 64):
                words = words + (load16(at + 64 * c),)
            keys = keys + (words,)
    return keys


@gluon.jit
def load_values(v, pages, row, g, t, STRIDE: gl.constexpr, DIM: gl.constexpr):
    """Load codes of V of the four tokens that a lane holds in A, for each page.

    Args:
        v: pointer to the plane of V, bytes; the other arguments are those of `load_keys`.

    Returns:
        For each page, four tuples of words, in the order of `token_of_value`: ``DIM / 8`` bytes
        of the token from byte ``g DIM / 8`` on.
    """
    values = ()
    own = v + (row + token_of_value(t, 0)) * DIM + g * (DIM // 8)
    for i in gl.static_range(len(pages)):
        words = ()
        for which in gl.static_range(4):
            at = own + pages[i].to(gl.int64) * STRIDE + token_of_value(0, which) * DIM
            if DIM == 128:
                words = words + (load16(at),)
            else:
                words = words + (load8(at),)
        values = values + (words,)
    return values


@gluon.jit
def load_exponents(plane, pages, row, g, STRIDE: gl.constexpr):
    """Load the scales of tokens g and g + 8 of each page, as biased exponents.

    Args:
        plane: pointer to a plane of scales, uint8; the other arguments are those of `load_keys`.

    Returns:
        int32, two for each page.
    """
    exponents = ()
    own = plane + row + g // 4 * 4
    for i in gl.static_range(len(pages)):
        for r in gl.static_range(2):
            word = load4(own + pages[i].to(gl.int64) * STRIDE + 8 * r)
            exponents = exponents + ((word >> (8 * (g % 4))) & 255,)
    return exponents


@gluon.jit
def scores(keys, exponents, queries, first, count, scale, DIM: gl.constexpr, E5M2: gl.constexpr):
    """Return the scaled scores of each page, fragments of C; -inf for tokens from ``count`` on.

    Args:
        keys, exponents: see `load_keys` and `load_exponents`.
        queries: words of B, see `fp16_queries`.
        first: number of the tile's first token.
        scale: factor of all scores.
    """
    lane, _, _ = lane_numbers()
    found = ()
    for i in gl.static_range(PAGES):
        s = no_sum(lane)
        for c in gl.static_range(DIM // 64):
            for j in gl.static_range(4):
                x = unpack(keys[2 * i][c][j], E5M2)
                y = unpack(keys[2 * i + 1][c][j], E5M2)
                b0, b1 = queries[8 * c + 2 * j], queries[8 * c + 2 * j + 1]
                s = multiply(x[0], y[0], x[1], y[1], b0, b1, s, True)
        inside = first + i * PAGE < count
        of_page = ()
        for r in gl.static_range(2):
            by = power_of_two(exponents[2 * i + r]) * scale
            for head in gl.static_range(2):
                of_page = of_page + (gl.where(inside, s[2 * r + head] * by, float("-inf")),)
        found = found + (of_page,)
    return found


@gluon.jit
def largest_exponent(top, exponents):
    """Return the largest of ``top`` and the biased exponents below 255 (finite), in all lanes."""
    for i in gl.static_range(len(exponents)):
        top = gl.maximum(top, gl.where(exponents[i] < 255, exponents[i], 0))
    return largest_of_rows(top.to(gl.float32)).to(gl.int32)


@gluon.jit
def relative_scale(exponent, top):
    """Return the fp32 scale ``2 ** (exponent - top + 14)``; infinity if the exponent is 255.

    Args:
        exponent, top: biased exponents, int32.
    """
    relative = gl.maximum(exponent - top + 141, 0)
    return power_of_two(gl.where(exponent < 255, relative, 255))


@gluon.jit
def add_values(acc, words, b, DIM: gl.constexpr, E5M2: gl.constexpr):
    """Add the products of a page's V and its weights to ``acc``.

    Args:
        acc: ``DIM / 16`` fragments of C: rows are dimensions, columns are heads.
        words: codes of V of the page, see `load_values`.
        b: weights times scales as B, fp16, see `as_operand`.
    """
    made = ()
    for j in gl.static_range(DIM // 32):
        first = interleaved(words[0][j], words[1][j])
        last = interleaved(words[2][j], words[3][j])
        for e in gl.static_range(2):
            x, y = unpack(first[e], E5M2), unpack(last[e], E5M2)
            c = multiply(x[0], x[1], y[0], y[1], b[0], b[1], acc[2 * j + e], True)
            made = made + (c,)
    return made


@gluon.jit
def attend(
    q, kv_head, begin, end, count, planes, table, scale, _shared,
    GROUP: gl.constexpr, DIM: gl.constexpr, STRIDES: gl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed_fragments`, and `kernels.attend` for the scales."""
    k, v, k_scale, v_scale = planes
    E5M2: gl.constexpr = v.dtype.element_ty == gl.float8e5
    lane, g, t = lane_numbers()
    queries, factor = fp16_queries(q + gl.minimum(g, GROUP - 1) * DIM, t, DIM)
    acc, m, l = no_tokens(lane, DIM // 16)
    top = lane * 0  # the largest scale so far, as a biased exponent
    row = kv_head * PAGE
    pages = pages_of_tile(table, begin, count, PAGES)
    for first in range(begin, end, PAGES * PAGE):
        own = pages
        pages = pages_of_tile(table, first + PAGES * PAGE, count, PAGES)
        keys = load_keys(k, own, row, g, t, STRIDES[0], DIM)
        k_exponents = load_exponents(k_scale, own, row, g, STRIDES[2])
        v_exponents = load_exponents(v_scale, own, row, g, STRIDES[3])
        values = load_values(v, own, row, g, t, STRIDES[1], DIM)
        s = scores(keys, k_exponents, queries, first, count, factor * scale, DIM, E5M2)
        weights, factors, m, l = softmax(s, m, l, PAGES)
        used = ()
        for i in gl.static_range(2 * PAGES):
            inside = first + i // 2 * PAGE < count
            used = used + (gl.where(inside, v_exponents[i], 0),)
        new_top = largest_exponent(top, used)
        down = power_of_two(gl.maximum(top - new_top + 127, 0))
        top = new_top
        acc = scaled(acc, (factors[0] * down, factors[1] * down))
        for i in gl.static_range(PAGES):
            one = relative_scale(used[2 * i], top)
            two = relative_scale(used[2 * i + 1], top)
            acc = add_values(acc, values[i], as_operand(weights[i], one, two, True), DIM, E5M2)
    unit = power_of_two(gl.maximum(top, 15) - 14)
    return scaled(acc, (unit, unit)), m, l
