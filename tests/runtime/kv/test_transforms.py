"""Hadamard transform, sums and bit packing against their definitions."""

import math

import pytest
import torch
from torch import Tensor

from runtime.kv.transforms import check_transformable, hadamard, pack, sum_by_halves, unpack


def hadamard_matrix(dim: int) -> Tensor:
    """Sylvester's construction, orthonormal, fp64 `[dim, dim]`."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix / math.sqrt(dim)


@pytest.mark.parametrize("dim", [4, 16, 64, 128, 256])
def test_hadamard_is_multiplication_by_sylvesters_matrix(dim: int) -> None:
    x = torch.randn(3, 17, dim, generator=torch.Generator().manual_seed(0))
    expected = x.double() @ hadamard_matrix(dim)
    # Eight roundings at most, of sums whose magnitude is below 5 sqrt(dim) before scaling.
    torch.testing.assert_close(hadamard(x).double(), expected, rtol=0, atol=5e-6)


def test_hadamard_is_its_own_inverse_and_keeps_norms_and_products() -> None:
    x, y = torch.randn(2, 50, 128, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=5e-6)
    product = (hadamard(x) * hadamard(y)).sum(-1)
    torch.testing.assert_close(product, (x * y).sum(-1), rtol=0, atol=5e-5)


def test_hadamard_of_bf16_is_computed_in_fp32() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    kept = x.clone()
    assert torch.equal(hadamard(x), hadamard(x.float()))
    assert hadamard(x).dtype == torch.float32
    assert torch.equal(x, kept)


def test_sum_by_halves_adds_in_the_documented_order() -> None:
    # Added from left to right, the first two elements would absorb the small ones.
    x = torch.tensor([[2.0**24, 1.0, -(2.0**24), 1.0]])
    assert sum_by_halves(x).tolist() == [[2.0]]
    counts = torch.arange(64.0).expand(3, 64)
    assert sum_by_halves(counts).tolist() == [[2016.0]] * 3


def test_nibbles_are_halves_of_the_vector() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 15, 6, 0, 8]], dtype=torch.uint8)
    packed = pack(codes, 4)
    assert packed.tolist() == [[0xF1, 0x62, 0x03, 0x84]]
    assert torch.equal(unpack(packed, 4), codes)


def test_two_bit_fields_are_quarters_of_the_vector() -> None:
    codes = torch.tensor([[1, 0, 2, 3, 3, 0, 1, 2]], dtype=torch.uint8)
    packed = pack(codes, 2)
    assert packed.tolist() == [[0b01_11_10_01, 0b10_00_11_00]]
    assert torch.equal(unpack(packed, 2), codes)


@pytest.mark.parametrize("bits", [2, 4])
def test_every_byte_is_restored(bits: int) -> None:
    packed = torch.randint(256, (3, 5, 16), generator=torch.Generator().manual_seed(0))
    packed = packed.to(torch.uint8)
    assert torch.equal(pack(unpack(packed, bits), bits), packed)


def test_pack_does_not_change_its_argument() -> None:
    codes = torch.randint(16, (9, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    kept = codes.clone()
    pack(codes, 4)
    assert torch.equal(codes, kept)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, 12, 80, 96])
def test_other_head_dims_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"format x needs a head dimension .*, not {dim}:"):
        check_transformable(dim, "x")


@pytest.mark.parametrize("dim", [4, 64, 128, 256])
def test_powers_of_two_are_accepted(dim: int) -> None:
    check_transformable(dim, "x")
