"""The checksum of a segment: 64 bits, position-dependent, order-free to compute.

It covers what a payload says rather than the elements it decodes to, of which decoding is a
function: so neither side needs the elements again, and a change that decodes alike shows too. All
arithmetic is mod 2^64:

    fold(z)  = y ^ y >> 32 with y = (z ^ z >> 32) * GOLDEN

    digest   = sum over the words k of a column, in its streams' order, of word * KEYS[k]
    column   = fold(digest + ((32 * chunk + column) << 8 | units) * GOLDEN)
    entry    = word * (fold((chunk << 8 | j) * GOLDEN) | 1)      of the j-th entry of a chunk
    checksum = sum of all columns and entries

`chunk` is the chunk's number in the segment (plane by plane, see `format.Geometry`), `column` the
column's number in its chunk, `units` the words of the chunk's entries; of a raw plane they are 0
and a column's words are its elements as they lie in memory; and so they are of a chunk in full,
whose entries count as the last words of its columns and not as entries. Keys are odd, so a change
of one word always changes its column's digest, and fold is a bijection, so it always changes the
checksum; 32 times 32 bits do not overflow, so changes of two words of a column cannot cancel either
unless one is a multiple of the other's key. One multiplication covers two to four elements, and the
sums commute, so columns may be done in any order.
"""

import torch
from torch import Tensor

from codec.mix import MASK64, mix64

GOLDEN = 0x9E3779B97F4A7C15
KEYS = tuple(mix64((k + 1) * GOLDEN & MASK64) >> 32 | 1 for k in range(16))
"""The high halves of SplitMix64's first outputs from seed 0, made odd: one for each word that a
column can have."""
UNITS_BITS = 8
"""Bits that hold the units of a chunk, 0 to 160."""


def fold(value: Tensor) -> Tensor:
    """`fold` of each int64, taken as u64."""
    value = (value ^ _high(value)) * _signed(GOLDEN)
    return value ^ _high(value)


def columns(words: Tensor, chunk: Tensor, column: Tensor, units: Tensor | int) -> Tensor:
    """The sum of columns.

    Args:
        words: int64 `[columns, words]`, values in [0, 2^32).
        chunk, column, units: int64 `[columns]`, see above.

    Returns an int64 0-d tensor; int64 wraps as u64 does, so the bits are the sum's.
    """
    keys = torch.tensor(KEYS[: words.shape[1]], device=words.device)
    tags = (32 * chunk + column << UNITS_BITS | units) * _signed(GOLDEN)
    return fold((words * keys).sum(dim=1) + tags).sum()


def entries(words: Tensor, chunk: Tensor, number: Tensor) -> Tensor:
    """The sum of entries.

    Args:
        words: int64 `[units]`, values in [0, 2^32).
        chunk, number: int64 `[units]`, of each its chunk and which of the chunk's it is.
    """
    return (words * (fold((chunk << UNITS_BITS | number) * _signed(GOLDEN)) | 1)).sum()


def _high(value: Tensor) -> Tensor:
    return value >> 32 & 0xFFFF_FFFF


def _signed(constant: int) -> int:
    """The int64 with the bits of this u64."""
    return constant - (1 << 64) if constant >> 63 else constant
