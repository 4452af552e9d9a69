"""One projection as a sum of rank-one terms, those that matter most to the loss first.

With ``C = L Lᵀ`` and ``G = R Rᵀ`` (see `runtime.compress.moments`), the loss of replacing W by W'
is ``‖Rᵀ (W - W') L‖²``, so the best W' of rank r comes from the truncated SVD of ``M = Rᵀ W L``,
and the loss of dropping a term is its singular value squared. With G = I this is SVD-LLM's
truncation-aware decomposition (arXiv 2403.07378, section 3.2).

The truncated SVD is a projection of M on its leading singular vectors, so neither factor needs a
division by singular values: ``M ≈ P Pᵀ M`` gives ``U = R⁻ᵀ P`` and ``V = Pᵀ Rᵀ W``, and
``M ≈ M Q Qᵀ`` gives ``U = W L Q`` and ``V = Qᵀ L⁻¹``. Whichever side is smaller is taken, through
the eigenvectors of its Gram matrix. Truncating is slicing: of either, the first r terms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.checkpoint.weights import Dense, FactorPair, Linear
from runtime.errors import CompressionError

INPUT_DAMPING = 1e-3
GRADIENT_DAMPING = 0.2
"""Added to the diagonals of C and G, relative to their means: what calibration did not see.

Gradients are noisier than inputs: less damping fits the calibration text's noise, more forgets what
the gradients say. Text of the same kind was served best by 0.1, text of another kind by more.
"""
_LEAST_DAMPING = 1e-6
"""What a moment gets, beyond its most negative eigenvalue, if it has no root as it is."""


@dataclass(frozen=True)
class Decomposition:
    """``u`` ``[out, k]``, ``v`` ``[k, in]`` and the ``loss`` ``[k]`` fp64 of dropping each term.

    ``loss`` goes over all ``min(in, out)`` terms, in falling order; u and v only over those that a
    factor pair smaller than ``dense`` can have.
    """

    dense: Dense
    u: Tensor
    v: Tensor
    loss: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        out, inner = self.dense.weight.shape
        return out, inner

    def truncate(self, rank: int | None) -> Linear:
        """The first ``rank`` terms; None is the dense projection."""
        if rank is None:
            return self.dense
        # Cloned, for a slice would keep (and a checkpoint would store) all of the terms.
        u, v = (
            factor.clone(memory_format=torch.contiguous_format)
            for factor in (self.u[:, :rank], self.v[:rank])
        )
        return FactorPair(u, v, self.dense.bias)


def largest_rank(out: int, inner: int) -> int:
    """The largest rank with ``r (in + out) < in out``: from the next on, dense is not larger."""
    return (out * inner - 1) // (out + inner)


def decompose(
    dense: Dense, inputs: Tensor, gradients: Tensor | None, damping: float = INPUT_DAMPING
) -> Decomposition:
    """Decompose ``W`` ``[out, in]`` under the moments C ``[in, in]`` and G ``[out, out]``, in fp64;
    without gradients G is the identity. ``damping`` is that of C.

    Raises `CompressionError` if weights or moments are not finite.
    """
    W = dense.weight.double()
    known = [W, inputs] if gradients is None else [W, inputs, gradients]
    if not all(bool(matrix.isfinite().all()) for matrix in known):
        raise CompressionError("a projection or its activations are not finite")
    L = _root(inputs, damping)
    R = None if gradients is None else _root(gradients, GRADIENT_DAMPING)
    left = W if R is None else R.t() @ W
    M = left @ L
    rank = largest_rank(*W.shape)
    if W.shape[0] <= W.shape[1]:
        loss, vectors = _leading_eigenvectors(M @ M.t())
        P = vectors[:, :rank]
        u = P if R is None else torch.linalg.solve_triangular(R.t(), P, upper=True)
        v = P.t() @ left
    else:
        loss, vectors = _leading_eigenvectors(M.t() @ M)
        Q = vectors[:, :rank]
        u = W @ (L @ Q)
        v = torch.linalg.solve_triangular(L.t(), Q, upper=True).t()
    scale = _balance(u, v)
    dtype = dense.weight.dtype
    return Decomposition(dense, (u * scale).to(dtype), (v / scale[:, None]).to(dtype), loss)


def _root(moment: Tensor, damping: float) -> Tensor:
    """A lower triangular root in fp64 of the damped moment.

    Moments are summed in fp32, so rounding can leave them slightly indefinite: then the diagonal is
    raised by the most negative eigenvalue as well.
    """
    matrix = moment.double()
    # The floor keeps a direction that was never used at all (a moment of zero) invertible.
    ridge = damping * matrix.diagonal().mean().clamp_min(1e-30)
    diagonal = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix + ridge * diagonal)
    if failed:
        lowest = torch.linalg.eigvalsh(matrix)[0].clamp_max(0.0)
        least = (_LEAST_DAMPING * matrix.diagonal().mean()).clamp_min(1e-30)
        root = torch.linalg.cholesky(matrix + (ridge.clamp_min(least) - lowest) * diagonal)
    return root


def _leading_eigenvectors(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first and none negative, and their vectors as columns."""
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0).clamp_min(0.0), vectors.flip(1)


def _balance(u: Tensor, v: Tensor) -> Tensor:
    """``[k]`` factors that give each column of u and its row of v the same norm.

    The whitening leaves them many orders of magnitude apart, which bf16 bears and fp16 does not.
    """
    tiny = torch.finfo(torch.float64).tiny
    columns = torch.linalg.vector_norm(u, dim=0).clamp_min(tiny)
    rows = torch.linalg.vector_norm(v, dim=1).clamp_min(tiny)
    scale: Tensor = (rows / columns).sqrt()
    return scale
