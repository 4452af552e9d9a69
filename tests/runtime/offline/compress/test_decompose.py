"""The decomposition of one linear, and the allocation of ranks."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import CompressionError
from runtime.offline.compress.decompose import (
    GRADIENT_DAMPING,
    INPUT_DAMPING,
    Decomposition,
    decompose,
    largest_rank,
)
from runtime.offline.compress.ranks import Choice, allocate_ranks

SHAPES = [(48, 48), (17, 63), (63, 17), (100, 31), (5, 1000)]


def moment(dim: int, seed: int, rows: int = 2000) -> torch.Tensor:
    """Return an ill-conditioned second moment, like those of activations."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator) @ torch.randn(dim, dim, generator=generator)
    x = x * torch.logspace(0, 3, dim)
    return x.t() @ x / rows


def weight(out: int, inner: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out * inner)
    if rank is None:
        return torch.randn(out, inner, generator=generator)
    return torch.randn(out, rank, generator=generator) @ torch.randn(
        rank, inner, generator=generator
    )


def multiply(part: Decomposition, rank: int) -> torch.Tensor:
    pair = part.truncate(rank)
    assert pair.rank == rank
    return pair.u @ pair.v


def damped_root(matrix: torch.Tensor, damping: float) -> torch.Tensor:
    wide = matrix.double()
    ridge = damping * wide.diagonal().mean()
    root: torch.Tensor = torch.linalg.cholesky(wide + ridge * torch.eye(len(wide)))
    return root


@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_low_rank_weight_is_reproduced(out: int, inner: int) -> None:
    rank = min(3, largest_rank(out, inner))
    W = weight(out, inner, rank)
    part = decompose(W, moment(inner, 1), moment(out, 2))
    # Whitening spans three decades, which amplifies the rounding errors of fp32 (6e-8) by 1e3.
    torch.testing.assert_close(multiply(part, rank), W, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("out", "inner"), SHAPES)
@pytest.mark.parametrize("rank", [1, 4])
def test_loss_equals_dropped_terms_and_is_minimal(out: int, inner: int, rank: int) -> None:
    W = weight(out, inner)
    C, G = moment(inner, 3), moment(out, 4)
    part = decompose(W, C, G)
    L, R = damped_root(C, INPUT_DAMPING), damped_root(G, GRADIENT_DAMPING)
    lost = torch.linalg.norm(R.t() @ (W.double() - multiply(part, rank).double()) @ L) ** 2
    torch.testing.assert_close(lost, part.loss[rank:].sum(), rtol=1e-4, atol=0.0)
    # Eckart-Young: no matrix of that rank has a smaller error.
    best = torch.linalg.svdvals(R.t() @ W.double() @ L)[rank:].square().sum()
    torch.testing.assert_close(lost, best, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_identity_moments_give_the_plain_svd(out: int, inner: int) -> None:
    W = weight(out, inner)
    part = decompose(W, torch.eye(inner), torch.eye(out))
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    plain = U[:, :2] * S[:2] @ Vh[:2]
    torch.testing.assert_close(multiply(part, 2), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_factors_are_balanced_and_smaller_than_dense(out: int, inner: int) -> None:
    part = decompose(weight(out, inner), moment(inner, 5), moment(out, 6))
    columns, rows = part.u.norm(dim=0), part.v.norm(dim=1)
    torch.testing.assert_close(columns, rows, rtol=1e-4, atol=0.0)
    assert part.u.shape[1] == largest_rank(out, inner)
    assert part.u.numel() + part.v.numel() < out * inner
    assert (part.u.shape[1] + 1) * (out + inner) >= out * inner


def test_indefinite_and_zero_moments_are_accepted() -> None:
    W = weight(30, 20, rank=2)
    indefinite = moment(20, 7)
    indefinite -= 0.01 * indefinite.diagonal().mean() * torch.eye(20)
    assert torch.linalg.eigvalsh(indefinite)[0] < 0
    for C, G in ((indefinite, torch.zeros(30, 30)), (torch.zeros(20, 20), torch.eye(30))):
        part = decompose(W, C, G)
        torch.testing.assert_close(multiply(part, 2), W, rtol=1e-3, atol=1e-3)


def test_moments_that_are_not_finite_are_refused() -> None:
    bad = torch.eye(8)
    bad[0, 0] = torch.inf
    with pytest.raises(CompressionError, match="not finite"):
        decompose(weight(8, 8), bad, torch.eye(8))


def test_linear_that_truncates_badly_stays_dense() -> None:
    steep = Choice(10, 10, np.array([100.0, 1e-3] + [1e-6] * 8))
    flat = Choice(10, 10, np.full(10, 50.0))
    # The budget is 120 parameters: 100 for `flat` as dense, and 20 for `steep` at rank 1.
    assert allocate_ranks([steep, flat], keep=0.6, multiple=1) == [1, None]


@given(
    st.lists(
        st.tuples(st.integers(4, 9), st.integers(4, 9), st.integers(0, 2**31)),
        min_size=2,
        max_size=3,
    ),
    st.floats(0.5, 0.99),
)
@settings(max_examples=60)
def test_allocated_ranks_are_pareto_optimal(
    shapes: list[tuple[int, int, int]], keep: float
) -> None:
    choices = [
        Choice(out, inner, np.sort(np.random.default_rng(seed).pareto(1.0, min(out, inner)))[::-1])
        for out, inner, seed in shapes
    ]

    def cost(ranks: tuple[int | None, ...]) -> tuple[float, float]:
        parameters = loss = 0.0
        for choice, rank in zip(choices, ranks, strict=True):
            size = choice.out * choice.inner
            parameters += size if rank is None else rank * (choice.out + choice.inner)
            loss += 0.0 if rank is None else float(choice.loss[rank:].sum())
        return parameters, loss

    chosen = cost(tuple(allocate_ranks(choices, keep, 1)))
    assert chosen[0] <= keep * sum(choice.out * choice.inner for choice in choices)
    every = [[*range(1, largest_rank(c.out, c.inner) + 1), None] for c in choices]
    for ranks in itertools.product(*every):
        parameters, loss = cost(ranks)
        assert parameters > chosen[0] or loss >= chosen[1] * (1 - 1e-9)


def test_ranks_are_multiples_of_the_requested_number() -> None:
    choices = [Choice(64, 64, np.logspace(3, 0, 64)), Choice(64, 100, np.logspace(2, 0, 64))]
    ranks = allocate_ranks(choices, keep=0.5, multiple=8)
    assert all(rank is not None and rank % 8 == 0 for rank in ranks)


def test_all_linears_stay_dense_at_keep_one() -> None:
    assert allocate_ranks([Choice(8, 8, np.ones(8))] * 3, keep=1.0, multiple=1) == [None] * 3


def test_keep_below_the_smallest_ranks_is_refused() -> None:
    with pytest.raises(CompressionError, match="at least 8"):
        allocate_ranks([Choice(32, 32, np.ones(32))], keep=0.4, multiple=8)
