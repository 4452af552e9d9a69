"""The checksum of a segment's decoded content: 64 bits, position-dependent, order-free to compute.

A chunk's elements are taken as 16-bit patterns, zero-padded to a multiple of four. Four of them are
two 32-bit halves, `lo = e0 | e1 << 16` and `hi = e2 | e3 << 16`. With the keys of word `w`,

    a = (lo + KEYS_LO[w]) mod 2^32        b = (hi + KEYS_HI[w]) mod 2^32
    digest   = sum over words of (a + 1) * (b + 1) - 1 = a * b + a + b       mod 2^64
    term     = mix64(digest + mix64(chunk << 11 | length))                   mod 2^64
    checksum = sum over the segment's chunks of term                         mod 2^64

`chunk` is the chunk's number in the segment (plane by plane, see `format.Geometry`), `length` its
elements, `mix64` the finalizer of SplitMix64. The sum over words is the NH hash of UMAC
(RFC 4418, 5.2) with one added to each factor: a change that stays within one half-word always
changes the digest, and mix64 is a bijection, so it always changes the checksum. One 32 x 32
multiplication covers four elements, which a kernel has in registers anyway, and the sums commute,
so chunks may be done in any order.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.format import CHUNK

WORD = 4
"""Elements that one multiplication covers."""
LENGTH_BITS = 11
"""Bits that hold a chunk's length, 0 to `CHUNK`."""
MASK64 = (1 << 64) - 1
MASK32 = (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """The finalizer of SplitMix64, a bijection of 64 bits."""
    value = (value ^ (value >> 30)) * MIX_1 & MASK64
    value = (value ^ (value >> 27)) * MIX_2 & MASK64
    return value ^ (value >> 31)


def _keys() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    words = [mix64((word + 1) * GOLDEN & MASK64) for word in range(CHUNK // WORD)]
    low = np.array([word & MASK32 for word in words], dtype=np.uint32)
    return low, np.array([word >> 32 for word in words], dtype=np.uint32)


KEYS_LO, KEYS_HI = _keys()
"""u32 `[CHUNK // WORD]` each: the halves of SplitMix64's first outputs from seed 0."""


def digest_chunks(elements: Tensor, lengths: Tensor) -> Tensor:
    """Digests of chunks.

    Args:
        elements: int64 `[chunks, CHUNK]`, patterns in [0, 2^16), zero past a chunk's length.
        lengths: int64 `[chunks]`, in elements.

    Returns int64 `[chunks]`; int64 wraps as u64 does, so the bits are the digest's.
    """
    word = elements.reshape(elements.shape[0], CHUNK // WORD, WORD)
    low = torch.from_numpy(KEYS_LO.astype(np.int64)).to(elements.device)
    high = torch.from_numpy(KEYS_HI.astype(np.int64)).to(elements.device)
    a = (word[..., 0] + (word[..., 1] << 16) + low) & MASK32
    b = (word[..., 2] + (word[..., 3] << 16) + high) & MASK32
    used = WORD * torch.arange(CHUNK // WORD, device=elements.device) < lengths[:, None]
    return (a * b + a + b).masked_fill(~used, 0).sum(dim=1)


def combine(digests: Tensor, lengths: Tensor, first_chunk: int) -> Tensor:
    """The sum of the terms of consecutive chunks, numbered from `first_chunk`.

    Args:
        digests: int64 `[chunks]`, of `digest_chunks`.
        lengths: int64 `[chunks]`, in elements.

    Returns an int64 0-d tensor on the same device, whose bits are the sum's.
    """
    numbers = torch.arange(first_chunk, first_chunk + len(digests), device=digests.device)
    tags = numbers << LENGTH_BITS | lengths
    return _mix64_of(digests + _mix64_of(tags)).sum()


def _mix64_of(value: Tensor) -> Tensor:
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
