"""GEMM micro-kernels, tested with whole numbers, whose fp32 sums are exact in any order."""

import numpy as np
import pytest

from runtime.cpu.jit import Floats
from runtime.cpu.tiles import (
    GROUP,
    LANES,
    NARROW,
    accumulate,
    accumulate_cached,
    accumulate_narrow,
    transpose,
)


def whole_numbers(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).integers(-9, 10, shape).astype(np.float32)


@pytest.mark.few(50)
@pytest.mark.parametrize("rows", range(18))
@pytest.mark.parametrize(("column", "row", "steps"), [(0, 0, 0), (0, 5, 1), (3, 2, 17), (1, 0, 32)])
@pytest.mark.parametrize("kind", ["floats", "transposed", "patterns"])
def test_accumulate_adds_a_matmul(rows: int, column: int, row: int, steps: int, kind: str) -> None:
    a = whole_numbers(40, rows).T if kind == "transposed" else whole_numbers(rows, 40)
    b, c = whole_numbers(33, LANES), whole_numbers(rows, LANES)
    expected = c + a[:, column : column + steps] @ b[row : row + steps]
    right = (b.view(np.uint32) >> 16).astype(np.uint16) if kind == "patterns" else b
    old, cached = c.copy(), c.copy()
    accumulate(c, a, column, right, row, steps)
    accumulate_cached(cached, a, column, right, row, steps)
    assert np.array_equal(cached, c)
    if kind != "patterns":
        narrow = old[:, NARROW : 2 * NARROW].copy()
        accumulate_narrow(narrow, a, column, b[:, NARROW : 2 * NARROW], row, steps)
        assert np.array_equal(narrow, c[:, NARROW : 2 * NARROW])
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("rows", [1, 4, 5, 8, 13])
def test_accumulate_decodes_codes_by_group(rows: int) -> None:
    codes = np.random.default_rng(rows).integers(0, 256, (96, LANES)).astype(np.uint8)
    scales, offsets = whole_numbers(3, LANES), whole_numbers(3, LANES)
    a, c = whole_numbers(rows, 96), whole_numbers(rows, LANES)
    weights = scales.repeat(GROUP, axis=0) * codes + offsets.repeat(GROUP, axis=0)
    expected = c + a[:, 32:64] @ weights[32:64] + a[:, 64:70] @ weights[64:70]
    accumulate(c, a, 32, (codes, scales, offsets), 32, 32)
    accumulate(c, a, 64, (codes, scales, offsets), 64, 6)
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
