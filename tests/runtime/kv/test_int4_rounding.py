# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Codes of `int4` in Triton, which rounds quotients without a division, against torch."""

import pytest
import torch
import triton
import triton.language as tl

from runtime.kv.int4.kernels import quantize_half
from runtime.kv.kernels.transforms import INFINITE, magnitude_bits
from tests.runtime.device import DEVICE

pytestmark = pytest.mark.triton

COLUMNS = 64


@triton.jit
def _kernel(x, codes, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None], tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x + row * COLUMNS + column)
    largest = tl.max(magnitude_bits(values), axis=1)
    found, _ = quantize_half(values, largest, largest < INFINITE)
    tl.store(codes + row * COLUMNS + column, found)


def neighbours(x: torch.Tensor, distance: int) -> torch.Tensor:
    """Return the fp32 numbers ``distance`` places farther from zero."""
    return (x.view(torch.int32) + distance).view(torch.float32)


def test_quotients_are_rounded_down_like_those_of_a_division() -> None:
    """Elements are at and beside multiples of the step, for steps of all magnitudes."""
    exponents = torch.arange(-133.0, 123.0).repeat_interleave(2)
    mantissas = torch.tensor([1.0, 1.8671875]).repeat(len(exponents) // 2)
    steps = (mantissas.double() * 2 ** exponents.double()).to(torch.bfloat16).float()
    multiples = torch.arange(-7, 8) * steps[:, None]
    tiny = torch.tensor([1, 2, 3]) * 2.0**-149
    columns = [neighbours(multiples, distance) for distance in (-1, 0, 1)]
    columns += [x.expand(len(steps), -1) for x in (tiny, -tiny, 2.0**-126 * torch.ones(1))]
    x = torch.cat([8 * steps[:, None], *columns], dim=1).nan_to_num(0.0)
    x = torch.where(x.abs() <= 8 * steps[:, None], x, 0.0)
    x = torch.nn.functional.pad(x, (0, COLUMNS - x.shape[1])).contiguous()
    expected = ((x / steps[:, None]).floor() + 8).clamp(0, 15).to(torch.uint8)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    _kernel[(len(x) // 16,)](x.to(DEVICE), codes, COLUMNS, enable_fp_fusion=False)
    assert torch.equal(codes.cpu(), expected)
    assert len(expected.unique()) == 16


def test_codes_of_scale_zero_are_those_of_zero() -> None:
    """A scale is 0 if the largest magnitude is at most 2**-131."""
    x = torch.zeros(16, COLUMNS)
    x[:, 0], x[:, 1] = -(2.0**-133), 2.0**-131
    codes = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    _kernel[(1,)](x.to(DEVICE), codes, COLUMNS, enable_fp_fusion=False)
    assert (codes == 8).all()
