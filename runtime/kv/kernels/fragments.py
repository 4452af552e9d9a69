# mypy: ignore-errors
# ruff: noqa: E741 - `l` as in the literature; what Triton's compiler supports
"""Attention on operands of tensor cores in registers, in Gluon.

A tensor core instruction multiplies A `[16, 16]` by B `[16, 8]` (PTX ISA, "Matrix Fragments for
mma.m16n8k16"). Lane ``4 g + t`` of a warp holds:

- of A, rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, in four words of two elements:
  row g, row g + 8, each with the first two columns, then both rows with the last two columns;
- of B, column g and rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, in two words;
- of the sum C, fp32, rows g and g + 8 and columns 2 t and 2 t + 1.

Scores are products of 16 tokens of a page (rows of A) by 8 query heads (columns of B). Sums of V
are products of 16 dimensions by those heads over 16 tokens. The order of the summed dimensions is
free, so that each lane loads consecutive bytes of a token. C of the scores has the heads in the
same lanes as C of the sums: weights only have to be transposed, by `transposed`, to become B.
Programs have one warp, and nothing passes through shared memory. The exception is `shard`, whose
programs have four warps: they share a matmul (`runtime.kv.shard.fragments`) and merge their results
through shared memory (`splits`).

All tensors have one element per lane. A fragment of C is a tuple of four fp32: the two heads of row
g, then those of row g + 8. Pages have 16 tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NO_SCORE = gl.constexpr(-3e38)
"""Score of masked tokens if all tokens of a warp may be masked, where -inf would give NaN."""
PAGE = gl.constexpr(16)
_LOAD16 = gl.constexpr("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD8 = gl.constexpr("ld.global.nc.L1::no_allocate.v2.b32 {$0, $1}, [$2];")
_MMA_OPERANDS = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
_MMA_BF16 = gl.constexpr("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 " + _MMA_OPERANDS)
_MMA_FP16 = gl.constexpr("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 " + _MMA_OPERANDS)


@gluon.jit
def arange_over_threads(COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Return int32 `[COUNT]`: 0 to COUNT - 1, consecutive numbers in consecutive lanes."""
    return gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon.jit
def lane_numbers(WARPS: gl.constexpr = 1):
    """Return int32 ``lane`` (0 to 31 in its warp), ``g = lane // 4`` and ``t = lane % 4``."""
    lane = arange_over_threads(32 * WARPS, WARPS) % 32
    return lane, lane // 4, lane % 4


@gluon.jit
def warp_number(WARPS: gl.constexpr):
    """Return the number of each lane's warp in the program, int32."""
    return arange_over_threads(32 * WARPS, WARPS) // 32


