# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Write of latents, and rebuilding of K and V, in Triton.

`U` of K and V are `[KV_HEADS * DIM, width]`, zero from the rank on. Widths are passed in units of
VECTOR elements. They are not constants, because the layers of a model may have many ranks. HALF and
DIMS are powers of two of at least 16, and at least DIM / 2 and DIM. CHUNK is the number of latents
per matmul.
"""

import triton
import triton.language as tl

from runtime.kernels.arith import VECTOR, matmul
from runtime.kv.kernels.latents import to_bf16


@triton.jit
def write_latents(latents, rank, row, width, COLUMNS: tl.constexpr):
    """Store the latents of one token, rounded to bf16, with zeros from the rank on.

    Args:
        latents: pointer to the latents of the token.
        row: pointer to the token's row of a plane.
    """
    for begin in range(0, width, COLUMNS):
        x = begin + tl.arange(0, COLUMNS)
        own = tl.load(latents + x, mask=x < rank, other=0.0).to(tl.float32)
        tl.store(row + x, to_bf16(own), mask=x < width)


@triton.jit(do_not_specialize=["k_rank", "v_rank", "k_units", "v_units"])
def append_latents_kernel(
    qkv, row_stride, cos, sin, positions, sequences, starts, lengths, page_table, table_stride, q,
    k_pages, v_pages, k_stride, v_stride, k_rank, v_rank, k_units, v_units,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, BY_HALVES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Apply RoPE to ROWS query heads of one token per program, and write its latents into pages.

    Grid `(tokens, ceil(HEADS / ROWS) + 1)`; the last program of a token writes its latents.

    Args:
        qkv: `[tokens, HEADS * DIM + k_rank + v_rank]`, row stride ``row_stride``: q, and the
            latents of K and V. With BY_HALVES, the elements of a query head are in the order of
            `gemm.weights.by_halves`.
        q: `[tokens, HEADS, DIM]`, written, with the dtype of ``qkv``.
        k_pages, v_pages: bf16 `[page, 1, PAGE, width]`, written, page strides ``k_stride`` and
            ``v_stride``.
        k_units, v_units: their widths.
        COLUMNS: latents per store, a power of two.

    The other arguments are those of `runtime.attention.kernels.rope_write.rope_write_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    own = qkv + token * row_stride
    if tl.program_id(1) == tl.num_programs(1) - 1:
        sequence = tl.load(sequences + token)
        index = tl.load(lengths + sequence) - tl.load(starts + sequence + 1) + token
        page = tl.load(page_table + sequence * table_stride + index // PAGE).to(tl.int64)
        slot = index % PAGE
        latents = own + HEADS * DIM
        k_width = k_units * VECTOR
        v_width = v_units * VECTOR
        k_row = k_pages + page * k_stride + slot * k_width
        v_row = v_pages + page * v_stride + slot * v_width
        write_latents(latents, k_rank, k_row, k_width, COLUMNS)
        write_latents(latents + k_rank, v_rank, v_row, v_width, COLUMNS)
    else:
        head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        d = tl.arange(0, HALF)[None, :]  # [1, HALF]
        inside = (head < HEADS) & (d < DIM // 2)
        source = own + head * DIM
        source += d // 8 * 16 + d % 8 if BY_HALVES else d
        partner: tl.constexpr = 8 if BY_HALVES else DIM // 2
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)  # [ROWS, HALF]
        second = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + position * (DIM // 2) + d, mask=d < DIM // 2, other=0.0)
        s = tl.load(sin + position * (DIM // 2) + d, mask=d < DIM // 2, other=0.0)
        dtype = q.dtype.element_ty
        target = q + token * (HEADS * DIM) + head * DIM + d
        tl.store(target, (first * c - second * s).to(dtype), mask=inside)
        tl.store(target + DIM // 2, (second * c + first * s).to(dtype), mask=inside)


@triton.jit
def factor_at(
    u, first_row, begin, width, rows: tl.constexpr, count: tl.constexpr, CHUNK: tl.constexpr
):
    """Load ``U[first_row : first_row + count, begin : begin + CHUNK]^T``, `[CHUNK, rows]`.

    Args:
        u: pointer to U, `[…, width]`.
        rows: power of two, at least ``count``; further columns of the result are 0.
    """
    row = tl.arange(0, rows)[None, :]
    x = begin + tl.arange(0, CHUNK)[:, None]
    return tl.load(u + (first_row + row) * width + x, mask=(x < width) & (row < count), other=0.0)


@triton.jit
def latents_at(plane, at, used, begin, width, CHUNK: tl.constexpr):
    """Load CHUNK latents of each token of a tile, `[BLOCK, CHUNK]`.

    Args:
        plane: pointer to a plane of latents.
        at: int64 `[BLOCK]`, offset of each token's row.
        used: bool `[BLOCK]`, which tokens to read. The others have zeros.
    """
    x = begin + tl.arange(0, CHUNK)[None, :]
    return tl.load(plane + at[:, None] + x, mask=used[:, None] & (x < width), other=0.0)


@triton.jit
def rebuilt_keys(
    plane, at, used, u, bias, kv_head, width,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the halves of the keys of a tile before RoPE, fp32 `[BLOCK, HALF]` each.

    Args:
        plane, at, used: see `latents_at`.
        u, bias: U_k, and the bias of K or None.
    """
    row = kv_head * DIM
    first = tl.zeros((BLOCK, HALF), tl.float32)
    second = tl.zeros((BLOCK, HALF), tl.float32)
    for begin in range(0, width, CHUNK):
        latents = latents_at(plane, at, used, begin, width, CHUNK).to(u.dtype.element_ty)
        first = matmul(latents, factor_at(u, row, begin, width, HALF, DIM // 2, CHUNK), first)
        half = factor_at(u, row + DIM // 2, begin, width, HALF, DIM // 2, CHUNK)
        second = matmul(latents, half, second)
    first = with_bias(first, bias, row, HALF, DIM // 2)
    return first, with_bias(second, bias, row + DIM // 2, HALF, DIM // 2)


@triton.jit
def with_bias(x, bias, first_row, rows: tl.constexpr, count: tl.constexpr):
    """Add ``bias[first_row : first_row + count]`` to each row of ``x`` unless it is None."""
    if bias is not None:
        row = tl.arange(0, rows)
        own = tl.load(bias + first_row + row, mask=row < count, other=0.0).to(tl.float32)
        x += own[None, :]
    return x


@triton.jit(do_not_specialize=["sequences", "k_units", "v_units"])
def rebuild_kernel(
    k_latents, v_latents, k_stride, v_stride, page_table, table_stride, lengths, sequences, u_k,
    u_v, k_bias, v_bias, cos, sin, k_pages, v_pages, page_stride, head_stride,
    k_units, v_units,
    DIM: tl.constexpr, HALF: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Write K (after RoPE) and V of all tokens of a batch's sequences into pages.

    Grid `(programs, KV_HEADS)`. A tile is BLOCK consecutive tokens of a sequence. Each program
    computes every ``programs``-th tile of one KV head; lengths are read on the device.

    Args:
        k_latents, v_latents: bf16 `[page, 1, PAGE, width]`, page strides ``k_stride`` and
            ``v_stride``.
        page_table: int32 `[sequences, pages]`, row stride ``table_stride``.
        lengths: int32 `[sequences]`, tokens of each sequence.
        u_k, u_v, k_bias, v_bias: factors and biases, which may be None.
        cos, sin: fp32 `[context, DIM / 2]`.
        k_pages, v_pages: bf16 `[page, KV_HEADS, PAGE, DIM]`, written, of equal strides.
        k_units, v_units: widths of the latents.
        SEQUENCES: power of two, at least ``sequences``.
    """
    program, kv_head = tl.program_id(0), tl.program_id(1)
    k_width = k_units * VECTOR
    v_width = v_units * VECTOR
    i = tl.arange(0, SEQUENCES)
    tiles = tl.cdiv(tl.load(lengths + i, mask=i < sequences, other=0), BLOCK)
    ends = tl.cumsum(tiles, axis=0)
    half = tl.arange(0, HALF)[None, :]
    d = tl.arange(0, DIMS)[None, :]
    for tile in range(program, tl.sum(tiles, axis=0), tl.num_programs(0)):
        sequence = tl.sum((ends <= tile).to(tl.int32), axis=0)
        begin = tl.max(tl.where(i < sequence, ends, 0), axis=0)
        t = (tile - begin) * BLOCK + tl.arange(0, BLOCK)
        used = t < tl.load(lengths + sequence)
        table = page_table + sequence * table_stride
        page = tl.load(table + t // PAGE, mask=used, other=0).to(tl.int64)
        slot = t % PAGE
        k_at = page * k_stride + slot * k_width
        first, second = rebuilt_keys(
            k_latents, k_at, used, u_k, k_bias, kv_head, k_width, DIM, HALF, BLOCK, CHUNK
        )
        rotated = used[:, None] & (half < DIM // 2)
        angle = t[:, None] * (DIM // 2) + half
        c = tl.load(cos + angle, mask=rotated, other=0.0)
        s = tl.load(sin + angle, mask=rotated, other=0.0)
        target = (page * page_stride + kv_head * head_stride + slot * DIM)[:, None]
        k_row = k_pages + target + half
        tl.store(k_row, to_bf16(first * c - second * s), mask=rotated)
        tl.store(k_row + DIM // 2, to_bf16(second * c + first * s), mask=rotated)
        v_at = page * v_stride + slot * v_width
        values = tl.zeros((BLOCK, DIMS), tl.float32)
        for chunk in range(0, v_width, CHUNK):
            latents = latents_at(v_latents, v_at, used, chunk, v_width, CHUNK)
            factor = factor_at(u_v, kv_head * DIM, chunk, v_width, DIMS, DIM, CHUNK)
            values = matmul(latents.to(factor.dtype), factor, values)
        values = with_bias(values, v_bias, kv_head * DIM, DIMS, DIM)
        tl.store(v_pages + target + d, to_bf16(values), mask=used[:, None] & (d < DIM))
