# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Integer and checksum primitives of the codec's kernels.

A vector has one element per lane, `[32]`, unless stated otherwise.
"""

import triton
import triton.language as tl

from codec.checksum import GOLDEN

LANES = tl.constexpr(32)
"""Number of threads in a warp, which equals the number of columns in a full chunk."""
_GOLDEN = tl.constexpr(GOLDEN - (1 << 64))
NUM_SUMS = tl.constexpr(1024)
"""Number of partial checksums; atomic adds to a single one would serialize."""
ESCAPE_COUNTS, ERROR_FLAGS, START = tl.constexpr(1024), tl.constexpr(2048), tl.constexpr(2049)
"""Offsets in the accumulators: partial escape counts; error flags; and, only in those of segment 0,
the start of the call."""
ACCUMULATORS = tl.constexpr(2064)
"""Length of the accumulators of a segment, int64 `[ACCUMULATORS]`, a multiple of 128 bytes."""


@triton.jit
def shift_right(v, n: tl.constexpr):
    """Shift an int32 right logically, without sign extension."""
    return (v.to(tl.uint32, bitcast=True) >> n).to(tl.int32, bitcast=True)


@triton.jit
def unsigned(v):
    """Convert the bits of an int32 to a non-negative int64."""
    return v.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def shift_right64(v, n: tl.constexpr):
    """Shift an int64 right logically."""
    return (v.to(tl.uint64, bitcast=True) >> n).to(tl.int64, bitcast=True)


@triton.jit
def mix64(z):
    """Compute `codec.mix.mix64`."""
    z = (z ^ shift_right64(z, 30)) * (-4658895280553007687)
    z = (z ^ shift_right64(z, 27)) * (-7723592293110705685)
    return z ^ shift_right64(z, 31)


@triton.jit
def fold(z):
    """Compute `codec.checksum.fold`."""
    z = (z ^ shift_right64(z, 32)) * _GOLDEN
    return z ^ shift_right64(z, 32)


@triton.jit
def column_hash(digest, chunk, lane, entry_words):
    """Compute the checksum term, int64, of each lane's column; see `codec.checksum.columns`.

    Args:
        digest: int64 `[32]`, see `column_digest`.
        chunk: index of the chunk in the segment.
        entry_words: number of its entry words.
    """
    return fold(digest + ((chunk * 32 + lane) * 256 + entry_words) * _GOLDEN)


@triton.jit
def entry_key(chunk, j):
    """Return the key of entry `j` of a chunk; see `codec.checksum.entries`."""
    return fold(((chunk << 8) | j) * _GOLDEN) | 1


@triton.jit
def column_digest(words, KEYS: tl.constexpr, FIRST: tl.constexpr):
    """Return, for each column, the sum of `words[i] * KEYS[FIRST + i]` over i: int64 `[32]`."""
    digest = unsigned(words[0]) * KEYS[FIRST]
    for k in tl.static_range(1, len(words)):
        digest += unsigned(words[k]) * KEYS[FIRST + k]
    return digest


@triton.jit
def record_start(accumulators):
    """In the first program of a grid, store the current time in `accumulators`."""
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        tl.store(accumulators + START, tl.extra.cuda.globaltimer())


@triton.jit
def nanoseconds_since(start, TIMED: tl.constexpr):
    """Return the nanoseconds since `start`, a time from `record_start`; 0 unless TIMED."""
    if TIMED:
        elapsed = tl.extra.cuda.globaltimer() - start
    else:
        elapsed = start * 0
    return elapsed


@triton.jit
def popcount(m):
    """Count the bits that are 1 in each int32."""
    m = m - (shift_right(m, 1) & 0x55555555)
    m = (m & 0x33333333) + (shift_right(m, 2) & 0x33333333)
    m = (m + shift_right(m, 4)) & 0x0F0F0F0F
    return shift_right(m * 0x01010101, 24)


@triton.jit
def lowest_bit(m):
    """Return the index of the lowest set bit, undefined for 0.

    The index is the exponent of the isolated bit (a power of two) as a float.
    """
    power = (m & -m).to(tl.uint32, bitcast=True).to(tl.float32)
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def any_lane(condition):
    """Return whether the condition holds in any lane."""
    return tl.max(condition.to(tl.int32), axis=0) > 0


@triton.jit
def exclusive_sum(count):
    """Return the exclusive prefix sum of `count` over the lanes, `[32]`, and the total."""
    upto = tl.cumsum(count, axis=0)
    return upto - count, tl.max(upto, axis=0)


@triton.jit
def seal_of(length, checksum, crc):
    """Compute `codec.format.seal_of`."""
    return mix64(length ^ mix64(checksum ^ crc))
