# mypy: ignore-errors
"""Sizes of tiles, and their layouts in shared memory and in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS, COPY_WARPS = gl.constexpr(8), gl.constexpr(4)
"""Compute warps and copy warps of a program."""
THREADS = gl.constexpr(256)
"""Threads of the compute warps."""
ROWS, COLUMNS = gl.constexpr(16), gl.constexpr(1024)
"""Rows and columns of a matrix tile."""
TOKENS, MAX_DIM = gl.constexpr(128), gl.constexpr(128)
"""Tokens and dimensions of a tile of K or V; also rows and columns of a tall tile of a matrix."""
MIN_SPLIT_TILES = gl.constexpr(2)
"""Minimum number of tiles per split of a sequence's KV; shorter sequences have fewer splits."""
PARTS = gl.constexpr(16)
"""Number of parts of a matrix tile, 64 columns each. Warp w multiplies parts w and w + 8."""
N = gl.constexpr(8)
"""Maximum sequences of a step: the n dimension of the MMA instruction."""
REGISTER_COLUMNS = gl.constexpr(4 * COLUMNS.value)
"""Maximum columns of a matmul's input that the compute warps hold in registers at a time."""
SHARED_COLUMNS = gl.constexpr(2 * COLUMNS.value)
"""Maximum columns of a matmul's input that shared memory holds, for tall tiles."""
MAX_MESSAGES = gl.constexpr(32)
"""Maximum number of messages that a thread polls in one loop while it receives an input."""


def _tile_bases(columns):
    """Return the bases of a swizzled shared layout `[part, row, column]`.

    Chunks of eight elements are XORed with the row, so that eight rows of one column are in
    different banks.
    """
    bases = [[0, 0, 1 << n] for n in range((columns - 1).bit_length())]
    bases += [[0, 1, 8], [0, 2, 16], [0, 4, 32], [0, 8, 0]]
    return bases + [[1 << n, 0, 0] for n in range(13 - len(bases) + 1)]


TILE = gl.constexpr(gl.SharedLinearLayout(_tile_bases(64)))
"""Shared layout of a matrix tile `[PARTS, ROWS, 64]`."""
WIDE_TILE = gl.constexpr(gl.SharedLinearLayout(_tile_bases(128)))
"""Shared layout of a tile of K or V, or of a tall matrix tile: `[WARPS, ROWS, MAX_DIM]`."""
TILE_COPY = gl.constexpr(gl.BlockedLayout([1, 1, 8], [4, 1, 8], [1, 4, 1], [2, 0, 1]))
"""Register layout in which the copy warps address a matrix tile `[PARTS, ROWS, 64]`."""
WIDE_TILE_COPY = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, 4, 1], [2, 1, 0]))
"""Register layout in which the copy warps address a wide tile `[WARPS, ROWS, MAX_DIM]`."""
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
"""Layout of MMA accumulators `[batch, row, column]`; the batch is divided among the warps."""
LHS = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
RHS = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
"""Layout of a vector with one element per compute thread."""
INPUT = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 1, 1, 32], [1, 8, 1, 1], [3, 2, 1, 0]))
"""Layout of the messages of an input: `[tile, warp, sequence, 128]`."""
QUERY = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
"""Layout of the messages of queries: `[head, dim]`."""
WARP_RESULTS = gl.constexpr(gl.BlockedLayout([8, 1, 4], [1, 1, 32], [1, 8, 1], [2, 1, 0]))
"""Layout of the attention outputs of a program's warps: `[warp, head, dim]`."""
SPLIT_RESULTS = gl.constexpr(gl.BlockedLayout([4, 1, 4], [1, 1, 32], [1, 8, 1], [2, 1, 0]))
"""Layout of the attention outputs of other splits: `[split, head, dim]`."""
UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
INPUT_CHUNK = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Shared layout of 128 columns of a kept input: `[N, 128]`."""


@gluon.jit
def index_along(n: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """Return a 3-D tensor with 0 … n - 1 along ``dim``, and size 1 along the other dimensions."""
    first: gl.constexpr = 0 if dim > 0 else 1
    second: gl.constexpr = 1 if dim > 1 else 2
    line = gl.arange(0, n, gl.SliceLayout(first, gl.SliceLayout(second, layout)))
    return gl.expand_dims(gl.expand_dims(line, first), second)


@gluon.constexpr_function
def output_layout(rows):
    """Return the layout of matmul outputs `[rows, N]`, the same as that of MMA accumulators.

    With 16 rows, every warp holds all of them. With 128 rows, each warp holds 16.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << n, 0] if rows == 128 else [0, 0] for n in range(3)],
        block_bases=[],
        shape=[rows, 8],
    )


@gluon.constexpr_function
def kept_input_layout(n):
    """Return the shared layout `[chunk, n, 128]` of an input that is kept in shared memory.

    Each chunk is laid out as INPUT_CHUNK.
    """
    bases = [[0, 0, 1 << bit] for bit in range(7)]
    bases += [[0, 1 << bit, 8 << bit if bit < 3 else 0] for bit in range((n - 1).bit_length())]
    return gl.SharedLinearLayout(bases + [[1 << bit, 0, 0] for bit in range(4)])


@gluon.constexpr_function
def warp_sums_layout():
    """Return the layout of sums `[warp, 16, N]` with the elements of all warps in one thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 0, 0]] * 3,
        block_bases=[],
        shape=[8, 16, 8],
    )
