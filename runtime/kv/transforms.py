"""Hadamard transform, sums in a fixed order, and bit packing, shared by several KV formats.

All functions give the same bits for a vector, whatever the number of vectors in a call: they
consist of elementwise operations only, in a fixed order.
"""

import math

import torch
from torch import Tensor

_CODES_PER_BYTE = {1: 8, 2: 4, 4: 2}


def check_transformable(head_dim: int, format_name: str) -> None:
    """Check that a head dimension is a power of two of at least 4.

    Raises:
        ValueError: it is not, so `hadamard` or `pack` cannot process vectors of this dimension.
    """
    if head_dim < 4 or head_dim & (head_dim - 1):
        raise ValueError(
            f"KV format {format_name} needs a head dimension that is a power of two of at least 4, "
            f"not {head_dim}: it applies a Hadamard transform to each head"
        )


def hadamard(x: Tensor) -> Tensor:
    """Multiply vectors by the orthonormal Hadamard matrix in Sylvester's order.

    The matrix is symmetric and its own inverse. Computed in fp32: log2(d) butterfly stages with
    strides 1, 2, 4, …, then one multiplication by ``1 / sqrt(d)``. An element that is not finite
    makes all elements of its vector non-finite.

    Args:
        x: `[..., d]` of any floating dtype, d a power of two.

    Returns:
        fp32 `[..., d]`.
    """
    dim = x.shape[-1]
    out = x.float().contiguous()
    stride = 1
    while stride < dim:
        first, second = out.view(*out.shape[:-1], dim // (2 * stride), 2, stride).unbind(-2)
        out = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        stride *= 2
    return out * (1 / math.sqrt(dim))


def sum_by_halves(x: Tensor) -> Tensor:
    """Return the sum over the last dimension, `[..., 1]`, whose length is a power of two.

    The second half is added to the first one until one element is left.
    """
    while x.shape[-1] > 1:
        first, second = x.chunk(2, dim=-1)
        x = first + second
    return x


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 1, 2 or 4 bits into bytes.

    The vector is divided into 8 / bits parts of equal length. Byte i contains element i of every
    part, the first part in the lowest bits. A kernel therefore unpacks contiguous parts of a
    vector, not interleaved elements.

    Args:
        codes: uint8 `[..., d]`, each below ``2 ** bits``; d is divisible by the number of parts.

    Returns:
        uint8 `[..., d * bits / 8]`.
    """
    parts = codes.chunk(_CODES_PER_BYTE[bits], dim=-1)
    packed = parts[0].clone()
    for number, part in enumerate(parts[1:], start=1):
        packed |= part << (number * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes that `pack` packed, uint8 `[..., d]` from uint8 `[..., d * bits / 8]`."""
    mask = 2**bits - 1
    parts = [packed >> (number * bits) & mask for number in range(_CODES_PER_BYTE[bits])]
    return torch.cat(parts, dim=-1)
