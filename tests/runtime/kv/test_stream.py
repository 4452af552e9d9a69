"""Formats `stream8`, `stream4` and `stream4-qjl`: levels, errors, sizes and the QJL correction."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.registry import COMPRESSED
from runtime.kv.stream import reference
from runtime.kv.stream.levels import lloyd_max
from tests.runtime.kv.compressed_data import compressed_planes
from tests.runtime.kv.lowrank import CONFIG, PAGE, relative_error, round_trip

LLAMA = replace(CONFIG, head_dim=128, num_kv_heads=8)
NAMES = ("stream8", "stream4", "stream4-qjl")
ERRORS = {4: 0.009497, 8: 4.12e-5}
"""Mean squared errors of Lloyd-Max quantizers of N(0, 1): Max 1960, table I, for 16 levels."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_two_bits_have_the_published_levels() -> None:
    """Max 1960, table I."""
    assert lloyd_max(2)[0].tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=5e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_levels_have_the_least_error(bits: int) -> None:
    """Integrated over N(0, 1). 256 levels are within 3 % of the asymptotic π √3 / 2 / 4^8."""
    levels, edges = (part.double() for part in lloyd_max(bits))
    assert torch.equal(levels, -levels.flip(0))
    x = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    density = (-x.square() / 2).exp()
    squared = (levels[torch.bucketize(x, edges)] - x).square()
    error = float((squared * density).sum() / density.sum())
    assert error == pytest.approx(ERRORS[bits], rel=0.03)
    if bits == 8:
        assert error < 1.03 * math.pi * math.sqrt(3) / 2 / 4**8


@pytest.mark.parametrize(
    ("name", "size"), [("stream8", 2080), ("stream4", 1056), ("stream4-qjl", 1200)]
)
def test_bytes_per_token(name: str, size: int) -> None:
    planes = COMPRESSED[name](LLAMA).planes(0, PAGE)
    found = sum(plane.shape[0] * plane.shape[2] * plane.dtype.itemsize for plane in planes)
    assert found == size
    assert COMPRESSED[name](LLAMA).name == name


@pytest.mark.parametrize(
    ("name", "k_error", "v_error"),
    [
        ("stream8", 0.0064, 0.0064),
        ("stream4", 0.0975, 0.0975),
        # The correction adds (π / 2 - 1) times the squared error of the codes.
        ("stream4-qjl", 0.0975 * math.sqrt(math.pi / 2 - 1), 0.0975),
    ],
)
def test_errors_of_normal_vectors(name: str, k_error: float, v_error: float) -> None:
    """Tolerance: norms in bf16, and elements that are only approximately normal."""
    pages = normal(20, 4, PAGE, 64).bfloat16()
    keys, values = round_trip(COMPRESSED[name](CONFIG), pages, pages)
    assert relative_error(keys, pages) == pytest.approx(k_error, rel=0.05)
    assert relative_error(values, pages) == pytest.approx(v_error, rel=0.05)


def test_qjl_reduces_the_bias_of_inner_products() -> None:
    """Lloyd-Max levels shorten vectors by their squared error; the correction restores them."""
    x = normal(4000, 64)
    plain = reference.dequantize(*reference.quantize(x, 4), 4)
    corrected = reference.dequantize_qjl(*reference.quantize_qjl(x, 4), 4)
    bias = [float((found * x).sum() / x.square().sum()) - 1 for found in (plain, corrected)]
    assert bias[0] == pytest.approx(-ERRORS[4], rel=0.2)  # heads have a fixed norm
    assert abs(bias[1]) < 0.2 * abs(bias[0])


@pytest.mark.parametrize("name", NAMES)
def test_pages_do_not_depend_on_other_pages(name: str) -> None:
    made = COMPRESSED[name](CONFIG)
    pages = normal(6, 4, PAGE, 64).bfloat16()
    together = round_trip(made, pages, pages)
    planes = compressed_planes(made, 1)
    page = torch.zeros(1, dtype=torch.int64)
    made.layer(0).encode(pages[2:3], pages[2:3], page, planes, page)
    for found, expected in zip(made.layer(0).decode(planes, page, page), together, strict=True):
        assert torch.equal(found[0], expected[2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_zeros_are_exact_and_values_not_finite_become_nan(name: str, bad: float) -> None:
    pages = normal(1, 4, PAGE, 64).bfloat16()
    pages[0, 0, 3], pages[0, 1, 5, 7] = 0.0, bad
    for found in round_trip(COMPRESSED[name](CONFIG), pages, pages):
        assert not found[0, 0, 3].any()
        assert found[0, 1, 5].isnan().all()
        found[0, 1, 5] = 0.0
        assert found.isfinite().all()


@pytest.mark.parametrize(("name", "dim"), [("stream8", 80), ("stream4", 4), ("stream4-qjl", 4)])
def test_unsupported_heads_are_rejected(name: str, dim: int) -> None:
    config: ModelConfig = replace(CONFIG, head_dim=dim)
    with pytest.raises(ValueError, match=r"power of two|at least 8"):
        COMPRESSED[name](config)
