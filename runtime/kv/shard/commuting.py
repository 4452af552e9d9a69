"""Bases of K that commute with RoPE: a unitary mix of KV heads for each frequency."""

import torch
from torch import Tensor

from runtime.kv.calibration import spectral_basis


def commuting_basis(covariance: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return standard deviations and an orthonormal basis that commutes with RoPE.

    RoPE multiplies the complex number ``x_i + j x_{i + dim/2}`` of each head by the same phase. A
    complex-linear mix of the heads' numbers of one frequency therefore commutes with it: queries
    can be projected once, and coefficients rotated. Each frequency has the principal components of
    its Hermitian covariance. The phase of a component is chosen such that its real and imaginary
    parts are uncorrelated, as they are quantized on their own.

    Args:
        covariance: fp64 ``[kv_heads * dim, kv_heads * dim]`` of K before RoPE.

    Returns:
        Deviations ``[kv_heads * dim]``, descending, and vectors as columns in the same order.
    """
    width = len(covariance)
    half = width // kv_heads // 2
    # [frequency, part, head, part, head], where the parts are real and imaginary
    split = covariance.view(kv_heads, 2, half, kv_heads, 2, half)
    own = torch.diagonal(split, dim1=2, dim2=5).permute(4, 1, 0, 3, 2)
    real, imaginary = own[:, 0, :, 0] + own[:, 1, :, 1], own[:, 1, :, 0] - own[:, 0, :, 1]
    _, vectors = torch.linalg.eigh(torch.complex(real, imaginary))  # [frequency, head, component]
    first = torch.cat((vectors.real, vectors.imag), 1)  # conj(u) z has the real part first · (x, y)
    second = torch.cat((-vectors.imag, vectors.real), 1)
    pairs = torch.stack((first, second), -1)  # [frequency, part * head, component, 2]
    joined = own.flatten(3, 4).flatten(1, 2)  # [frequency, part * head, part * head]
    of_pairs = torch.einsum("fack,fab,fbcl->fckl", pairs, joined, pairs)
    deviations, turns = spectral_basis(of_pairs)  # [frequency, component, 2], [..., 2, 2]
    pairs = torch.einsum("fack,fckl->facl", pairs, turns)
    basis = covariance.new_zeros(kv_heads, 2, half, half, kv_heads, 2)
    index = torch.arange(half)
    placed = pairs.view(half, 2, kv_heads, kv_heads, 2).permute(0, 2, 1, 3, 4)
    basis[:, :, index, index] = placed.permute(1, 2, 0, 3, 4)
    found, columns = deviations.flatten(), basis.view(width, width)
    order = found.argsort(descending=True, stable=True)
    return found[order], columns[:, order]
