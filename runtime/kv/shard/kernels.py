# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of the format `shard` in Triton; see its README for the maths.

``planes`` are the compressed planes and then these tensors:

- weights, offsets: see `decoder.KeyDecoder.kernel_inputs`.
- units: fp32 `[KV_HEADS + 1]`, factor of the scores of each KV head, then the factor of YaRN.
- columns: bf16 `[2, KV_HEADS * DIM, KV_HEADS, width, 2]`, columns of the basis for the low and the
  high nibble of each byte of each KV head, padded with zeros; see `runtime.kv.kernels.latents`.
- mean: fp32 `[KV_HEADS * DIM]`; scales: fp32 `[rank]`, see `format.ShardLayer`.
- cos, sin: fp32 `[context, DIM / 2]`, see `rotation.PageRotation.inverse`.
- the tensors of `fragment_inputs`, which only `fragments` reads.

Attention computes transposed tiles: tokens are rows, since a matmul of a warp group has at least 64
rows, and a KV head has few queries. Queries are rotated back by the position of the tile, so that
the keys of all tiles are rotated by the same angles.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.decode import no_keys
from runtime.kernels.arith import INTERPRETED, matmul
from runtime.kv.k4v2.kernels import UNIT
from runtime.kv.kernels.transforms import hadamard, halves, interleaved, joined
from runtime.pages import window

SINK_PAGES = tl.constexpr(window.SINK_PAGES)


@triton.jit
def rotated(first, second, cos, sin):
    """Rotate pairs of elements; return the rotated first and second elements.

    Args:
        first, second: first and second elements of the pairs, `[…, DIM / 2]`.
        cos, sin: cosines and sines of the angles, of the same shape.
    """
    return first * cos - second * sin, second * cos + first * sin


SPLIT = tl.constexpr("""{
and.b32 $0, $2, 0x0f0f0f0f;
shr.u32 $1, $2, 4;
and.b32 $1, $1, 0x0f0f0f0f;
}""")


@triton.jit
def codes_of(packed):
    """Return low and high nibbles as fp8 e4m3 numbers.

    The number with the bits n is n / 512 for all n below 16, whether it is subnormal or not.
    """
    if INTERPRETED:
        return (packed & 15).to(tl.float32) / 512, (packed >> 4).to(tl.float32) / 512
    return tl.inline_asm_elementwise(
        SPLIT, "=&r,=&r,r", [packed], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
    )


