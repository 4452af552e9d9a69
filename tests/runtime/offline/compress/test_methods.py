"""SVD-LLM v1 and v2 and Basis Sharing compared with their formulas."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint, Dense, FactorPair, load_checkpoint, write_checkpoint
from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.weights import linears_of, parameters_kept
from runtime.errors import CompressionError
from runtime.models.llama import PROJECTIONS
from runtime.offline.compress import Allocation, Method, compress, decompose_model
from runtime.offline.compress.factorize import ranks_of
from runtime.offline.compress.forward import forward, forward_layer, rope_rows
from runtime.offline.compress.ranks import Choice, log_loss_ranks, uniform_ranks
from tests.runtime.tiny import CONFIG, linear_shape, tiny_checkpoint

MODEL = replace(
    tiny_checkpoint(bias=True, config=replace(CONFIG, num_layers=3)), model_hash="e" * 64
)
TOKENS = torch.randint(0, CONFIG.vocab_size, (24, 40), generator=torch.Generator().manual_seed(6))
SHARED = ("q", "k", "v", "gate", "up")


def inputs_of(checkpoint: Checkpoint) -> list[dict[str, Tensor]]:
    """Return Σ x xᵀ for the inputs x of each linear of each layer, over all tokens."""
    sums: list[dict[str, Tensor]] = [{} for _ in checkpoint.layers]
    hidden = checkpoint.embedding[TOKENS]
    rope = rope_rows(checkpoint.config, TOKENS.shape[1], hidden)
    for layer, found in zip(checkpoint.layers, sums, strict=True):

        def observe(name: str, x: Tensor, _: Tensor, found: dict[str, Tensor] = found) -> None:
            rows = x.flatten(0, 1).double()
            found[name] = rows.t() @ rows

        hidden = forward_layer(checkpoint.config, layer, hidden, rope, observe)
    return sums


def truncated(W: Tensor, C: Tensor, rank: int) -> Tensor:
    """Return SVD-LLM's approximation of W: with S Sᵀ = C, the truncated SVD of W S, times S⁻¹."""
    S = torch.linalg.cholesky(C)
    U, sigma, Vh = torch.linalg.svd(W.double() @ S, full_matrices=False)
    product: Tensor = (U[:, :rank] * sigma[:rank]) @ Vh[:rank] @ torch.linalg.inv(S)
    return product


