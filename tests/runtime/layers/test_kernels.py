"""Triton kernels of RMSNorm and SwiGLU compared with torch."""

import pytest
import torch
from torch.nn import functional

from runtime.layers.gpu import triton_rms_norm, triton_silu_mul
from tests.runtime.device import DEVICE, random

pytestmark = [pytest.mark.triton, pytest.mark.long]


@pytest.mark.parametrize("width", [48, 1000])
def test_rms_norm_matches_torch(width: int) -> None:
    x = random(7, width).bfloat16()
    weight = random(width, seed=5)
    expected = functional.rms_norm(x.float(), (width,), weight, 1e-5)
    got = triton_rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got.float(), expected, rtol=8e-3, atol=1e-5)  # 8 significant bits


@pytest.mark.parametrize(("rows", "width"), [(1, 17), (5, 1100), (0, 64)])
def test_silu_mul_matches_torch(rows: int, width: int) -> None:
    gate_up = random(rows, 2 * width).bfloat16()
    gate, up = gate_up.float().chunk(2, dim=1)
    got = triton_silu_mul(gate_up)
    torch.testing.assert_close(got.float(), functional.silu(gate) * up, rtol=8e-3, atol=1e-5)
    assert got.device.type == DEVICE.type
