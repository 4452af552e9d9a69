"""2-bit quantization of values: codebook and stored bits."""

import math

import torch

from runtime.kv.lloyd_max import (
    EDGE,
    LEVELS,
    dequantize_transformed_values,
    dequantize_values,
    quantize_values,
)
from runtime.kv.transforms import hadamard
from tests.runtime.kv.compressed_data import LLAMA_3_8B, gaussian


def test_levels_are_the_fixed_point_of_lloyds_iteration() -> None:
    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    edge, inner, outer = 1.0, 0.0, 0.0
    for _ in range(200):
        # Means of N(0, 1) between 0 and the edge, and beyond the edge.
        inner = (density(0) - density(edge)) / (math.erf(edge / math.sqrt(2)) / 2)
        outer = density(edge) / (math.erfc(edge / math.sqrt(2)) / 2)
        edge = (inner + outer) / 2
    expected = torch.tensor([-outer, -inner, inner, outer, edge], dtype=torch.float64)
    actual = torch.tensor([*LEVELS, EDGE], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def test_stored_bits_of_a_vector() -> None:
    packed, norms = quantize_values(hadamard(torch.tensor([[3.0, -3.0, 0.5, -0.5]])))
    # The norm is sqrt(18.5) = 4.301, in bf16 4.3125; the edge is 0.98 * 4.3125 / 2 = 2.12.
    assert norms.tolist() == [[4.3125]]
    assert packed.tolist() == [[0b01_10_00_11]]
    unit = 4.3125 / 2
    expected = torch.tensor([[LEVELS[3], LEVELS[0], LEVELS[2], LEVELS[1]]]) * unit
    torch.testing.assert_close(
        dequantize_transformed_values(packed, norms), expected, rtol=1e-6, atol=0
    )


def test_codes_of_a_non_finite_vector_are_zero() -> None:
    packed, norms = quantize_values(torch.tensor([[1.0, float("inf"), 2.0, 3.0]]))
    assert norms.isnan().all()
    assert packed.tolist() == [[0]]


def test_every_element_has_the_nearest_level() -> None:
    x = gaussian(LLAMA_3_8B).float()
    packed, norms = quantize_values(x)
    transformed = hadamard(x)
    levels = norms.float().unsqueeze(-1) * torch.tensor(LEVELS) * 128**-0.5  # [..., 1, 4]
    nearest = (transformed.unsqueeze(-1) - levels).abs().amin(-1)
    errors = (dequantize_transformed_values(packed, norms) - transformed).abs()
    # Rounding of the edges: elements closer than 1e-6 to an edge may have either level.
    torch.testing.assert_close(errors, nearest, rtol=0, atol=2e-6)


def test_transform_of_a_weighted_sum_is_the_sum_of_decoded_values() -> None:
    values = gaussian(LLAMA_3_8B, pages=1)
    weights = torch.rand(16, generator=torch.Generator().manual_seed(0)).softmax(-1)
    packed, norms = quantize_values(values)
    expected = torch.einsum("t,phtd->phd", weights, dequantize_values(packed, norms))
    summed = torch.einsum("t,phtd->phd", weights, dequantize_transformed_values(packed, norms))
    torch.testing.assert_close(hadamard(summed), expected, rtol=0, atol=1e-5)
