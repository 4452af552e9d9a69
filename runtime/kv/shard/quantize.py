"""Integer codes of `shard`: PCA coefficients in 4 bits, rotated values in 2 bits."""

import math

import torch
from torch import Tensor

LEVEL = 0.45278
"""Smaller centroid of the 4-level Lloyd-Max quantizer of N(0, 1); the larger is `OUTER_LEVEL`."""
OUTER_LEVEL = 1.51042
BOUNDARY = (LEVEL + OUTER_LEVEL) / 2
MAX_CODE = 7


def hadamard(dim: int) -> Tensor:
    """Return the orthonormal Hadamard matrix of Sylvester's construction, fp32 ``[dim, dim]``.

    It is symmetric, and therefore its own inverse.

    Args:
        dim: power of two.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * math.sqrt(1 / dim)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack integers in [-7, 7], ``[..., n]``, to uint8 ``[..., n / 2]``.

    Byte i has element i in its low nibble and element ``i + n / 2`` in its high nibble, each
    plus 8.
    """
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return what `pack_int4` packed, as fp32."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).float() - 8


def quantize_values(rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize vectors whose elements are about normally distributed to 2 bits.

    Args:
        rotated: fp32 ``[..., d]``.

    Returns:
        uint8 codes ``[..., d / 4]``, and bf16 norms ``[..., 1]``. Byte i has the elements ``i + j d
        / 4`` in its bits 2 j and 2 j + 1. The norm is the factor that minimizes the squared error
        of ``norm * centroids``, and therefore a little less than the root mean square.
    """
    x = rotated * rotated.square().mean(-1, keepdim=True).clamp_min(1e-30).rsqrt()
    codes = (x > -BOUNDARY).to(torch.uint8) + (x > 0) + (x > BOUNDARY)
    points = _centroids(codes)
    norms = (rotated * points).sum(-1, keepdim=True) / points.square().sum(-1, keepdim=True)
    parts = codes.chunk(4, dim=-1)
    packed = parts[0] | (parts[1] << 2) | (parts[2] << 4) | (parts[3] << 6)
    return packed, norms.to(torch.bfloat16)


def dequantize_values(packed: Tensor, norms: Tensor) -> Tensor:
    """Return the rotated vectors, fp32 ``[..., d]``."""
    codes = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return _centroids(codes) * norms.float()


def _centroids(codes: Tensor) -> Tensor:
    """Map codes 0 … 3 to the centroids in ascending order, without a gather."""
    step = OUTER_LEVEL - LEVEL
    x = codes.float() - 1.5
    return x.sign() * LEVEL + (x - x.sign() * 0.5) * step
