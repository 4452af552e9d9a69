# mypy: ignore-errors
"""Sizes of tiles, and how they and what is made of them lie in memory and in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LINE = gl.constexpr(64)
"""Elements, 128 bytes: offsets are counted in them."""
WARPS, COPIERS = gl.constexpr(8), gl.constexpr(4)
ROWS, COLUMNS, TOKENS, MOST_DIM = (gl.constexpr(n) for n in (16, 1024, 128, 128))
LEAST = gl.constexpr(2)
"""Tiles of tokens, from which on a sequence's KV is split among programs."""
PARTS = gl.constexpr(16)
"""Of a tile's columns, 64 each: the first halves of what the warps have, then the second ones."""
N = gl.constexpr(8)
"""Sequences of a product, as tensor cores have them."""


def _slot_bases(columns):
    """Where an element `[part, row, column]` of a tile is: rows turn their chunks of eight, so that
    eight rows of one column are in different banks."""
    bases = [[0, 0, 1 << n] for n in range((columns - 1).bit_length())]
    bases += [[0, 1, 8], [0, 2, 16], [0, 4, 32], [0, 8, 0]]
    return bases + [[1 << n, 0, 0] for n in range(13 - len(bases) + 1)]


SLOT = gl.constexpr(gl.SharedLinearLayout(_slot_bases(64)))
KV_SLOT = gl.constexpr(gl.SharedLinearLayout(_slot_bases(128)))
COPY = gl.constexpr(gl.BlockedLayout([1, 1, 8], [4, 1, 8], [1, 4, 1], [2, 0, 1]))
KV_COPY = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, 4, 1], [2, 1, 0]))
BLOCK = gl.constexpr(4 * COLUMNS.value)
"""Columns of an input that are kept in registers."""
TALLEST = gl.constexpr(2 * COLUMNS.value)
"""Columns of an input that are kept in shared memory."""
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
INPUT = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 1, 1, 32], [1, 8, 1, 1], [3, 2, 1, 0]))
"""Of words of an input: `[tile, warp, sequence, 128]`."""
HEAD = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
"""Of words of queries: `[head, dim]`."""
OF_WARPS = gl.constexpr(gl.BlockedLayout([8, 1, 4], [1, 1, 32], [1, 8, 1], [2, 1, 0]))
"""Of what the warps of a program found: `[warp, head, dim]`."""
OTHERS = gl.constexpr(gl.BlockedLayout([4, 1, 4], [1, 1, 32], [1, 8, 1], [2, 1, 0]))
"""Of what other programs found: `[part, head, dim]`."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
CHUNK = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
THREADS = gl.constexpr(256)
MOST_WORDS = gl.constexpr(32)
"""Of an input, that a thread reads at a time."""


@gluon.jit
def along(n: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """0 … n - 1 along one of three dimensions."""
    first: gl.constexpr = 0 if dim > 0 else 1
    second: gl.constexpr = 1 if dim > 1 else 2
    line = gl.arange(0, n, gl.SliceLayout(first, gl.SliceLayout(second, layout)))
    return gl.expand_dims(gl.expand_dims(line, first), second)


@gluon.constexpr_function
def finished(rows):
    """How `[rows, N]` finished numbers lie: as tensor cores leave them, 16 rows in every warp, 128
    rows spread over them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << n, 0] if rows == 128 else [0, 0] for n in range(3)],
        block_bases=[],
        shape=[rows, 8],
    )


@gluon.constexpr_function
def kept_layout(n):
    """Of `[chunk, n, 128]`, each chunk of which lies as CHUNK says."""
    bases = [[0, 0, 1 << bit] for bit in range(7)]
    bases += [[0, 1 << bit, 8 << bit if bit < 3 else 0] for bit in range((n - 1).bit_length())]
    return gl.SharedLinearLayout(bases + [[1 << bit, 0, 0] for bit in range(4)])


@gluon.constexpr_function
def of_warps():
    """`[warp, 16, N]` numbers, each thread those of all warps."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 0, 0]] * 3,
        block_bases=[],
        shape=[8, 16, 8],
    )
