"""2-bit quantization of values: levels and stored bits."""

import math
from dataclasses import replace

import pytest
import torch

from runtime.kv.transforms import hadamard
from runtime.kv.two_bits import LLOYD_MAX, UNIFORM, TwoBitQuantizer
from tests.runtime.kv.compressed_data import LLAMA_3_8B, gaussian

QUANTIZERS = pytest.mark.parametrize("quantizer", [LLOYD_MAX, UNIFORM], ids=["best", "uniform"])


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def above(x: float) -> float:
    """Return the probability that an element of N(0, 1) exceeds x."""
    return math.erfc(x / math.sqrt(2)) / 2


def mean_squared_error(quantizer: TwoBitQuantizer) -> float:
    """Return the error for N(0, 1): 1 - 2 E[x q] + E[q²], from both positive intervals."""
    outer, edge = quantizer.outer, quantizer.edge
    products = quantizer.inner * (density(0) - density(edge)) + outer * density(edge)
    squares = quantizer.inner**2 * (above(0) - above(edge)) + outer**2 * above(edge)
    return 1 - 4 * products + 2 * squares


def test_levels_are_the_fixed_point_of_lloyds_iteration() -> None:
    edge, inner, outer = 1.0, 0.0, 0.0
    for _ in range(200):
        # Means of N(0, 1) between 0 and the edge, and beyond the edge.
        inner = (density(0) - density(edge)) / (above(0) - above(edge))
        outer = density(edge) / above(edge)
        edge = (inner + outer) / 2
    expected = torch.tensor([-outer, -inner, inner, outer, edge], dtype=torch.float64)
    actual = torch.tensor([*LLOYD_MAX.levels, LLOYD_MAX.edge], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def test_uniform_levels_have_the_best_step() -> None:
    step = UNIFORM.edge
    assert UNIFORM.levels == pytest.approx([(code - 1.5) * step for code in range(4)])

    def error(step: float) -> float:
        return mean_squared_error(TwoBitQuantizer(step / 2, 1.5 * step, step))

    assert error(step) == pytest.approx(mean_squared_error(UNIFORM))
    assert error(step) < min(error(step - 1e-3), error(step + 1e-3))


def test_errors_of_normal_elements_are_the_documented_ones() -> None:
    assert mean_squared_error(LLOYD_MAX) == pytest.approx(0.1175, abs=5e-5)
    assert mean_squared_error(UNIFORM) == pytest.approx(0.1188, abs=5e-5)
    worse = replace(UNIFORM, edge=UNIFORM.edge + 0.1)  # an edge that is not halfway
    assert mean_squared_error(worse) > mean_squared_error(UNIFORM)


@QUANTIZERS
def test_stored_bits_of_a_vector(quantizer: TwoBitQuantizer) -> None:
    packed, norms = quantizer.quantize(hadamard(torch.tensor([[3.0, -3.0, 0.5, -0.5]])))
    # The norm is sqrt(18.5) = 4.301, in bf16 4.3125; the edge is about 0.99 * 4.3125 / 2 = 2.13.
    assert norms.tolist() == [[4.3125]]
    assert packed.tolist() == [[0b01_10_00_11]]
    lowest, low, high, highest = quantizer.levels
    expected = torch.tensor([[highest, lowest, high, low]]) * 4.3125 / 2
    torch.testing.assert_close(
        quantizer.dequantize_transformed(packed, norms), expected, rtol=1e-6, atol=0
    )


def test_codes_of_a_non_finite_vector_are_zero() -> None:
    packed, norms = UNIFORM.quantize(torch.tensor([[1.0, float("inf"), 2.0, 3.0]]))
    assert norms.isnan().all()
    assert packed.tolist() == [[0]]


@QUANTIZERS
def test_every_element_has_the_nearest_level(quantizer: TwoBitQuantizer) -> None:
    x = gaussian(LLAMA_3_8B).float()
    packed, norms = quantizer.quantize(x)
    transformed = hadamard(x)
    levels = norms.float().unsqueeze(-1) * torch.tensor(quantizer.levels) * 128**-0.5
    nearest = (transformed.unsqueeze(-1) - levels).abs().amin(-1)
    errors = (quantizer.dequantize_transformed(packed, norms) - transformed).abs()
    # Rounding of the edges: elements closer than 1e-6 to an edge may have either level.
    torch.testing.assert_close(errors, nearest, rtol=0, atol=2e-6)


def test_transform_of_a_weighted_sum_is_the_sum_of_decoded_values() -> None:
    values = gaussian(LLAMA_3_8B, pages=1)
    weights = torch.rand(16, generator=torch.Generator().manual_seed(0)).softmax(-1)
    packed, norms = UNIFORM.quantize(values)
    expected = torch.einsum("t,phtd->phd", weights, UNIFORM.dequantize(packed, norms))
    transformed = UNIFORM.dequantize_transformed(packed, norms)
    summed = torch.einsum("t,phtd->phd", weights, transformed)
    torch.testing.assert_close(hadamard(summed), expected, rtol=0, atol=1e-5)
