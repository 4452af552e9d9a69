# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Bits of integers, and sums of them: what the codec's kernels are written in."""

import triton
import triton.language as tl

from codec.checksum import GOLDEN

LANES = tl.constexpr(32)
"""Columns of a full chunk, and lanes of a warp."""
_GOLDEN = tl.constexpr(GOLDEN - (1 << 64))
SUMS = tl.constexpr(1024)
"""Over so many places a checksum's parts are spread while they come in."""
ESCAPES, ERRORS = tl.constexpr(1024), tl.constexpr(2048)
"""Where the counts of escapes, spread likewise, and the errors follow."""
TOTALS = 2049


@triton.jit
def shifted(v, n: tl.constexpr):
    """An int32 shifted right without its sign."""
    return (v.to(tl.uint32, bitcast=True) >> n).to(tl.int32, bitcast=True)


@triton.jit
def unsigned(v):
    """An int32's bits as a non-negative int64."""
    return v.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def shifted64(v, n: tl.constexpr):
    return (v.to(tl.uint64, bitcast=True) >> n).to(tl.int64, bitcast=True)


@triton.jit
def mix64(z):
    """`mix.mix64`."""
    z = (z ^ shifted64(z, 30)) * (-4658895280553007687)
    z = (z ^ shifted64(z, 27)) * (-7723592293110705685)
    return z ^ shifted64(z, 31)


@triton.jit
def fold(z):
    """`checksum.fold`."""
    z = (z ^ shifted64(z, 32)) * _GOLDEN
    return z ^ shifted64(z, 32)


@triton.jit
def hashed_column(digest, chunk, lane, units):
    """`checksum.columns`, of one column each lane."""
    return fold(digest + ((chunk * 32 + lane) * 256 + units) * _GOLDEN)


@triton.jit
def entry_key(chunk, j):
    """`checksum.entry_keys`, of the j-th of a chunk."""
    return fold(((chunk << 8) | j) * _GOLDEN) | 1


@triton.jit
def digest_of(words, KEYS: tl.constexpr, FIRST: tl.constexpr):
    """The sum of words of a column, from number FIRST on, each times its key, int64 `[32]`."""
    digest = unsigned(words[0]) * KEYS[FIRST]
    for k in tl.static_range(1, len(words)):
        digest += unsigned(words[k]) * KEYS[FIRST + k]
    return digest


@triton.jit
def ones(m):
    """How many bits are set."""
    m = m - (shifted(m, 1) & 0x55555555)
    m = (m & 0x33333333) + (shifted(m, 2) & 0x33333333)
    m = (m + shifted(m, 4)) & 0x0F0F0F0F
    return shifted(m * 0x01010101, 24)


@triton.jit
def lowest_one(m):
    """The number of the lowest bit that is set; anything if none is. A power of two is its own
    exponent as a float."""
    power = (m & -m).to(tl.uint32, bitcast=True).to(tl.float32)
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def any_lane(condition):
    return tl.max(condition.to(tl.int32), axis=0) > 0


@triton.jit
def ranks(count):
    """Of a count in each lane: how many lie in the lanes before, and in all."""
    upto = tl.cumsum(count, axis=0)
    return upto - count, tl.max(upto, axis=0)


@triton.jit
def seal_of(length, checksum, crc):
    """`format.seal_of`."""
    return mix64(length ^ mix64(checksum ^ crc))
