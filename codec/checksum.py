"""64-bit checksum of a segment. It depends on positions, but not on the order of computation.

It covers the stored words and entries, not the decoded elements. It therefore needs no second pass
over the elements, and also detects changes that decode to the same elements. All arithmetic is
modulo 2^64:

    fold(z)  = y ^ y >> 32 with y = (z ^ z >> 32) * GOLDEN

    digest   = sum over the words k of a column, in stream order, of word * KEYS[k]
    column   = fold(digest + ((32 * chunk + column) << 8 | entry_words) * GOLDEN)
    entry    = word * (fold((chunk << 8 | j) * GOLDEN) | 1)      for entry j of a chunk
    checksum = sum of all columns and entries

`chunk` is the index of the chunk in the segment: plane by plane, in the order that
`format.Geometry` defines. `column` is the index of the column in its chunk. `entry_words` is the
number of entry words of the chunk. In a raw plane, `entry_words` is 0 and the words of a column are
its elements in memory order. In an uncoded chunk, too, the words of a column are its elements in
memory order; words that are stored as entries have no entry terms.

Keys are odd, so a change of one word always changes the digest of its column, and for any other
word of the column at most one new value restores the digest. `fold` is a bijection, so a changed
digest always changes the term of its column. One multiplication covers two to four elements. Sums
commute, so columns may be computed in any order.
"""

import torch
from torch import Tensor

from codec.mix import MASK64, mix64

GOLDEN = 0x9E3779B97F4A7C15
KEYS = tuple(mix64((k + 1) * GOLDEN & MASK64) >> 32 | 1 for k in range(16))
"""One key for each word of a column: the high halves of the first outputs of SplitMix64 from seed
0, made odd.
"""
ENTRY_COUNT_BITS = 8
"""Bits that hold the number of entry words of a chunk, which is at most 160."""


def fold(value: Tensor) -> Tensor:
    """Compute ``fold(z)`` (see above) of int64 tensors, interpreted as uint64."""
    value = (value ^ _high(value)) * _signed(GOLDEN)
    return value ^ _high(value)


def columns(words: Tensor, chunk: Tensor, column: Tensor, entry_words: Tensor | int) -> Tensor:
    """Return the sum of the column terms.

    int64 arithmetic wraps like uint64 arithmetic, so the result is correct modulo 2^64.

    Args:
        words: int64 `[columns, words]`, values in [0, 2^32).
        chunk, column, entry_words: int64 `[columns]`, as defined above.

    Returns:
        int64 scalar tensor.
    """
    keys = torch.tensor(KEYS[: words.shape[1]], device=words.device)
    tags = (32 * chunk + column << ENTRY_COUNT_BITS | entry_words) * _signed(GOLDEN)
    return fold((words * keys).sum(dim=1) + tags).sum()


def entries(words: Tensor, chunk: Tensor, number: Tensor) -> Tensor:
    """Return the sum of the entry terms.

    Args:
        words: int64 `[entries]`, values in [0, 2^32).
        chunk, number: int64 `[entries]`, chunk of each entry and its index in the chunk.

    Returns:
        int64 scalar tensor.
    """
    return (words * (fold((chunk << ENTRY_COUNT_BITS | number) * _signed(GOLDEN)) | 1)).sum()


def _high(value: Tensor) -> Tensor:
    return value >> 32 & 0xFFFF_FFFF


def _signed(constant: int) -> int:
    """Reinterpret the bits of a uint64 as an int64."""
    return constant - (1 << 64) if constant >> 63 else constant
