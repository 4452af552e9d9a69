# mypy: ignore-errors
# ruff: noqa: E741, RUF005 - `l` as in the literature; what Triton's compiler supports
"""Attention over `shard` by warp groups, on Hopper GPUs; see `runtime.kv.kernels.fragments`.

A program has four warps. One fp8 matmul of all of them, with weights in shared memory, computes
the keys of a tile of 64 tokens before RoPE. Each warp gets the keys of one page as fragments of C:
lane ``4 g + t`` has dimensions ``8 i + 2 t`` and the next one of tokens g and g + 8, for all i.
Pairs of dimensions are rotated in registers and become A of the matmul with the queries. From there
on, the warps are independent; their results are merged at the end of an interval.

Keys are rotated by their distance from a position, and queries back by this position, which is the
same for REACH tokens. The tables of angles thus have REACH rows and stay in the L1 cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runtime.kv.int4.fragments import add_weights
from runtime.kv.k4v2.fragments import add_values, levels_of, load_norms, load_values, norm_of
from runtime.kv.kernels.fragments import (
    NO_SCORE,
    PAGE,
    as_operand,
    fp16_scale,
    high_half,
    lane_numbers,
    load4,
    load8,
    load16,
    low_half,
    multiply,
    no_sum,
    no_tokens,
    packed,
    scaled,
    softmax,
    warp_number,
)
from runtime.kv.kernels.splits import SHARED_BYTES
from runtime.kv.shard import fragment_inputs
from runtime.pages import window

PARTS = 4
"""Parts of ``acc``: one for each position of a code in its byte."""
WARPS = gl.constexpr(4)
TILE, REACH = gl.constexpr(fragment_inputs.TILE), gl.constexpr(fragment_inputs.REACH)
TOKEN, DIMS = gl.constexpr(fragment_inputs.TOKEN), gl.constexpr(fragment_inputs.DIMS)
SINK_PAGES = gl.constexpr(window.SINK_PAGES)
_STEPS = fragment_inputs.STEPS
_WEIGHTS = fragment_inputs.WEIGHTS
assert _WEIGHTS <= SHARED_BYTES
_PRODUCTS = fragment_inputs.DIMS // 4
"""Words of products per lane."""
_DESCRIPTOR = -(1 << 31) + 32
"""High word of the matrix descriptor: rows are swizzled in 64 bytes; 512 bytes for eight rows."""


def _copy() -> str:
    """Return PTX with which 128 threads copy the weights of a KV head to shared memory."""
    lines = [".reg .b32 a, b, c, d;", "mov.b32 $0, 0;", "bar.sync 0;"]
    for offset in range(0, _WEIGHTS, 128 * 16):
        lines += [f"ld.global.nc.v4.b32 {{a, b, c, d}}, [$1+{offset}];"]
        lines += [f"st.shared.v4.b32 [$2+{offset}], {{a, b, c, d}};"]
    lines += ["fence.proxy.async.shared::cta;", "bar.sync 0;"]
    return "{\n" + "\n".join(lines) + "\n}"


def _multiply_codes() -> str:
    """Return PTX that multiplies the codes of 64 tokens by the weights in shared memory.

    Outputs are the words of C. Inputs are the words of A of all steps, and the address of the
    weights: blocks of two steps, whose rows have 64 bytes of a dimension.
    """
    words = 4 * _STEPS
    made = ", ".join(f"${i}" for i in range(_PRODUCTS))
    lines = [".reg .b32 x;", ".reg .b64 d;", ".reg .pred p;"]
    lines += [f"shr.u32 x, ${_PRODUCTS + words}, 4;", f"mov.b64 d, {{x, {_DESCRIPTOR}}};"]
    lines += ["wgmma.fence.sync.aligned;"]
    for step in range(_STEPS):
        a = ", ".join(f"${_PRODUCTS + 4 * step + i}" for i in range(4))
        # Addresses are in units of 16 bytes.
        forward = 2 if step % 2 == 0 else 4 * fragment_inputs.DIMS - 2
        lines += [
            f"setp.ne.b32 p, {step}, 0;",
            f"wgmma.mma_async.sync.aligned.m64n{fragment_inputs.DIMS}k32.f16.e4m3.e4m3 "
            f"{{{made}}}, {{{a}}}, d, p, 1, 1;",
            f"add.s64 d, d, {forward};",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    return "{\n" + "\n".join(lines) + "\n}"


_COPY = gl.constexpr(_copy())
_MULTIPLY = gl.constexpr(_multiply_codes())
_MULTIPLY_REGISTERS = gl.constexpr(",".join(["=&r"] * _PRODUCTS + ["r"] * (4 * _STEPS + 1)))
_PRODUCT_TYPES = gl.constexpr((gl.int32,) * _PRODUCTS)
_LOAD_CACHED = gl.constexpr("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];")
_UNPACK = gl.constexpr("""{
and.b32 $0, $4, 0x0f0f0f0f;
and.b32 $1, $5, 0x0f0f0f0f;
shr.u32 $2, $4, 4;
and.b32 $2, $2, 0x0f0f0f0f;
shr.u32 $3, $5, 4;
and.b32 $3, $3, 0x0f0f0f0f;
}""")
_ROTATE = gl.constexpr("""{
.reg .b32 n, x, y;
neg.f16x2 n, $5;
mul.rn.f16x2 x, $2, $4;
fma.rn.f16x2 $0, $3, n, x;
mul.rn.f16x2 y, $3, $4;
fma.rn.f16x2 $1, $2, $5, y;
}""")


@gluon.jit
def copy_weights(weights, shared, thread):
    """Copy the weights of a KV head to shared memory.

    Args:
        weights: pointer to the head's weights, see `fragment_inputs.lane_weights`.
        shared: address of shared memory.
        thread: number of each thread in the program, 0 to 127.
    """
    gl.inline_asm_elementwise(
        _COPY, "=r,l,r", [(weights + 16 * thread).to(gl.int64), shared + 16 * thread],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply_codes(a, shared):
    """Return products of codes and weights, fp16.

    Args:
        a: words of A of the warp's page, for each step of 32 codes.

    Returns:
        For each eight dimensions, the words of tokens g and g + 8.
    """
    return gl.inline_asm_elementwise(
        _MULTIPLY, _MULTIPLY_REGISTERS, a + (shared,), dtype=_PRODUCT_TYPES, is_pure=False, pack=1
    )


@gluon.jit
def unpack_codes(first, second):
    """Unpack a word of codes of token g and one of token g + 8 to words of A, fp8.

    The words of the low nibbles precede those of the high nibbles. The bits of a nibble n are the
    e4m3 number n / 512.
    """
    return gl.inline_asm_elementwise(
        _UNPACK, "=&r,=&r,=&r,=&r,r,r", [first, second],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def add_fp16_pairs(x, y):
    """Return the sums of two words of two fp16 numbers each."""
    return gl.inline_asm_elementwise(
        "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def rotated_words(first, second, cos, sin):
    """Apply RoPE to words of two fp16 numbers.

    Args:
        first, second: words of the first and of the second dimensions of two pairs.
        cos, sin: words of the cosines and sines of the two pairs.

    Returns:
        The rotated words ``first`` and ``second``.
    """
    return gl.inline_asm_elementwise(
        _ROTATE, "=&r,=&r,r,r,r,r", [first, second, cos, sin],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load_cached(pointer):
    """Load four words per lane, as `load16`, and keep them in the L1 cache."""
    return gl.inline_asm_elementwise(
        _LOAD_CACHED, "=r,=r,=r,=r,l", [pointer.to(gl.int64)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load_floats(pointer):
    """Load two fp32 numbers per lane."""
    return gl.inline_asm_elementwise(
        "ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [pointer.to(gl.int64)],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load_codes(k, page, g, t, STRIDE: gl.constexpr):
    """Load the codes of K of tokens g and g + 8 of a page.

    A lane loads bytes ``16 t`` to ``16 t + 15`` of the first 64 bytes of a token, and bytes ``8 t``
    to ``8 t + 7`` of the other 32.

    Args:
        k: pointer to the plane of K, bytes; a token has 96 bytes for all KV heads.
        page: page id; consecutive pages are STRIDE bytes apart.
    """
    at = k + page.to(gl.int64) * STRIDE + g * TOKEN
    low, high = at + 8 * t, at + (8 * TOKEN) + 8 * t
    return load16(low + 8 * t) + load8(low + 64), load16(high + 8 * t) + load8(high + 64)


@gluon.jit
def load_page(planes, page, row, g, t, STRIDES: gl.constexpr, DIM: gl.constexpr):
    """Load the codes of K, the codes of V and the norms of a page."""
    codes = load_codes(planes[0], page, g, t, STRIDES[0])
    values = load_values(planes[1], (page,), row, g, t, STRIDES[1], DIM)[0]
    return codes, values, load_norms(planes[2], (page,), row, g, STRIDES[2])


@gluon.jit
def key_scores(products, offsets, angles, queries):
    """Return the scores of a page of keys, a fragment of C.

    Args:
        products: see `multiply_codes`.
        offsets: pointer to the lane's offsets of products.
        angles: pointer to the lane's cosines and sines.
        queries: for each eight pairs of dimensions, B.
    """
    lane, _, _ = lane_numbers(WARPS)
    s = no_sum(lane)
    HALF: gl.constexpr = DIMS // 16
    of_dims = ()
    for i in gl.static_range(HALF // 2):
        of_dims = of_dims + load_cached(offsets + 8 * i)
    for j in gl.static_range(HALF):
        of_first, of_second = of_dims[j], of_dims[j + HALF]
        x0 = add_fp16_pairs(products[2 * j], of_first)
        y0 = add_fp16_pairs(products[2 * (j + HALF)], of_second)
        x1 = add_fp16_pairs(products[2 * j + 1], of_first)
        y1 = add_fp16_pairs(products[2 * (j + HALF) + 1], of_second)
        angle = load_cached(angles + 256 * j)
        a0, a2 = rotated_words(x0, y0, angle[0], angle[1])
        a1, a3 = rotated_words(x1, y1, angle[2], angle[3])
        b = queries[j]
        s = multiply(a0, a1, a2, a3, b[0], b[1], s, True)
    return s


@gluon.jit
def load_queries(q, t):
    """Load queries as fp32.

    Returns:
        For each eight pairs of dimensions, dimensions 2 t and 2 t + 1 of the first half of a head,
        and of the second half.
    """
    x = ()
    for j in gl.static_range(DIMS // 16):
        first, second = load4(q + 8 * j + 2 * t), load4(q + DIMS // 2 + 8 * j + 2 * t)
        x = x + (low_half(first), high_half(first), low_half(second), high_half(second))
    return x


@gluon.jit
def rotated_queries(q, cos, sin, factor, t):
    """Return B, queries rotated back by the angles in a row of ``cos`` and ``sin``, times a factor.

    Returns:
        For each eight pairs of dimensions, the words of the first and of the second half.
    """
    x = load_queries(q, t)
    b = ()
    for j in gl.static_range(DIMS // 16):
        c, s = load_floats(cos + 8 * j + 2 * t), load_floats(sin + 8 * j + 2 * t)
        c0, c1, s0, s1 = c[0] * factor, c[1] * factor, s[0] * factor, s[1] * factor
        first = packed(
            x[4 * j] * c0 + x[4 * j + 2] * s0, x[4 * j + 1] * c1 + x[4 * j + 3] * s1, True
        )
        second = packed(
            x[4 * j + 2] * c0 - x[4 * j] * s0, x[4 * j + 3] * c1 - x[4 * j + 1] * s1, True
        )
        b = b + ((first, second),)
    return b


@gluon.jit
def own_page(table, first, count, warp):
    """Return the id of the page that a warp computes, in the tile from token ``first`` on.

    If the page begins at or after token ``count``, the id of the last page is returned.

    Args:
        table: pointer to int32 page ids of the sequence.
    """
    return gl.load(table + gl.minimum(first // PAGE + warp, count // PAGE - 1))


@gluon.jit
def attend(
    q, kv_head, begin, end, count, planes, table, scale, shared,
    GROUP: gl.constexpr, DIM: gl.constexpr, STRIDES: gl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed_fragments`."""
    _, _, _, _, _, units, _, _, _, cos, sin, weights, offsets, angles = planes
    lane, g, t = lane_numbers(WARPS)
    warp = warp_number(WARPS)
    copy_weights(weights + kv_head * (2 * DIM * TOKEN), shared, 32 * warp + lane)
    HALF: gl.constexpr = DIM // 16
    offsets += (kv_head * 4 + t) * (DIM // 4)
    angles += (warp * HALF * 32 + lane) * 8
    q += gl.minimum(g, GROUP - 1) * DIM
    up, down = fp16_scale(load_queries(q, t))
    # Rotated queries are larger, by the rotation and by YaRN's factor.
    up, down = up * 0.25, down * 4
    position = (SINK_PAGES * PAGE + begin) * (DIM // 2)
    queries = rotated_queries(q, cos + position, sin + position, up, t)
    scale = scale * gl.load(units + kv_head) * down
    acc, m, l = no_tokens(lane, DIM // 16)
    sums = l  # sums of weights times norms, which start at 0 as `l` does
    row = kv_head * PAGE
    page = own_page(table, begin, count, warp)
    codes, values, norms = load_page(planes, page, row, g, t, STRIDES, DIM)
    page = own_page(table, begin + TILE, count, warp)
    for first in range(begin, end, TILE):
        a = ()
        for n in gl.static_range(len(codes[0])):
            a = a + unpack_codes(codes[0][n], codes[1][n])
        own_values, own_norms = values, norms
        codes, values, norms = load_page(planes, page, row, g, t, STRIDES, DIM)
        # A 0 that the compiler does not know. Without it, all angles would be loaded before the
        # loop, into more registers than there are.
        zero = (page >> 31).to(gl.int64)
        used = first + PAGE * warp < count
        page = own_page(table, first + 2 * TILE, count, warp)
        products = multiply_codes(a, shared)
        near = angles + (zero + (first - begin) % REACH * DIM)
        s = key_scores(products, offsets + zero, near, queries)
        s = (
            gl.where(used, s[0] * scale, NO_SCORE),
            gl.where(used, s[1] * scale, NO_SCORE),
            gl.where(used, s[2] * scale, NO_SCORE),
            gl.where(used, s[3] * scale, NO_SCORE),
        )
        of_tokens, factors, m, l = softmax((s,), m, l, 1)
        sums = (sums[0] * factors[0], sums[1] * factors[1])
        one, two = norm_of(own_norms[0], g), norm_of(own_norms[1], g)
        sums = add_weights(sums, of_tokens[0], one, two)
        b = as_operand(of_tokens[0], one, two, False)
        acc = add_values(scaled(acc, factors), own_values, b)
        if (first + TILE - begin) % REACH == 0:
            position += REACH * (DIM // 2)
            queries = rotated_queries(q + zero, cos + position, sin + position, up, t)
    return levels_of(acc, sums), m, l
