"""Orthonormal bases of activations, and how many of their components a format keeps.

Ranks follow "FDC: Fast KV Dimensionality Compression for Efficient LLM Inference" (the FDC paper).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import KVFormatError

RANK_MULTIPLE = 16
"""Ranks are multiples of this: 32 bytes of bf16, and the smallest depth of a tensor-core matmul."""


@dataclass(frozen=True)
class RankChoice:
    """Number of components of a basis to keep.

    Attributes:
        removal_rate: maximum sum of the dropped singular values, as a fraction of the sum of all
            (FDC paper, section 5.2).
        rank: rank of every head, which replaces ``removal_rate`` unless None.
        adaptive: whether each head has its own rank. Otherwise all heads of a layer have the same
            rank, computed from the sums of their singular values.

    Raises:
        KVFormatError: a value is out of range.
    """

    removal_rate: float
    rank: int | None = None
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.removal_rate < 1.0:
            raise KVFormatError(f"removal rate {self.removal_rate} is not in [0, 1)")
        if self.rank is not None and self.rank < 1:
            raise KVFormatError(f"rank {self.rank} is not positive")


def spectral_basis(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return singular values and right singular vectors of X from ``moments = XᵀX``.

    Args:
        moments: fp64 ``[..., d, d]``, symmetric.

    Returns:
        Singular values ``[..., d]``, descending, and vectors ``[..., d, d]`` as columns in the same
        order. The element of largest magnitude of each vector is positive.
    """
    eigenvalues, vectors = torch.linalg.eigh(moments)
    vectors = vectors.flip(-1)
    largest = vectors.abs().argmax(dim=-2, keepdim=True)
    signs = vectors.gather(-2, largest).sign()
    return eigenvalues.flip(-1).clamp_min(0.0).sqrt(), vectors * signs


def truncated_basis(
    moments: Tensor, choice: RankChoice, multiple: int = RANK_MULTIPLE
) -> tuple[Tensor, list[int]]:
    """Return the leading singular vectors of each head.

    Args:
        moments: fp64 ``[heads, d, d]``.
        multiple: ranks are rounded up to a multiple of this, at most d.

    Returns:
        fp32 ``[heads, d, width]`` on the CPU and the rank of each head. The width is the largest
        rank; columns beyond a head's rank are 0.
    """
    spectra, vectors = spectral_basis(moments)
    heads, dim = spectra.shape
    if choice.rank is not None:
        found = [choice.rank] * heads
    elif choice.adaptive:
        found = [removal_rank(spectrum, choice.removal_rate) for spectrum in spectra]
    else:
        found = [removal_rank(spectra.sum(0), choice.removal_rate)] * heads
    ranks = [min(dim, max(1, -(-rank // multiple)) * multiple) for rank in found]
    basis = torch.zeros(heads, dim, max(ranks))
    for head, rank in enumerate(ranks):
        basis[head, :, :rank] = vectors[head, :, :rank]
    return basis, ranks


def split_basis(basis: Tensor) -> Tensor:
    """Return a basis as the sum of two bf16 tensors, bf16 ``[2, ...]``.

    The first is the basis rounded to bf16, the second the rounded rest. Their sum has a relative
    error of at most 2^-17.
    """
    high = basis.to(torch.bfloat16)
    return torch.stack((high, (basis - high.float()).to(torch.bfloat16)))


def removal_rank(spectrum: Tensor, removal_rate: float) -> int:
    """Return the number of components to keep (FDC paper, section 5.2, equation 1).

    The dropped singular values sum to at most ``removal_rate`` times the sum of all; the result is
    the smallest number with this property.

    Args:
        spectrum: singular values ``[d]``, descending.
    """
    # Sum from the smallest: a difference of prefix sums would hide values below rounding error.
    dropped = spectrum.new_zeros(len(spectrum) + 1)
    dropped[:-1] = spectrum.flip(0).cumsum(0).flip(0)
    return int((dropped <= removal_rate * dropped[0]).int().argmax())
