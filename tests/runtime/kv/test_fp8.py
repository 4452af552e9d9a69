"""KV formats `fp8` and `fp8-e5m2`: scales, errors and stored bits."""

import pytest
import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.fp8 import FP8Format
from runtime.kv.fp8.reference import dequantize, quantize
from tests.runtime.kv.compressed_data import (
    LLAMA_3_8B,
    SMOLLM2_135M,
    gaussian,
    heavy_tailed,
    relative_rms,
    round_trip,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def vector(*elements: float) -> Tensor:
    return torch.tensor([elements], dtype=torch.bfloat16)


@pytest.mark.parametrize("config", [SMOLLM2_135M, LLAMA_3_8B], ids=["d64", "d128"])
@pytest.mark.parametrize(("dtype", "bound"), [(E4M3, 0.0272), (E5M2, 0.0540)])
def test_relative_error(dtype: torch.dtype, bound: float, config: ModelConfig) -> None:
    """3 or 2 bits of mantissa give 2.65 % or 5.3 % for any distribution of magnitudes.

    The bounds are 2 % above; truncation instead of rounding doubles the errors.
    """
    kv_format = FP8Format(config, dtype)
    for keys, values in (
        (gaussian(config, seed=1), heavy_tailed(config, seed=2)),
        (heavy_tailed(config, seed=3), gaussian(config, seed=4)),
    ):
        k, v = round_trip(kv_format, keys, values)
        assert 0.9 * bound < relative_rms(keys, k) < bound
        assert 0.9 * bound < relative_rms(values, v) < bound


@pytest.mark.parametrize(
    ("largest", "e4m3", "e5m2"),
    [
        (448.0, 127, 120),
        (450.0, 128, 121),  # the next bf16 number
        (-448.0, 127, 120),
        (896.0, 128, 121),
        (57344.0, 134, 127),
        (0.0, 118, 111),
        (2.0**-133, 1, 1),
        (LARGEST_BF16, 247, 240),
    ],
)
def test_scale_is_the_smallest_power_of_two_without_overflow(
    largest: float, e4m3: int, e5m2: int
) -> None:
    for dtype, expected in ((E4M3, e4m3), (E5M2, e5m2)):
        codes, scales = quantize(vector(0.0, largest, largest / 2, 0.0), dtype)
        assert scales.tolist() == [[expected]]
        assert codes.float().isfinite().all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power", [-100, -3, 0, 5, 100])
def test_numbers_of_the_dtype_are_exact_with_any_scale(dtype: torch.dtype, power: int) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.bfloat16)
    # Scaled to the vector's largest number, every finite number has a code of its own.
    x = numbers[numbers.isfinite()][None] * 2.0**power
    assert torch.equal(dequantize(*quantize(x, dtype)), x.float())


def test_numbers_close_to_the_largest_bf16_number_have_ordinary_errors() -> None:
    x = vector(LARGEST_BF16 / 2, -LARGEST_BF16 / 2, 1.0, 0.0)
    for dtype in (E4M3, E5M2):
        decoded = dequantize(*quantize(x, dtype))
        assert decoded.isfinite().all()
        assert relative_rms(x, decoded) < 2**-3


def test_codes_of_a_non_finite_vector_are_zero() -> None:
    for dtype in (E4M3, E5M2):
        codes, scales = quantize(vector(1.0, float("inf"), 2.0, 3.0), dtype)
        assert codes.view(torch.uint8).tolist() == [[0] * 4]
        assert scales.tolist() == [[255]]


def test_scales_are_e8m0() -> None:
    codes = torch.ones(256, 4).to(E4M3)
    scales = torch.arange(256).to(torch.uint8)[:, None]
    decoded = dequantize(codes, scales)
    assert torch.equal(decoded[1:255, 0].log2(), torch.arange(-126.0, 128.0))
    assert decoded[255].isnan().all()


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"e4m3 or e5m2, not torch\.bfloat16"):
        FP8Format(SMOLLM2_135M, torch.bfloat16)
