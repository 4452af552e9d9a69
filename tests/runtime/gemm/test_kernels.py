"""The GEMM kernels compared with the fp32 reference."""

from dataclasses import replace
from math import nan

import pytest
import torch

from runtime.gemm import reference
from runtime.gemm.epilogues import Epilogue
from runtime.gemm.ops import GroupedGemm
from runtime.gemm.plan import KernelPlan, LargeTile, Tile
from runtime.gemm.weights import PackedMatrix
from runtime.kernels.alignment import LINE_BYTES, LINE_ELEMENTS, round_up
from tests.runtime.device import DEVICE, random

pytestmark = [pytest.mark.triton, pytest.mark.long]


@pytest.mark.parametrize(
    ("epilogue", "shapes", "tokens", "tile"),
    [
        (Epilogue.PLAIN, [(48, 40)], 5, Tile(16, 16, 16, 1, 4, 2)),
        (Epilogue.PLAIN, [(48, 32), (17, 8), (33, 24)], 37, Tile(16, 16, 16, 1, 4, 2)),
        (Epilogue.PLAIN, [(48, 32), (17, 8), (33, 24)], 37, Tile(16, 16, 16, 3, 4, 3)),
        (Epilogue.RESIDUAL, [(48, 40)], 70, Tile(16, 32, 16, 2, 4, 2)),
        (Epilogue.GATED, [(40, 32), (40, 24)], 70, Tile(32, 32, 16, 1, 4, 2)),
        (Epilogue.GATED, [(40, 32), (40, 24)], 1, Tile(64, 32, 32, 1, 4, 2)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_small_gemm_matches_the_reference(
    epilogue: Epilogue, shapes: list[tuple[int, int]], tokens: int, tile: Tile, bias: bool
) -> None:
    check_gemm(epilogue, shapes, tokens, tile, bias)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
@pytest.mark.parametrize(
    "tile",
    [LargeTile(*size) for size in ((2, 256), (2, 128), (2, 64), (1, 128), (1, 64), (1, 32))],
    ids=str,
)
@pytest.mark.parametrize(
    ("epilogue", "shapes", "splits"),
    [
        (Epilogue.PLAIN, [(304, 1000)], 1),
        (Epilogue.PLAIN, [(304, 72), (200, 64), (96, 200)], 1),
        (Epilogue.PLAIN, [(304, 1000), (8, 520)], 3),
        (Epilogue.PLAIN, [(304, 1000), (8, 72)], 3),  # splits without columns
        (Epilogue.RESIDUAL, [(520, 264)], 1),
        (Epilogue.GATED, [(200, 152), (200, 72)], 1),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_large_gemm_matches_the_reference(
    epilogue: Epilogue, shapes: list[tuple[int, int]], splits: int, tile: LargeTile, bias: bool
) -> None:
    """The largest token counts have more output blocks than programs."""
    if epilogue is Epilogue.RESIDUAL and tile.rows < 64:
        with pytest.raises(ValueError, match="does not support tiles of 32 rows"):
            check_gemm(epilogue, shapes, 1, tile, bias)
        return
    for tokens in (1, 40, 77, 2500):
        check_gemm(epilogue, shapes, tokens, replace(tile, splits=splits), bias)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
@pytest.mark.parametrize(
    "tile", [LargeTile(2, 256), LargeTile(1, 128), LargeTile(1, 64), LargeTile(1, 32)], ids=str
)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_gemm_over_one_input_matches_the_reference(tile: LargeTile, bias: bool) -> None:
    for tokens in (1, 40, 300):
        check_gemm(Epilogue.GATED, [(200, 152)] * 2, tokens, tile, bias, same_input=True)


def check_gemm(
    epilogue: Epilogue,
    shapes: list[tuple[int, int]],
    tokens: int,
    tile: Tile | LargeTile,
    bias: bool,
    *,
    same_input: bool = False,
) -> None:
    """Compare two launches with the reference. The second one reuses the counters of the first.

    The padding between weight rows is NaN, so reading it would fail the comparison.

    Args:
        same_input: whether all matrices read the same columns, not each its own.
    """
    elements = sum(rows * round_up(width, LINE_ELEMENTS) for rows, width in shapes)
    memory = torch.full((elements + LINE_ELEMENTS,), nan, dtype=torch.bfloat16, device=DEVICE)
    base = memory[-memory.data_ptr() % LINE_BYTES // memory.itemsize :]
    matrices = []
    at = 0
    column = 0
    for rows, width in shapes:
        stride = round_up(width, LINE_ELEMENTS)
        weight = base[at : at + rows * stride].view(rows, stride)[:, :width]
        weight.copy_(random(rows, width, seed=at))
        matrices.append(PackedMatrix(weight, inner_column=0 if same_input else column))
        at, column = at + rows * stride, column + width
    x = random(tokens, column, seed=5).bfloat16()
    biases = random(sum(rows for rows, _ in shapes), seed=6) if bias else None
    gemm = GroupedGemm(base, matrices, KernelPlan(), epilogue, biases)
    hidden = None
    if epilogue is Epilogue.RESIDUAL:
        hidden = random(tokens, shapes[0][0], seed=7).bfloat16()
    expected = reference.grouped_gemm(matrices, epilogue, x, biases, hidden)
    for _ in range(2):
        got = gemm.run_kernel(x, None if hidden is None else hidden.clone(), tile)
        torch.testing.assert_close(
            got.float(), expected, rtol=1e-2, atol=5e-3 * float(expected.std())
        )
