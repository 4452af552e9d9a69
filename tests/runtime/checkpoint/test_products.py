"""Factor pairs that are multiplied out when a model is loaded."""

from dataclasses import dataclass

import pytest
import torch

from runtime.checkpoint.products import without_large_pairs
from runtime.checkpoint.weights import Dense, FactorPair, Linear

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    first: Linear
    second: Linear
    scale: torch.Tensor


def pair(out: int, rank: int, inner: int, seed: int, dtype: torch.dtype) -> FactorPair:
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.randn(out, rank, generator=generator),
        torch.randn(rank, inner, generator=generator),
    )
    return FactorPair(u.to(dtype), v.to(dtype), torch.ones(out))


@pytest.mark.parametrize("rank", [8, 9])
def test_only_pairs_larger_than_their_product_are_multiplied_out(rank: int) -> None:
    """12 x 24 has 288 elements, its factors 36 for each rank: 288 at rank 8."""
    layer = Layer(pair(12, rank, 24, 1, torch.float32), Dense(torch.ones(2, 2)), torch.ones(2))
    made = without_large_pairs(layer, CPU, torch.float32)
    assert isinstance(made.first, Dense) is (rank == 9)
    assert made.second is layer.second
    assert made.scale is layer.scale
    if rank == 8:
        assert made is layer


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_rounded_once(stored: torch.dtype, dtype: torch.dtype) -> None:
    original = pair(17, 15, 19, 2, stored)
    made = without_large_pairs(Layer(original, original, torch.ones(1)), CPU, dtype).second
    exact = (original.u.double() @ original.v.double()).float()
    assert made.weight.dtype == dtype
    error = (made.weight.float() - exact).abs()
    assert bool((error <= exact.abs() * torch.finfo(dtype).eps / 2 + 2e-5).all())
    assert made.bias is original.bias
