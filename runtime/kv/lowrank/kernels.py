# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Write of latents, and rebuilding of K and V, in Triton.

`U` of K and V are `[KV_HEADS * DIM, WIDTH]`, zero from the rank on. HALF and DIMS are powers of two
of at least 16, and at least DIM / 2 and DIM. CHUNK is the number of latents per matmul.
"""

import triton
import triton.language as tl

from runtime.kernels.arith import matmul
from runtime.kv.kernels.latents import to_bf16


@triton.jit
def write_latents(latents, rank, row, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the latents of one token, rounded to bf16, with zeros from the rank on.

    Args:
        latents: pointer to the latents of the token.
        row: pointer to the token's row of a plane.
    """
    for begin in tl.static_range(0, WIDTH, COLUMNS):
        x = begin + tl.arange(0, COLUMNS)
        own = tl.load(latents + x, mask=x < rank, other=0.0).to(tl.float32)
        tl.store(row + x, to_bf16(own), mask=x < WIDTH)


@triton.jit
def append_latents_kernel(
    qkv, row_stride, cos, sin, positions, sequences, starts, lengths, page_table, table_stride, q,
    k_pages, v_pages, k_stride, v_stride, k_rank, v_rank,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, BY_HALVES: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
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
        k_row = k_pages + page * k_stride + slot * K_WIDTH
        v_row = v_pages + page * v_stride + slot * V_WIDTH
        write_latents(latents, k_rank, k_row, K_WIDTH, COLUMNS)
        write_latents(latents + k_rank, v_rank, v_row, V_WIDTH, COLUMNS)
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
def rows_of(
    plane, at, used, u, first_row, width, rows: tl.constexpr, count: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return ``latents @ U[first_row : first_row + count]^T``, fp32 `[BLOCK, rows]`.

    Args:
        plane: pointer to a plane of latents.
        at: int64 `[BLOCK]`, offset of each token's row.
        used: bool `[BLOCK]`, which tokens to read. The others have zeros.
        u: pointer to U, `[…, width]`.
        rows: power of two, at least ``count``. Columns of the result from ``count`` on are 0.
    """
    row = tl.arange(0, rows)
    x = tl.arange(0, CHUNK)
    of_u = u + (first_row + row)[None, :] * width + x[:, None]  # [CHUNK, rows]
    latents_at = plane + at[:, None] + x[None, :]  # [BLOCK, CHUNK]
    acc = tl.zeros((BLOCK, rows), tl.float32)
    for begin in range(0, width, CHUNK):
        inside = begin + x < width
        latents = tl.load(latents_at + begin, mask=used[:, None] & inside[None, :], other=0.0)
        factor = tl.load(of_u + begin, mask=inside[:, None] & (row < count)[None, :], other=0.0)
        acc = matmul(latents.to(factor.dtype), factor, acc)
    return acc


@triton.jit
def with_bias(x, bias, first_row, rows: tl.constexpr, count: tl.constexpr):
    """Add ``bias[first_row : first_row + count]`` to each row of ``x`` unless it is None."""
    if bias is None:
        return x
    row = tl.arange(0, rows)
    own = tl.load(bias + first_row + row, mask=row < count, other=0.0).to(tl.float32)
    return x + own[None, :]


@triton.jit(do_not_specialize=["sequences"])
def rebuild_kernel(
    k_latents, v_latents, k_stride, v_stride, page_table, table_stride, lengths, sequences, u_k,
    u_v, k_bias, v_bias, cos, sin, k_pages, v_pages, page_stride, head_stride,
    DIM: tl.constexpr, HALF: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr,
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
        SEQUENCES: power of two, at least ``sequences``.
    """
    program, kv_head = tl.program_id(0), tl.program_id(1)
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
        k_at = page * k_stride + slot * K_WIDTH
        first_row = kv_head * DIM
        second_row = first_row + DIM // 2
        first = rows_of(
            k_latents, k_at, used, u_k, first_row, K_WIDTH, HALF, DIM // 2, BLOCK, CHUNK
        )
        second = rows_of(
            k_latents, k_at, used, u_k, second_row, K_WIDTH, HALF, DIM // 2, BLOCK, CHUNK
        )
        first = with_bias(first, k_bias, first_row, HALF, DIM // 2)
        second = with_bias(second, k_bias, second_row, HALF, DIM // 2)
        rotated = used[:, None] & (half < DIM // 2)
        angle = t[:, None] * (DIM // 2) + half
        c = tl.load(cos + angle, mask=rotated, other=0.0)
        s = tl.load(sin + angle, mask=rotated, other=0.0)
        target = (page * page_stride + kv_head * head_stride + slot * DIM)[:, None]
        k_row = k_pages + target + half
        tl.store(k_row, to_bf16(first * c - second * s), mask=rotated)
        tl.store(k_row + DIM // 2, to_bf16(second * c + first * s), mask=rotated)
        v_at = page * v_stride + slot * V_WIDTH
        values = rows_of(v_latents, v_at, used, u_v, first_row, V_WIDTH, DIMS, DIM, BLOCK, CHUNK)
        values = with_bias(values, v_bias, first_row, DIMS, DIM)
        tl.store(v_pages + target + d, to_bf16(values), mask=used[:, None] & (d < DIM))
