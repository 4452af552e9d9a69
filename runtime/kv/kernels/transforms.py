# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Hadamard transform, roundings and unpacking, with the bits of `runtime.kv.transforms`."""

import triton
import triton.language as tl

MAX_STAGES = tl.constexpr(10)
"""Stages of the largest Hadamard transform, of 1,024 elements."""
INFINITE = tl.constexpr(0x7F800000)
"""Bits of infinity in fp32. Magnitudes with larger bits are NaN."""
NAN = tl.constexpr(0x7FC0)
"""Bits of the bf16 NaN that is stored as a scale or norm."""
ROUND = tl.constexpr(1.5 * 2**23)
"""Adding it to a small fp32 number and subtracting it again rounds to an integer, half to even."""
COLUMNS = tl.constexpr(8)
"""Columns of a tile of `hadamard_tiles`."""


@triton.jit
def halves(x):
    """Return the two halves `[ROWS, DIM / 2]` of the rows of ``x``, `[ROWS, DIM]`."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def joined(first, second):
    """Return rows whose halves are the rows of ``first`` and ``second``; see `halves`."""
    both = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(both, (first.shape[0], 2 * first.shape[1]))


@triton.jit
def alternate(x):
    """Return the elements at even and at odd columns of ``x``, `[ROWS, DIM / 2]` each."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def interleaved(even, odd):
    """Return rows with ``even`` and ``odd`` at even and odd columns; see `alternate`."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def butterflies(x):
    """Multiply the rows of ``x``, fp32 `[ROWS, N]`, by Sylvester's matrix, without normalization.

    Every stage combines the two elements whose indices differ in the lowest bit, and makes this bit
    the highest one. The sums are those of `runtime.kv.transforms.hadamard`, and the order of the
    elements is restored after the last stage.
    """
    for stage in tl.static_range(MAX_STAGES):
        if (1 << stage) < x.shape[1]:
            a, b = alternate(x)
            x = joined(a + b, a - b)
    return x


@triton.jit
def hadamard(x):
    """Multiply the rows of ``x``, fp32 `[ROWS, DIM]`, by the orthonormal Hadamard matrix."""
    return butterflies(x) * (x.shape[1] ** -0.5)


@triton.jit
def hadamard_tiles(x):
    """Return the same as `hadamard` for rows that are divided into tiles.

    A thread has whole rows if there are at least as many rows as threads. It then exchanges no
    elements with other threads.

    Args:
        x: fp32 `[ROWS, COLUMNS, TILES]`: element ``x[r, c, t]`` is in column ``t * COLUMNS + c``.

    Returns:
        fp32 `[ROWS, TILES * COLUMNS]`.
    """
    ROWS: tl.constexpr = x.shape[0]
    TILES: tl.constexpr = x.shape[2]
    x = butterflies(tl.reshape(tl.permute(x, (0, 2, 1)), (ROWS * TILES, COLUMNS)))
    x = tl.permute(tl.reshape(x, (ROWS, TILES, COLUMNS)), (0, 2, 1))
    x = butterflies(tl.reshape(x, (ROWS * COLUMNS, TILES)))
    x = tl.permute(tl.reshape(x, (ROWS, COLUMNS, TILES)), (0, 2, 1))
    return tl.reshape(x, (ROWS, TILES * COLUMNS)) * ((TILES * COLUMNS) ** -0.5)


@triton.jit
def sum_by_halves(x):
    """Return the sum of each row, `[ROWS]`, in the order of `runtime.kv.transforms`."""
    for _stage in tl.static_range(MAX_STAGES):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), axis=1)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def magnitude_bits(x):
    """Return the bits of the magnitudes of an fp32 tensor. They are ordered as the magnitudes."""
    return x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def round_to_bf16(x):
    """Round finite fp32 numbers to nearest even. Triton's interpreter would truncate in a cast."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def widened(x):
    """Return bf16 numbers as fp32. Triton's interpreter flushes subnormal numbers in a cast."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_nan(like):
    """Return the stored bf16 NaN in the shape of ``like``."""
    return tl.full(like.shape, NAN, tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def words_at(plane, page, row, mask, STRIDE: tl.constexpr, BYTES: tl.constexpr):
    """Load the 32-bit words that contain BYTES bytes of each row.

    Small loads are grouped into words, since only loads of at least 4 bytes are asynchronous.

    Args:
        plane: plane with BYTES bytes per row: 1, 2 or 4.
        page, row: int64 and int32 `[n]`, page and first row of each word; ``row`` is a multiple
            of 4 / BYTES.
        STRIDE: elements from a page of the plane to the next one.

    Returns:
        uint32 `[n]`.
    """
    WORDS: tl.constexpr = STRIDE * plane.dtype.element_ty.primitive_bitwidth // 32
    words = plane.to(tl.pointer_type(tl.uint32), bitcast=True)
    return tl.load(words + page * WORDS + row // (4 // BYTES), mask=mask, other=0)


@triton.jit
def byte_pairs_at(
    plane, page, row, mask, STRIDE: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Load rows of codes as 16-bit words of two bytes, uint16 `[n, WIDTH]`.

    The transposed operand of a matmul has pairs of rows in a register. Shared memory is read in
    this order in units of 16 bits, not of 8.

    Args:
        plane: plane of bytes, with BYTES per row, an even number.
        page, row: int64 and int32 `[n]`.
        mask: `[n]`, or None.
        STRIDE: bytes from a page of the plane to the next one.
        WIDTH: power of two, at least BYTES / 2; with no mask, equal to it.
    """
    i = tl.arange(0, WIDTH)[None, :]
    words = plane.to(tl.pointer_type(tl.uint16), bitcast=True)
    at = words + (page * (STRIDE // 2) + row * (BYTES // 2))[:, None] + i
    if mask is None:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=mask[:, None] & (i < BYTES // 2), other=0)
    return found


@triton.jit
def bf16_pair(words):
    """Return the two bf16 numbers in each word as fp32, the one in the low bits first."""
    low = (words << 16).to(tl.float32, bitcast=True)
    return low, (words & 0xFFFF0000).to(tl.float32, bitcast=True)