@gluon.jit
def load16(address):
    """Load four words per lane, from addresses that are multiples of 16 bytes."""
    return gl.inline_asm_elementwise(
        _LOAD16, "=r,=r,=r,=r,l", [address.to(gl.int64)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load8(address):
    """Load two words per lane, from addresses that are multiples of 8 bytes."""
    return gl.inline_asm_elementwise(
        _LOAD8, "=r,=r,l", [address.to(gl.int64)], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def load4(address):
    """Load a word per lane, from addresses that are multiples of 4 bytes."""
    return gl.inline_asm_elementwise(
        "ld.global.nc.b32 $0, [$1];", "=r,l", [address.to(gl.int64)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply(a0, a1, a2, a3, b0, b1, c, FP16: gl.constexpr):
    """Return A B + C, a fragment of C.

    Args:
        a0, a1, a2, a3, b0, b1: words of A and B, bf16, or fp16 if FP16.
        c: fragment of C.
    """
    return gl.inline_asm_elementwise(
        _MMA_FP16 if FP16 else _MMA_BF16, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def packed(low, high, FP16: gl.constexpr):
    """Round two fp32 numbers to bf16, or fp16 if FP16, and return them in a word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;" if FP16 else "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def transposed(word):
    """Transpose an 8 x 8 matrix of 16-bit elements: row g, columns 2 t and 2 t + 1 in each lane."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [word],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def low_half(word):
    """Return the bf16 number in the low half of a word as fp32."""
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def high_half(word):
    """Return the bf16 number in the high half of a word as fp32."""
    return (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def low_halves(x, y):
    """Return a word with the low halves of two words."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def high_halves(x, y):
    """Return a word with the high halves of two words."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def of_other_lane(x, MASK: gl.constexpr):
    """Return fp32 ``x`` of the lane whose number differs in the bit MASK."""
    if MASK == 1:
        shuffle: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;"
    elif MASK == 2:
        shuffle: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;"
    elif MASK == 4:
        shuffle: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;"
    elif MASK == 8:
        shuffle: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 8, 0x1f, 0xffffffff;"
    else:
        shuffle: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 16, 0x1f, 0xffffffff;"
    return gl.inline_asm_elementwise(shuffle, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def largest_of_rows(x):
    """Return the maximum over g of each column, in all lanes."""
    x = gl.maximum(x, of_other_lane(x, 4))
    x = gl.maximum(x, of_other_lane(x, 8))
    return gl.maximum(x, of_other_lane(x, 16))


@gluon.jit
def sum_of_rows(x):
    """Return the sum over g of each column, in all lanes."""
    x = x + of_other_lane(x, 4)
    x = x + of_other_lane(x, 8)
    return x + of_other_lane(x, 16)


@gluon.jit
def power_of_two(biased):
    """Return ``2 ** (biased - 127)``. 0 gives 0, and 255 infinity."""
    return (biased << 23).to(gl.float32, bitcast=True)


@gluon.jit
def fp16_scale(x):
    """Return the power of two that scales the largest magnitude in a tuple to below 2**15.

    Returns:
        The factor, the same in all lanes of a warp, and its inverse.
    """
    most = gl.maximum(x[0], -x[0])
    for i in gl.static_range(1, len(x)):
        most = gl.maximum(most, gl.maximum(x[i], -x[i]))
    most = gl.maximum(most, of_other_lane(most, 1))
    most = largest_of_rows(gl.maximum(most, of_other_lane(most, 2)))
    exponent = gl.maximum(most.to(gl.int32, bitcast=True) >> 23, 15)
    return power_of_two(268 - exponent), power_of_two(exponent - 14)


@gluon.jit
def fp16_words(x):
    """Scale a tuple of fp32 numbers by `fp16_scale`.

    Returns:
        The numbers as fp16, two in a word, and the factor that undoes the scale.
    """
    up, down = fp16_scale(x)
    made = ()
    for i in gl.static_range(0, len(x), 2):
        made = made + (packed(x[i] * up, x[i + 1] * up, True),)
    return made, down


@gluon.jit
def no_sum(lane):
    """Return a fragment of C that is zero: four fp32 zeros per lane.

    Args:
        lane: any tensor with one element per lane; only its layout is used.
    """
    zero = (lane * 0).to(gl.float32)
    return (zero, zero, zero, zero)


@gluon.jit
def no_tokens(lane, TILES: gl.constexpr):
    """Return the initial state of an online softmax.

    Returns:
        ``acc``, TILES fragments of C, unnormalized sums of V; ``m`` and ``l``, fp32 pairs: maximum
        score and sum of the weights of each of the lane's two heads. ``m`` is the maximum over all
        tokens, ``l`` the sum over the tokens of the lane's own rows.
    """
    zero = (lane * 0).to(gl.float32)
    acc = ()
    for _ in gl.static_range(TILES):
        acc = acc + (no_sum(lane),)
    return acc, (zero + float("-inf"), zero + float("-inf")), (zero, zero)


@gluon.jit
def scaled(acc, factors):
    """Multiply fragments of C, ``acc``, by a factor for each of the lane's two heads."""
    made = ()
    for n in gl.static_range(len(acc)):
        c = acc[n]
        made = made + (
            (c[0] * factors[0], c[1] * factors[1], c[2] * factors[0], c[3] * factors[1]),
        )
    return made


@gluon.jit
def softmax(scores, m, l, PAGES: gl.constexpr):
    """Update an online softmax, in base 2.

    Args:
        scores: for each of PAGES pages, a fragment of C: tokens are rows, heads are columns.
        m, l: see `no_tokens`.

    Returns:
        Weights, in the layout of ``scores``; factors by which to multiply earlier outputs of the
        lane's two heads; and the new ``m`` and ``l``.
    """
    even, odd = m
    for i in gl.static_range(PAGES):
        s = scores[i]
        even = gl.maximum(even, gl.maximum(s[0], s[2]))
        odd = gl.maximum(odd, gl.maximum(s[1], s[3]))
    even, odd = largest_of_rows(even), largest_of_rows(odd)
    factors = (gl.exp2(m[0] - even), gl.exp2(m[1] - odd))
    even_sum, odd_sum = l[0] * factors[0], l[1] * factors[1]
    weights = ()
    for i in gl.static_range(PAGES):
        s = scores[i]
        w = (gl.exp2(s[0] - even), gl.exp2(s[1] - odd), gl.exp2(s[2] - even), gl.exp2(s[3] - odd))
        even_sum = even_sum + (w[0] + w[2])
        odd_sum = odd_sum + (w[1] + w[3])
        weights = weights + (w,)
    return weights, factors, (even, odd), (even_sum, odd_sum)


@gluon.jit
def as_operand(weights, first, second, FP16: gl.constexpr):
    """Return the weights of a page as B: two words, bf16, or fp16 if FP16.

    Args:
        weights: fragment of C, fp32; rows are tokens, columns are heads.
        first, second: fp32 scales of tokens g and g + 8, by which the weights are multiplied.
    """
    b0 = transposed(packed(weights[0] * first, weights[1] * first, FP16))
    b1 = transposed(packed(weights[2] * second, weights[3] * second, FP16))
    return b0, b1


@gluon.jit
def pages_of_tile(table, first, count, PAGES: gl.constexpr):
    """Return the ids of the PAGES compressed pages from token ``first`` on.

    For tokens from ``count`` on, the page of the last token is returned. Other pages may hold NaN,
    and NaN times a weight of 0 is NaN.

    Args:
        table: pointer to int32 page ids of the sequence, that of token 0 first.
        first, count: token numbers, multiples of the page size.
    """
    pages = ()
    for i in gl.static_range(PAGES):
        pages = pages + (gl.load(table + gl.minimum(first // PAGE + i, count // PAGE - 1)),)
    return pages


@gluon.jit
def token_of_value(t, which):
    """Return the slot of one of the four tokens whose values a lane holds in A.

    Args:
        which: number of the token, 0 to 3.
    """
    return 2 * t + which % 2 + which // 2 * 8
