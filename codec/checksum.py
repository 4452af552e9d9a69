"""The checksum of a segment: 64 bits, position-dependent, order-free to compute.

It covers what a payload says rather than the elements it decodes to, of which decoding is a
function: so neither side needs the elements again, and a change that decodes alike shows too. Two
32-bit halves x and y are hashed with the keys of number k:

    a = (x + KEYS_LO[k]) mod 2^32        b = (y + KEYS_HI[k]) mod 2^32
    NH(x, y; k) = (a + 1) * (b + 1) - 1 = a * b + a + b                      mod 2^64

A chunk's digest is a sum mod 2^64. Of a raw plane, over the chunk's words w of four elements:

    NH(e0 | e1 << 16, e2 | e3 << 16; w)

Of a top16 plane:

    NH(signs, codes; w)                          over the chunk's words w
    NH(low half, high half; 256 + j)             over the u64 words j of its slot
    mix64(i << 24 | exponent << 16 | position)   over the entries i of a list in the spill area
    mix64(1 << 40 | w << 16 | high nibbles)      over the words w whose high nibbles lie there

    term     = mix64(digest + mix64(chunk << 11 | length))                   mod 2^64
    checksum = sum over the segment's chunks of term                         mod 2^64

`chunk` is the chunk's number in the segment (plane by plane, see `format.Geometry`), `length` its
elements, `mix64` the finalizer of SplitMix64. The sum over words is the NH hash of UMAC
(RFC 4418, 5.2) with one added to each factor: a change that stays within one half always changes
the digest, and mix64 is a bijection, so it always changes the checksum. One 32 x 32 multiplication
covers four elements, and the sums commute, so chunks may be done in any order.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.format import SLOT_SIZES, WORDS
from codec.mix import MASK64, MIX_1, MIX_2, mix64

LENGTH_BITS = 11
"""Bits that hold a chunk's length, 0 to `CHUNK`."""
SLOT_KEY = WORDS
"""The number of the keys of a slot's first word."""
HIGH_TAG = 1 << 40
"""Tells a word of high nibbles from an entry of a list."""
MASK32 = (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15


def _keys() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    count = WORDS + max(SLOT_SIZES) // 8
    words = [mix64((word + 1) * GOLDEN & MASK64) for word in range(count)]
    low = np.array([word & MASK32 for word in words], dtype=np.uint32)
    return low, np.array([word >> 32 for word in words], dtype=np.uint32)


KEYS_LO, KEYS_HI = _keys()
"""u32 `[260]` each: the halves of SplitMix64's first outputs from seed 0."""


def nh(low: Tensor, high: Tensor, first_key: int = 0) -> Tensor:
    """NH of each word.

    Args:
        low, high: int64 `[chunks, words]`, values in [0, 2^32).
        first_key: the number of the first word's keys.

    Returns int64 `[chunks, words]`; int64 wraps as u64 does, so the bits are the hash's.
    """
    numbers = slice(first_key, first_key + low.shape[1])
    a = (low + torch.from_numpy(KEYS_LO[numbers].astype(np.int64)).to(low.device)) & MASK32
    b = (high + torch.from_numpy(KEYS_HI[numbers].astype(np.int64)).to(low.device)) & MASK32
    return a * b + a + b


def combine(digests: Tensor, lengths: Tensor, first_chunk: int) -> Tensor:
    """The sum of the terms of consecutive chunks, numbered from `first_chunk`.

    Args:
        digests: int64 `[chunks]`.
        lengths: int64 `[chunks]`, in elements.

    Returns an int64 0-d tensor on the same device, whose bits are the sum's.
    """
    numbers = torch.arange(first_chunk, first_chunk + len(digests), device=digests.device)
    tags = numbers << LENGTH_BITS | lengths
    return mix64_of(digests + mix64_of(tags)).sum()


def mix64_of(value: Tensor) -> Tensor:
    """`mix64` of each int64, taken as u64."""
    value = (value ^ _shifted(value, 30)) * _signed(MIX_1)
    value = (value ^ _shifted(value, 27)) * _signed(MIX_2)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, by: int) -> Tensor:
    """Shift right as u64 does, without the sign."""
    return value >> by & (1 << 64 - by) - 1


def _signed(constant: int) -> int:
    """The int64 with the bits of this u64."""
    return constant - (1 << 64) if constant >> 63 else constant
