"""Register tiles on whole numbers, where every order of summing gives the same."""

import numba
import numpy as np
import pytest

from runtime.compiled import Bytes, Floats
from runtime.tiles import LANES, accumulate, decode, transpose


def whole_numbers(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).integers(-9, 10, shape).astype(np.float32)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 11])
@pytest.mark.parametrize(("first", "steps"), [(0, 0), (0, 1), (3, 17), (1, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_accumulate_adds_a_product(rows: int, first: int, steps: int, transposed: bool) -> None:
    a = whole_numbers(40, rows).T if transposed else whole_numbers(rows, 40)
    b, c = whole_numbers(33, LANES), whole_numbers(rows, LANES)
    expected = c + a[:, first : first + steps] @ b[:steps]
    accumulate(c, a, first, b, steps)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("shape", [(1, 1), (15, 64), (16, 63), (16, 64), (33, 40), (64, 130)])
def test_transpose_widens_bf16_patterns(shape: tuple[int, int]) -> None:
    values = whole_numbers(*shape)
    out = np.full((shape[1], LANES + 3), np.nan, np.float32)
    patterns = (values.view(np.uint32) >> 16).astype(np.uint16)
    transpose(patterns, out, 2)
    np.testing.assert_array_equal(out[:, 2 : 2 + shape[0]], values.T)
    assert np.isnan(out[:, :2]).all()
    assert np.isnan(out[:, 2 + shape[0] :]).all(), "nothing else is written"


@numba.njit
def _decode(codes: Bytes, scales: Floats, offsets: Floats, out: Floats) -> None:
    decode(codes, scales, offsets, 1, 32, 1, out, 32)


def test_decode_brings_a_group_of_a_block() -> None:
    codes = np.arange(2 * 96 * LANES, dtype=np.uint32).astype(np.uint8).reshape(2, 96, LANES)
    scales, offsets = whole_numbers(2, 3, LANES), whole_numbers(2, 3, LANES)
    out = np.full((33, LANES), np.nan, np.float32)
    _decode(codes, scales, offsets, out)
    np.testing.assert_array_equal(out[:32], scales[1, 1] * codes[1, 32:64] + offsets[1, 1])
    assert np.isnan(out[32]).all()