def assert_near_truncated(pair: FactorPair, W: Tensor, C: Tensor) -> None:
    """Check that ``pair``, whose factors are rounded to bf16, is `truncated` of the same rank."""
    S, product = torch.linalg.cholesky(C), (pair.u @ pair.v).double()
    expected = truncated(W, C, pair.rank)
    # bf16 has 8 bits: the relative error of each factor is up to 0.4 %.
    torch.testing.assert_close(product, expected, rtol=0, atol=0.01 * float(expected.abs().max()))
    losses = [float(torch.linalg.norm((W - candidate) @ S)) for candidate in (product, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def weight_of(layer: int, projection: str) -> Tensor:
    linear = getattr(MODEL.layers[layer], projection)
    assert isinstance(linear, Dense)
    return linear.weight


@pytest.mark.parametrize("method", [Method.SVD_LLM, Method.SVD_LLM_V2])
def test_svd_llm_matches_its_formula(method: Method) -> None:
    model = decompose_model(MODEL, TOKENS, method=method)
    inputs = inputs_of(MODEL)
    for part in model.parts:
        ((layer, projection),) = part.members
        pair = part.decomposition.truncate(5)
        assert_near_truncated(pair, weight_of(layer, projection), inputs[layer][projection])


def test_uniform_ranks_match_the_paper() -> None:
    made, report = compress(MODEL, TOKENS, 0.6, rank_multiple=1, method=Method.SVD_LLM)
    for ranks in report.ranks:
        for projection in PROJECTIONS:
            out, inner = linear_shape(MODEL.config, projection)
            assert ranks[projection] == int(out * inner * 0.6 / (out + inner))
    assert made.factorization is not None
    assert made.factorization.method == "svd-llm-svd-1"


def test_basis_sharing_matches_its_formula() -> None:
    made, _ = compress(MODEL, TOKENS, 0.6, rank_multiple=1, method=Method.BASIS_SHARING)
    model = decompose_model(MODEL, TOKENS, method=Method.BASIS_SHARING)
    inputs = inputs_of(MODEL)
    by_members = {part.members: part.decomposition for part in model.parts}
    for projection in PROJECTIONS:
        out, inner = linear_shape(MODEL.config, projection)
        first, second, third = (dict(linears_of(layer))[projection] for layer in made.layers)
        assert all(isinstance(linear, FactorPair) for linear in (first, second, third))
        assert isinstance(first, FactorPair)
        assert isinstance(second, FactorPair)
        assert isinstance(third, FactorPair)
        # Layers share in pairs, so the third layer has no partner.
        assert third.rank == int(out * inner * 0.6 / (out + inner))
        if projection not in SHARED:
            assert first.v is not second.v
            continue
        assert first.v is second.v
        assert third.v is not first.v
        assert first.rank == int(inner * out * 2 * 0.6 / (inner + out * 2))
        stacked = torch.cat([weight_of(0, projection), weight_of(1, projection)])
        pair = by_members[(0, projection), (1, projection)].truncate(first.rank)
        assert_near_truncated(pair, stacked, inputs[0][projection] + inputs[1][projection])
        assert torch.equal(torch.cat([first.u, second.u]), pair.u)
        assert first.bias is getattr(MODEL.layers[0], projection).bias


@pytest.mark.few(6)
@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("allocation", list(Allocation))
def test_every_method_and_allocation_keeps_the_budget_and_round_trips(
    method: Method, allocation: Allocation, tmp_path: Path
) -> None:
    made, report = compress(
        MODEL, TOKENS, 0.7, rank_multiple=2, method=method, allocation=allocation
    )
    assert 0.6 < report.parameters_kept <= 0.7
    assert report.parameters_kept == parameters_kept(made)
    assert bool(forward(made, TOKENS[:2]).isfinite().all())
    write_checkpoint(made, tmp_path / "made")
    again = load_checkpoint(tmp_path / "made")
    assert again.model_hash == made.model_hash
    assert again.factorization == made.factorization
    assert ranks_of(again) == ranks_of(made)
    assert basis_groups(again) == basis_groups(made)
    if allocation is Allocation.UNIFORM:
        assert bool(basis_groups(made)) == (method is Method.BASIS_SHARING)
    torch.testing.assert_close(forward(again, TOKENS[:2]), forward(made, TOKENS[:2]))


def choice(out: int, inner: int, scale: float) -> Choice:
    return Choice(out, inner, scale * np.linspace(1, 0.1, min(out, inner)) ** 4)


def test_log_loss_ranks_grow_with_the_loss() -> None:
    choices = [choice(64, 48, scale) for scale in (1.0, 10.0, 100.0)] + [choice(64, 48, 7.0)]
    kinds = ["q", "q", "q", "k"]
    ranks = log_loss_ranks(choices, kinds, 0.6, 1, tokens=1000)
    uniform = uniform_ranks(choices, 0.6, 1)
    assert all(isinstance(rank, int) for rank in ranks)
    found = [rank or 0 for rank in ranks]
    assert found[0] < found[1] < found[2]
    assert found[3] == uniform[3]
    size = 64 * 48 * 3
    kept = sum(rank * (64 + 48) for rank in found[:3])
    assert 0.6 * size - 3 * (64 + 48) <= kept <= 0.6 * size


def test_log_loss_ranks_are_bounded_for_one_huge_loss() -> None:
    choices = [choice(64, 48, scale) for scale in (1.0, 1.0, 1e12)]
    ranks = log_loss_ranks(choices, ["q"] * 3, 0.3, 1, tokens=1000)
    kept = sum((rank or 0) * (64 + 48) for rank in ranks)
    assert 0.3 * 64 * 48 * 3 - 3 * 112 <= kept <= 0.3 * 64 * 48 * 3
    assert min(rank or 0 for rank in ranks) > 0


def test_singular_input_moments_are_accepted() -> None:
    """Σ x xᵀ of few tokens is singular; its diagonal is damped, as in the papers."""
    made, _ = compress(MODEL, TOKENS[:1, :5], 0.6, rank_multiple=1, method=Method.SVD_LLM)
    assert bool(forward(made, TOKENS[:2]).isfinite().all())


def test_keep_below_the_smallest_rank_is_refused() -> None:
    with pytest.raises(CompressionError, match="cannot keep as little"):
        compress(MODEL, TOKENS, 0.05, rank_multiple=8, method=Method.SVD_LLM)
