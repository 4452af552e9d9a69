"""Norms and gates of model families: serving callables equal the differentiable functions."""

import torch
from torch.nn import functional

from runtime.models.family import LAYER_NORM, RMS_NORM, SWIGLU, Gate, Norm


def test_serving_callables_equal_their_functions() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 48, generator=generator), torch.randn(48, generator=generator)
    gate, up = x.chunk(2, dim=1)
    for norm in (RMS_NORM, Norm(lambda x, weight, eps: x * weight + eps)):
        served = norm.for_serving(weight, 1e-5)(x)
        torch.testing.assert_close(served, norm.function(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    for combine in (SWIGLU, Gate(lambda gate, up: functional.gelu(gate) * up)):
        served = combine.for_serving()(x)
        torch.testing.assert_close(served, combine.function(gate, up), rtol=1e-5, atol=1e-6)


def test_norms_add_their_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = torch.randn(7, 48), torch.randn(48), torch.randn(48, generator=generator)
    expected = functional.layer_norm(x, (48,), weight, bias, 1e-5)
    for made in (LAYER_NORM.for_serving, LAYER_NORM.plain):
        assert torch.equal(made(weight, 1e-5, bias)(x), expected)
        assert not torch.equal(made(weight, 1e-5)(x), expected)
