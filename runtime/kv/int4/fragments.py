# mypy: ignore-errors
# ruff: noqa: E741, RUF005, SIM108 - `l` as in the literature; what Triton's compiler supports
"""Attention over `int4` by single warps; see `runtime.kv.kernels.fragments`.

A code c has the value ``c - 7.5``. Fragments of K are fp16: ``1024 + c`` for low nibbles and ``1024
+ 16 c`` for high ones, which takes the fewest instructions. The products of queries and
-1031.5 or -1144 are added to subtract the offsets. Fragments of V are bf16 and hold ``c - 8``,
since sums over many tokens must not lose digits; the sums of weights times 0.5 are added.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.kv.kernels.fragments import (
    PAGE,
    as_operand,
    fp16_words,
    high_half,
    lane_numbers,
    load4,
    load8,
    load16,
    low_half,
    multiply,
    no_sum,
    no_tokens,
    of_other_lane,
    pages_of_tile,
    scaled,
    softmax,
    sum_of_rows,
    token_of_value,
)

PAGES = gl.constexpr(4)
"""Pages per tile."""
PARTS = 2
"""Parts of ``acc``: low and high nibbles."""
_MASK = "lop3.b32 {}, c, 0x000f000f, 0x43004300, 0xea;\n"
"""PTX: nibbles n in bits 0 to 3 of both halves of register ``c`` become the bf16 numbers 128 + n.
"""
_MASK_BIASED = _MASK.format("d") + "sub.rn.bf16x2 {}, d, bias;\n"
_UNPACK_KEYS = gl.constexpr(
    "{\n.reg .b32 c;\nshr.u32 c, $4, 8;\n"
    "lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;\n"
    "lop3.b32 $1, c, 0x000f000f, 0x64006400, 0xea;\n"
    "lop3.b32 $2, $4, 0x00f000f0, 0x64006400, 0xea;\n"
    "lop3.b32 $3, c, 0x00f000f0, 0x64006400, 0xea;\n}"
)
"""PTX: nibbles become fp16 1024 + c or, without a shift, 1024 + 16 c."""
_UNPACK_VALUES = gl.constexpr(
    "{\n.reg .b32 c, d, bias;\nmov.b32 bias, 0x43084308;\n"
    + "".join(
        f"prmt.b32 c, $8, $9, {selector};\n"
        + _MASK_BIASED.format(f"${n}")
        + "shr.u32 c, c, 4;\n"
        + _MASK_BIASED.format(f"${n + 4}")
        for n, selector in enumerate(("0x4400", "0x5511", "0x6622", "0x7733"))
    )
    + "}"
)


@gluon.jit
def unpack_keys(word):
    """Unpack a word of codes of one token.

    Returns:
        Four words of A: low nibbles of bytes 0 and 2, of bytes 1 and 3, then the high nibbles.
    """
    return gl.inline_asm_elementwise(
        _UNPACK_KEYS, "=&r,=&r,=&r,=&r,r", [word],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack_values(first, second):
    """Unpack words of codes of the same dimensions of two tokens.

    Returns:
        Eight words of A: low nibbles of bytes 0 to 3 of both tokens, then the high nibbles.
    """
    return gl.inline_asm_elementwise(
        _UNPACK_VALUES, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [first, second],
        dtype=(
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
        ),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def butterflies(x, STRIDE: gl.constexpr):
    """Return a tuple of tensors, with pairs at distance STRIDE replaced by sum and difference."""
    y = ()
    for i in gl.static_range(len(x)):
        if i & STRIDE:
            y = y + (x[i - STRIDE] - x[i],)
        else:
            y = y + (x[i] + x[i + STRIDE],)
    return y


@gluon.jit
def butterflies_of_lanes(x, lane, MASK: gl.constexpr):
    """Replace elements of lanes whose numbers differ in the bit MASK by sum and difference.

    Args:
        x: tuple of fp32 tensors.
    """
    y = ()
    for i in gl.static_range(len(x)):
        other = of_other_lane(x[i], MASK)
        y = y + (gl.where((lane & MASK) != 0, other - x[i], x[i] + other),)
    return y


@gluon.jit
def transformed_queries(q, DIM: gl.constexpr):
    """Load queries and return their Hadamard transform as B in fp16, scaled by a power of two.

    Returns the words of B and the factor that undoes the scale; see `fp16_words`.

    Lane ``4 g + t`` has dimensions ``DIM / 8 t + i`` of both halves of head g. The words are those
    of the low half, in the order of `unpack_keys`, then those of the high half.

    Args:
        q: pointer of each lane to its query head.
    """
    lane, _, t = lane_numbers()
    x = ()
    for half in gl.static_range(2):
        for part in gl.static_range(DIM // 64):
            words = load16(q + half * (DIM // 2) + t * (DIM // 8) + 8 * part)
            for i in gl.static_range(4):
                x = x + (low_half(words[i]), high_half(words[i]))
    x = butterflies(butterflies(butterflies(x, 1), 2), 4)
    if DIM == 128:
        x = butterflies(x, 8)
    x = butterflies_of_lanes(butterflies_of_lanes(x, lane, 1), lane, 2)
    x = butterflies(x, DIM // 8)
    NORM: gl.constexpr = DIM**-0.5
    y = ()
    for i in gl.static_range(0, DIM // 4, 4):
        for first in gl.static_range(2):
            y = y + (x[i + first] * NORM, x[i + first + 2] * NORM)
    return fp16_words(y)


@gluon.jit
def bias_products(queries, lane):
    """Return the products of queries and the offsets of codes, which are constant.

    Returns:
        Two fragments of C whose rows are equal: -1031.5 times the sum of the low half of each
        query, and -1144 times the sum of its high half.
    """
    low, high = no_sum(lane), no_sum(lane)
    COUNT: gl.constexpr = len(queries) // 2
    for part in gl.static_range(2):
        of_low = lane * 0 - (0x387F3880 if part else 0x1BFF1C00)  # -7.5 or -1024, twice
        of_high = lane * 0 - (0x287F2880 if part else 0x1BFF1C00)  # -120 or -1024, twice
        for j in gl.static_range(0, COUNT, 2):
            b0, b1 = queries[j], queries[j + 1]
            low = multiply(of_low, of_low, of_low, of_low, b0, b1, low, True)
            b0, b1 = queries[COUNT + j], queries[COUNT + j + 1]
            high = multiply(of_high, of_high, of_high, of_high, b0, b1, high, True)
    return low, high


@gluon.jit
def load_keys(k, pages, row, g, t, STRIDE: gl.constexpr, DIM: gl.constexpr):
    """Load codes of K of tokens g and g + 8 of each page.

    Args:
        k: pointer to the plane of K, bytes; a page has STRIDE bytes, a token ``DIM / 2``.
        pages: int32 page ids, one tensor for each page of a tile.
        row: index of the KV head's first token among the tokens of a page.

    Returns:
        For each page and each of the two tokens, a tuple of words: ``DIM / 8`` bytes of the token,
        from byte ``t DIM / 8`` on.
    """
    keys = ()
    own = k + (row + g) * (DIM // 2) + t * (DIM // 8)
    for i in gl.static_range(len(pages)):
        for r in gl.static_range(2):
            at = own + pages[i].to(gl.int64) * STRIDE + 8 * r * (DIM // 2)
            if DIM == 128:
                keys = keys + (load16(at),)
            else:
                keys = keys + (load8(at),)
    return keys


@gluon.jit
def load_scales(plane, pages, row, g, STRIDE: gl.constexpr):
    """Load the scales of tokens g and g + 8 of each page: two bf16 numbers in a word.

    Args:
        plane: pointer to a plane of scales; the other arguments are those of `load_keys`.
    """
    words = ()
    own = plane + (row + g) * 2
    for i in gl.static_range(len(pages)):
        for r in gl.static_range(2):
            words = words + (load4(own + pages[i].to(gl.int64) * STRIDE + 16 * r),)
    return words


@gluon.jit
def scores(keys, scales, queries, sums, first, count, scale, DIM: gl.constexpr):
    """Return the scaled scores of each page, fragments of C; -inf for tokens from ``count`` on.

    Args:
        first: number of the tile's first token.
        scale: factor of all scores.
        keys, scales: see `load_keys` and `load_scales`.
        queries, sums: see `transformed_queries` and `bias_products`.
    """
    HIGH: gl.constexpr = DIM // 16
    found = ()
    for i in gl.static_range(PAGES):
        a, b = sums
        for j in gl.static_range(DIM // 32):
            x = unpack_keys(keys[2 * i][j])
            y = unpack_keys(keys[2 * i + 1][j])
            b0, b1 = queries[2 * j], queries[2 * j + 1]
            a = multiply(x[0], y[0], x[1], y[1], b0, b1, a, True)
            b0, b1 = queries[HIGH + 2 * j], queries[HIGH + 2 * j + 1]
            b = multiply(x[2], y[2], x[3], y[3], b0, b1, b, True)
        inside = first + i * PAGE < count
        of_page = ()
        for r in gl.static_range(2):
            of_low = low_half(scales[2 * i + r]) * scale
            of_high = high_half(scales[2 * i + r]) * (scale * 0.0625)
            for head in gl.static_range(2):
                s = a[2 * r + head] * of_low + b[2 * r + head] * of_high
                of_page = of_page + (gl.where(inside, s, float("-inf")),)
        found = found + (of_page,)
    return found


@gluon.jit
def add_values(acc, words, low, high, DIM: gl.constexpr):
    """Add the products of a page's codes of V, as ``c - 8``, and its weights to ``acc``.

    Args:
        acc: ``DIM / 16`` fragments of C, whose rows are dimensions and whose columns are heads:
            first those of the low nibbles, then those of the high nibbles.
        words: codes of V of the page, see `load_values`.
        low, high: weights times the scale of the low or high nibbles, as B, bf16; see `as_operand`.
    """
    TILES: gl.constexpr = DIM // 32
    of_low, of_high = (), ()
    for h in gl.static_range(DIM // 64):
        x = unpack_values(words[0][h], words[1][h])
        y = unpack_values(words[2][h], words[3][h])
        for e in gl.static_range(0, 4, 2):
            c = acc[2 * h + e // 2]
            c = multiply(x[e], x[e + 1], y[e], y[e + 1], low[0], low[1], c, False)
            of_low = of_low + (c,)
            c = acc[TILES + 2 * h + e // 2]
            c = multiply(x[4 + e], x[5 + e], y[4 + e], y[5 + e], high[0], high[1], c, False)
            of_high = of_high + (c,)
    return of_low + of_high


@gluon.jit
def add_weights(sums, weights, first, second):
    """Add the products of a page's weights and scales to the sums of the lane's two heads.

    Args:
        sums: two fp32 sums over the tokens of the lane's rows.
        weights: fragment of C, fp32.
        first, second: scales of tokens g and g + 8.
    """
    even = sums[0] + (weights[0] * first + weights[2] * second)
    return even, sums[1] + (weights[1] * first + weights[3] * second)


@gluon.jit
def load_values(v, pages, row, g, t, STRIDE: gl.constexpr, DIM: gl.constexpr):
    """Load codes of V of the four tokens that a lane holds in A, for each page.

    Args:
        v: pointer to the plane of V, bytes; the other arguments are those of `load_keys`.

    Returns:
        For each page, four tuples of words, in the order of `token_of_value`: ``DIM / 16`` bytes
        of the token from byte ``g DIM / 16`` on.
    """
    values = ()
    own = v + (row + token_of_value(t, 0)) * (DIM // 2) + g * (DIM // 16)
    for i in gl.static_range(len(pages)):
        words = ()
        for which in gl.static_range(4):
            at = own + pages[i].to(gl.int64) * STRIDE + token_of_value(0, which) * (DIM // 2)
            if DIM == 128:
                words = words + (load8(at),)
            else:
                words = words + ((load4(at),),)
        values = values + (words,)
    return values


@gluon.jit
def load_tile(planes, pages, row, g, t, STRIDES: gl.constexpr, DIM: gl.constexpr):
    """Load the codes of K, the scales of K, the scales of V and the codes of V of a tile.

    Args:
        planes: pointers to the planes of K, V, and their scales.
        pages, row: see `load_keys`.
    """
    k, v, k_scale, v_scale = planes
    keys = load_keys(k, pages, row, g, t, STRIDES[0], DIM)
    values = load_values(v, pages, row, g, t, STRIDES[1], DIM)
    k_scales = load_scales(k_scale, pages, row, g, STRIDES[2])
    return keys, k_scales, load_scales(v_scale, pages, row, g, STRIDES[3]), values


@gluon.jit
def attend(
    q, kv_head, begin, end, count, planes, table, scale, _shared,
    GROUP: gl.constexpr, DIM: gl.constexpr, STRIDES: gl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed_fragments`."""
    lane, g, t = lane_numbers()
    queries, factor = transformed_queries(q + gl.minimum(g, GROUP - 1) * DIM, DIM)
    scale *= factor
    sums = bias_products(queries, lane)
    acc, m, l = no_tokens(lane, DIM // 16)
    # Sums of weights times scales, which start at 0 as `l` does.
    of_low, of_high = l, l
    STEP: gl.constexpr = PAGES * PAGE
    pages = pages_of_tile(table, begin, count, PAGES)
    for first in range(begin, end, STEP):
        keys, k_scales, v_scales, values = load_tile(
            planes, pages, kv_head * PAGE, g, t, STRIDES, DIM
        )
        pages = pages_of_tile(table, first + STEP, count, PAGES)
        s = scores(keys, k_scales, queries, sums, first, count, scale, DIM)
        weights, factors, m, l = softmax(s, m, l, PAGES)
        acc = scaled(acc, factors)
        of_low = (of_low[0] * factors[0], of_low[1] * factors[1])
        of_high = (of_high[0] * factors[0], of_high[1] * factors[1])
        for i in gl.static_range(PAGES):
            own = weights[i]
            one, two = low_half(v_scales[2 * i]), low_half(v_scales[2 * i + 1])
            of_low = add_weights(of_low, own, one, two)
            low = as_operand(own, one, two, False)
            one, two = high_half(v_scales[2 * i]), high_half(v_scales[2 * i + 1])
            of_high = add_weights(of_high, own, one, two)
            acc = add_values(acc, values[i], low, as_operand(own, one, two, False), DIM)
    low = (sum_of_rows(of_low[0]), sum_of_rows(of_low[1]))
    high = (sum_of_rows(of_high[0]), sum_of_rows(of_high[1]))
    found = ()
    for n in gl.static_range(DIM // 16):
        c = acc[n]
        o = low if n < DIM // 32 else high
        found = found + ((2 * c[0] + o[0], 2 * c[1] + o[1], 2 * c[2] + o[0], 2 * c[3] + o[1]),)
    return found, m, l
