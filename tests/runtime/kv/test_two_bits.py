"""2-bit quantization of values: levels and stored bits."""

import math

import pytest
import torch

from runtime.kv import two_bits
from runtime.kv.transforms import hadamard
from runtime.kv.two_bits import STEP
from tests.runtime.kv.compressed_data import LLAMA_3_8B, gaussian


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def above(x: float) -> float:
    """Return the probability that an element of N(0, 1) exceeds x."""
    return math.erfc(x / math.sqrt(2)) / 2


def mean_squared_error(step: float) -> float:
    """Return the error for N(0, 1): 1 - 2 E[x q] + E[q²], from both positive intervals."""
    inner, outer = step / 2, 1.5 * step
    products = inner * (density(0) - density(step)) + outer * density(step)
    squares = inner**2 * (above(0) - above(step)) + outer**2 * above(step)
    return 1 - 4 * products + 2 * squares


def test_levels_have_the_best_step() -> None:
    assert two_bits.LEVELS == (-1.5 * STEP, -0.5 * STEP, 0.5 * STEP, 1.5 * STEP)
    assert mean_squared_error(STEP) == pytest.approx(0.1188, abs=5e-5)
    nearby = [mean_squared_error(STEP + change) for change in (-1e-3, 1e-3)]
    assert mean_squared_error(STEP) < min(nearby)


def test_stored_bits_of_a_vector() -> None:
    packed, norms = two_bits.quantize(hadamard(torch.tensor([[3.0, -3.0, 0.5, -0.5]])))
    # The norm is sqrt(18.5) = 4.301, in bf16 4.3125; the edge is about 0.99 * 4.3125 / 2 = 2.13.
    assert norms.tolist() == [[4.3125]]
    assert packed.tolist() == [[0b01_10_00_11]]
    lowest, low, high, highest = two_bits.LEVELS
    expected = torch.tensor([[highest, lowest, high, low]]) * 4.3125 / 2
    torch.testing.assert_close(
        two_bits.dequantize_transformed(packed, norms), expected, rtol=1e-6, atol=0
    )


def test_codes_of_a_non_finite_vector_are_zero() -> None:
    packed, norms = two_bits.quantize(torch.tensor([[1.0, float("inf"), 2.0, 3.0]]))
    assert norms.isnan().all()
    assert packed.tolist() == [[0]]


def test_every_element_has_the_nearest_level() -> None:
    x = gaussian(LLAMA_3_8B).float()
    packed, norms = two_bits.quantize(x)
    transformed = hadamard(x)
    levels = norms.float().unsqueeze(-1) * torch.tensor(two_bits.LEVELS) * 128**-0.5
    nearest = (transformed.unsqueeze(-1) - levels).abs().amin(-1)
    errors = (two_bits.dequantize_transformed(packed, norms) - transformed).abs()
    # Rounding of the edges: elements closer than 1e-6 to an edge may have either level.
    torch.testing.assert_close(errors, nearest, rtol=0, atol=2e-6)


def test_transform_of_a_weighted_sum_is_the_sum_of_decoded_values() -> None:
    values = gaussian(LLAMA_3_8B, pages=1)
    weights = torch.rand(16, generator=torch.Generator().manual_seed(0)).softmax(-1)
    packed, norms = two_bits.quantize(values)
    expected = torch.einsum("t,phtd->phd", weights, two_bits.dequantize(packed, norms))
    transformed = two_bits.dequantize_transformed(packed, norms)
    summed = torch.einsum("t,phtd->phd", weights, transformed)
    torch.testing.assert_close(hadamard(summed), expected, rtol=0, atol=1e-5)
