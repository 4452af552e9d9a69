"""Decompose a linear into rank-one terms, ordered by their effect on the loss.

Let ``C = L Lᵀ`` and ``G = R Rᵀ`` be the moments of `runtime.offline.compress.moments`. Replacing W
by W' increases the loss by ``‖Rᵀ (W - W') L‖²``, up to a factor. The best W' of rank r is therefore
the truncated SVD of ``M = Rᵀ W L``, and dropping a term increases the loss by its squared singular
value. With G = I this is SVD-LLM's truncation-aware decomposition (arXiv 2403.07378, section 3.2).

The truncated SVD projects M on its leading singular vectors, so no factor is divided by singular
values: ``M ≈ P Pᵀ M`` gives ``U = R⁻ᵀ P`` and ``V = Pᵀ Rᵀ W``, and ``M ≈ M Q Qᵀ`` gives ``U = W L
Q`` and ``V = Qᵀ L⁻¹``. The smaller side is used, through the eigenvectors of its Gram matrix. A
pair of rank r consists of the first r columns of U and the first r rows of V.

All of it is computed in fp64 on the device of the weight. After whitening, singular values span so
many decades that the small ones are lost in fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.checkpoint.weights import FactorPair
from runtime.errors import CompressionError

INPUT_DAMPING = 1e-3
GRADIENT_DAMPING = 0.2
"""Damping added to the diagonals of C and G, relative to their means.

It accounts for directions that calibration did not cover. Gradients are noisier than inputs: with
less damping the factors fit the noise of the calibration text, with more they ignore the gradients.
In measurements, 0.1 was best for held-out text of the same kind, and larger values for text of
other kinds.
"""
_MIN_DAMPING = 1e-6
"""Relative damping added beyond the most negative eigenvalue, if a moment is indefinite."""


@dataclass(frozen=True)
class Decomposition:
    """The rank-one terms of one linear.

    Attributes:
        u, v: ``[out, k]`` and ``[k, in]``, with k the largest rank at which a factor pair is
            smaller than the dense weight.
        loss: fp64 ``[min(in, out)]``, the loss increase from dropping each term, in descending
            order.
    """

    u: Tensor
    v: Tensor
    loss: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape ``(out, in)`` of the linear's weight."""
        return self.u.shape[0], self.v.shape[1]

    def truncate(self, rank: int) -> FactorPair:
        """Return the factor pair of the first ``rank`` terms. Its factors are views."""
        return FactorPair(self.u[:, :rank], self.v[:rank])


def largest_rank(out: int, inner: int) -> int:
    """Return the largest rank at which a factor pair is smaller than the dense weight."""
    return (out * inner - 1) // (out + inner)


def decompose(
    weight: Tensor,
    inputs: Tensor | None,
    gradients: Tensor | None,
    damping: float = INPUT_DAMPING,
) -> Decomposition:
    """Decompose the weight ``[out, in]`` of a dense linear.

    Args:
        inputs: moment C ``[in, in]``, or None to use the identity.
        gradients: moment G ``[out, out]``, its diagonal ``[out]``, which is not damped, or None to
            use the identity.
        damping: relative damping of C.

    Raises:
        CompressionError: weights or moments are not finite.
    """
    W = weight.double()
    known = [matrix for matrix in (W, inputs, gradients) if matrix is not None]
    if not all(bool(matrix.isfinite().all()) for matrix in known):
        raise CompressionError("a linear's weights or activations are not finite")
    L = None if inputs is None else _root(inputs, damping)
    R = None if gradients is None else _gradient_root(gradients)
    left = W if R is None else R.t() @ W
    M = left if L is None else left @ L
    rank = largest_rank(*W.shape)
    if W.shape[0] <= W.shape[1]:
        loss, vectors = _leading_eigenvectors(M @ M.t())
        P = vectors[:, :rank]
        u = P if R is None else torch.linalg.solve_triangular(R.t(), P, upper=True)
        v = P.t() @ left
    else:
        loss, vectors = _leading_eigenvectors(M.t() @ M)
        Q = vectors[:, :rank]
        u = W @ (Q if L is None else L @ Q)
        v = (Q if L is None else torch.linalg.solve_triangular(L.t(), Q, upper=True)).t()
    scale = _balance(u, v)
    dtype = weight.dtype
    return Decomposition((u * scale).to(dtype), (v / scale[:, None]).to(dtype), loss)


def _gradient_root(gradients: Tensor) -> Tensor:
    """Return the root of a moment G, or of one given by its diagonal."""
    if gradients.ndim == 2:
        return _root(gradients, GRADIENT_DAMPING)
    # Rows without importance would make the root singular.
    importance = gradients.double()
    return importance.clamp_min(_MIN_DAMPING * importance.mean().clamp_min(1e-30)).sqrt().diag()


def _root(moment: Tensor, damping: float) -> Tensor:
    """Return the lower triangular Cholesky factor of the damped moment, in fp64.

    Moments are summed in fp32, and rounding can make them slightly indefinite. The diagonal is then
    also raised by the magnitude of the most negative eigenvalue.
    """
    matrix = moment.to(torch.float64, copy=True)
    mean = matrix.diagonal().mean()
    # The minimum keeps an all-zero moment positive definite.
    ridge = damping * mean.clamp_min(1e-30)
    matrix.diagonal().add_(ridge)
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        lowest = torch.linalg.eigvalsh(moment.double())[0].clamp_max(0.0)
        minimum = (_MIN_DAMPING * mean).clamp_min(1e-30)
        matrix.diagonal().add_(ridge.clamp_min(minimum) - lowest - ridge)
        root = torch.linalg.cholesky(matrix)
    return root


def _leading_eigenvectors(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in descending order, clamped at 0, and their eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0).clamp_min(0.0), vectors.flip(1)


def _balance(u: Tensor, v: Tensor) -> Tensor:
    """Return factors ``[k]`` that equalize the norms of each column of u and its row of v.

    After whitening the norms differ by many orders of magnitude, beyond the range of fp16.
    """
    tiny = torch.finfo(torch.float64).tiny
    columns = torch.linalg.vector_norm(u, dim=0).clamp_min(tiny)
    rows = torch.linalg.vector_norm(v, dim=1).clamp_min(tiny)
    scale: Tensor = (rows / columns).sqrt()
    return scale