@triton.jit
def weights_at(
    weights, kv_head, BEGIN: tl.constexpr, DIM: tl.constexpr, BYTES: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Load the weights of the codes in SIZE bytes from BEGIN on.

    Returns:
        Two fp8 tensors `[SIZE, DIM]`, for low and for high nibbles.
    """
    d = tl.arange(0, DIM)[:, None]
    b = tl.arange(0, SIZE)[None, :]
    at = weights + kv_head * (2 * DIM * BYTES) + d * BYTES + BEGIN + b
    low = tl.load(at)
    high = tl.load(at + DIM * BYTES)
    if INTERPRETED:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
    return tl.trans(low), tl.trans(high)


@triton.jit
def times_codes(
    k, rows, weights, acc, BEGIN: tl.constexpr, SIZE: tl.constexpr, TOKEN: tl.constexpr
):  # fmt: skip
    """Add the products of the codes in SIZE bytes of each token, from BEGIN on.

    Args:
        rows: `[BLOCK]`, offset from ``k`` of each token's first byte.
        weights: see `weights_at`.
        acc: fp32 `[BLOCK, DIM]`.
        TOKEN: bytes of a token.
    """
    b = BEGIN + tl.arange(0, SIZE)[None, :]
    if BEGIN + SIZE <= TOKEN:
        packed = tl.load(k + rows[:, None] + b)
    else:
        packed = tl.load(k + rows[:, None] + b, mask=b < TOKEN, other=0)
    low, high = codes_of(packed)
    acc = tl.dot(low, weights[0], acc)
    return tl.dot(high, weights[1], acc)


def _levels_of(number: int) -> str:
    """Return PTX that looks up the levels of four codes, which are nibbles of `x` or `y`."""
    shifted, out = "xy"[number // 2], 4 * (number // 2) + 2 * (number % 2)
    select = "" if number % 2 == 0 else f"shr.u32 {shifted}, {shifted}, 16;\n"
    return f"""{select}prmt.b32 l, 0, low, {shifted};
prmt.b32 h, 0, high, {shifted};
prmt.b32 ${out}, l, h, 0x5140;
prmt.b32 ${out + 1}, l, h, 0x7362;
"""


LEVELS = tl.constexpr(
    "{\n.reg .b32 x, y, l, h, low, high;\nmov.b32 low, 0x40808040;\nmov.b32 high, 0x403fbfc0;\n"
    "lop3.b32 x, $8, 0x33333333, 0x44444444, 0xea;\nshr.u32 y, $8, 2;\n"
    "lop3.b32 y, y, 0x33333333, 0x44444444, 0xea;\n" + "".join(map(_levels_of, range(4))) + "}"
)
"""PTX that unpacks the 16 codes of a word to bf16 by table lookup. ``x`` has the codes of parts 0
and 2 in its nibbles, ``y`` those of parts 1 and 3. ``low`` and ``high`` are the low and high bytes
of the four numbers. A nibble is 4 plus the code: `prmt` then selects byte ``code`` of ``low`` or
``high``, for four nibbles at once."""


@triton.jit
def level(codes):
    """Return ``2 c - 3``, fp32; for Triton's interpreter."""
    return 2.0 * codes.to(tl.float32) - 3.0


@triton.jit
def two_levels(word, byte, shift):
    """Return the bits of two bf16 numbers of a word's byte; for Triton's interpreter."""
    code = word >> (8 * byte + shift)
    first = level(code & 3).to(tl.uint32, bitcast=True) >> 16
    return first | (level((code >> 4) & 3).to(tl.uint32, bitcast=True) & 0xFFFF0000)


@triton.jit
def values_of(words):
    """Return the levels of V in units of UNIT, bf16 `[BLOCK, 16 n]`, from words, `[BLOCK, n]`.

    Column ``16 word + 8 y + 2 byte + e`` is element ``4 word + byte`` of part ``2 e + y``; see
    `natural`.
    """
    if INTERPRETED:
        a, b, c, d, e, f, g, h = (
            two_levels(words, 0, 0), two_levels(words, 1, 0), two_levels(words, 2, 0),
            two_levels(words, 3, 0), two_levels(words, 0, 2), two_levels(words, 1, 2),
            two_levels(words, 2, 2), two_levels(words, 3, 2),
        )  # fmt: skip
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            LEVELS, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [words],
            dtype=(
                tl.uint32, tl.uint32, tl.uint32, tl.uint32,
                tl.uint32, tl.uint32, tl.uint32, tl.uint32,
            ),
            is_pure=True, pack=1,
        )  # fmt: skip
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    joint = tl.reshape(tl.join(even, odd), (words.shape[0], 8 * words.shape[1]))
    first = (joint & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return interleaved(first, (joint >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True))


@triton.jit
def natural(x):
    """Return rows with the columns of `values_of` in the order of the elements."""
    parts = tl.reshape(x, (x.shape[0], x.shape[1] // 16, 2, 4, 2))
    return tl.reshape(tl.permute(parts, (0, 4, 2, 1, 3)), x.shape)


ROTATE = tl.constexpr("""{
.reg .b32 a, b, n, t;
add.rn.f16x2 a, $2, $4;
add.rn.f16x2 b, $3, $5;
neg.f16x2 n, $7;
mul.rn.f16x2 t, a, $6;
fma.rn.f16x2 $0, b, n, t;
mul.rn.f16x2 t, b, $6;
fma.rn.f16x2 $1, a, $7, t;
}""")


@triton.jit
def rotated_keys(first, second, offset1, offset2, cos, sin):
    """Add offsets to the halves of keys, then rotate pairs. All are fp16 `[BLOCK, DIM / 2]`."""
    if INTERPRETED:
        first = first.to(tl.float32) + offset1.to(tl.float32)
        second = second.to(tl.float32) + offset2.to(tl.float32)
        first, second = rotated(first, second, cos.to(tl.float32), sin.to(tl.float32))
        return first.to(tl.float16), second.to(tl.float16)
    return tl.inline_asm_elementwise(
        ROTATE, "=&r,=&r,r,r,r,r,r,r", [first, second, offset1, offset2, cos, sin],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def attend(
    queries, kv_head, begin, end, count, planes, table, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    k, v, v_norm, weights, offsets, units, _, _, _, cos, sin, _, _, _ = planes
    v_words = v.to(tl.pointer_type(tl.uint32), bitcast=True)
    norm_words = v_norm.to(tl.pointer_type(tl.uint32), bitcast=True)
    ROWS: tl.constexpr = queries.shape[0]
    TOKEN: tl.constexpr = KV_HEADS * K_WIDTH
    # Bytes of a token are multiplied in chunks of 64, and a rest of 32.
    CHUNK: tl.constexpr = 64
    BYTES: tl.constexpr = (TOKEN + 31) // 32 * 32
    REST: tl.constexpr = BYTES % CHUNK
    half = tl.arange(0, DIM // 2)
    # fp16 has a small range: queries are scaled to at most 1, and scores scaled back.
    queries = queries.to(tl.float32)
    largest = tl.max(tl.abs(queries), axis=1)  # [ROWS]
    largest = tl.where(largest > 0, largest, 1.0)
    q1, q2 = halves(queries * (1 / largest)[:, None])
    back = largest * tl.load(units + kv_head) * scale
    # Tables are loaded for each query, so that a thread has consecutive elements.
    each = tl.broadcast_to(half[None, :], (ROWS, DIM // 2))
    # Rotate the queries to the position of the first token.
    own = (SINK_PAGES * PAGE + begin) * (DIM // 2) + each
    q1, q2 = rotated(q1, q2, tl.load(cos + own), -tl.load(sin + own))
    factor = tl.load(units + KV_HEADS)
    # Angles from a tile to the next one.
    turn_cos = factor * tl.load(cos + BLOCK * (DIM // 2) + each)
    turn_sin = -factor * tl.load(sin + BLOCK * (DIM // 2) + each)
    steps = tl.arange(0, BLOCK)[:, None] * (DIM // 2) + half[None, :]
    tile_cos = tl.load(cos + steps).to(tl.float16)
    tile_sin = tl.load(sin + steps).to(tl.float16)
    offsets += kv_head * DIM + half
    shape: tl.constexpr = (BLOCK, DIM // 2)
    offset1 = tl.broadcast_to(tl.load(offsets)[None, :].to(tl.float16), shape)
    offset2 = tl.broadcast_to(tl.load(offsets + DIM // 2)[None, :].to(tl.float16), shape)
    chunks = ()
    for n in tl.static_range(BYTES // CHUNK):
        chunk = weights_at(weights, kv_head, n * CHUNK, DIM, BYTES, CHUNK)
        chunks += (chunk,)  # type: ignore[assignment]
    if REST:
        chunk = weights_at(weights, kv_head, BYTES - REST, DIM, BYTES, REST)
        chunks += (chunk,)  # type: ignore[assignment]

    acc, _, _ = no_keys(DIM, ROWS)  # transposed: [DIM, ROWS]
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK, ROWS), tl.float32)
    token = tl.arange(0, BLOCK)  # tiles begin with a page
    slot = token % PAGE
    for first in range(begin, end, BLOCK):
        # Unused lanes read page 0. Their scores and norms are masked.
        used = token < count - first
        page = tl.load(table + first // PAGE + token // PAGE, mask=used, other=0).to(tl.int64)
        k_rows = page * STRIDES[0] + slot * TOKEN
        product = tl.zeros((BLOCK, DIM), tl.float32)
        for n in tl.static_range(BYTES // CHUNK):
            product = times_codes(k, k_rows, chunks[n], product, n * CHUNK, CHUNK, TOKEN)
        if REST:
            product = times_codes(
                k, k_rows, chunks[BYTES // CHUNK], product, BYTES - REST, REST, TOKEN
            )
        k1, k2 = halves(product.to(tl.float16))
        k1, k2 = rotated_keys(k1, k2, offset1, offset2, tile_cos, tile_sin)
        q = tl.trans(joined(q1.to(tl.float16), q2.to(tl.float16)))
        scores = matmul(joined(k1, k2), q, tl.zeros((BLOCK, ROWS), tl.float32))
        scores = tl.where(used[:, None], scores, float("-inf"))

        new_m = tl.maximum(m, tl.max(scores, axis=0))
        probabilities = tl.exp2(scores * back[None, :] - (new_m * back)[None, :])
        alpha = tl.exp2((m - new_m) * back)[None, :]
        m = new_m
        sums = sums * alpha + probabilities
        row = kv_head * PAGE + slot
        # Norms are read in words, so that they are copied asynchronously.
        pair = tl.load(norm_words + page * (STRIDES[2] // 2) + row // 2, mask=used, other=0)
        norms = tl.where(slot % 2 == 0, pair << 16, pair & 0xFFFF0000).to(tl.float32, bitcast=True)
        word = tl.arange(0, V_WIDTH // 4)[None, :]
        v_rows = page * (STRIDES[1] // 4) + row * (V_WIDTH // 4)
        words = tl.load(v_words + v_rows[:, None] + word)
        values = tl.trans(values_of(words))  # [DIM, BLOCK]
        acc = matmul(values, (probabilities * norms[:, None]).to(tl.bfloat16), acc * alpha)
        q1, q2 = rotated(q1, q2, turn_cos, turn_sin)
    return natural(tl.trans(acc)), m * back, tl.sum(sums, axis=0)


@triton.jit
def finish(
    acc, kv_head, planes, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """See `runtime.kv.kernels.windowed`."""
    return hadamard(acc * (UNIT * DIM**-0.5))
