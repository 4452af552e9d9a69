"""Grouped GEMM in plain torch and fp32: the specification of the kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from runtime.gemm.epilogues import Epilogue
from runtime.gemm.weights import PackedMatrix


def grouped_gemm(
    matrices: Sequence[PackedMatrix],
    epilogue: Epilogue,
    x: Tensor,
    biases: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Multiply ``x`` by one to three matrices in fp32, without rounding to bf16.

    Args:
        x: `[n, columns]`. A matrix `[rows, width]` reads ``width`` columns, starting at its
            ``inner_column``, or at column 0 if ``inner_column`` is negative.
        biases: fp32 `[sum of rows]`.
        hidden: `[n, rows]`, the residual stream, for RESIDUAL.

    Returns:
        fp32 `[n, sum of rows]`, for GATED `[n, rows of the first matrix]`.
    """
    outputs = []
    for matrix in matrices:
        width = matrix.weight.shape[1]
        first = max(matrix.inner_column, 0)
        outputs.append(x[:, first : first + width].float() @ matrix.weight.float().t())
    y = torch.cat(outputs, dim=1)  # [n, sum of rows]
    if biases is not None:
        y = y + biases
    if epilogue is Epilogue.GATED:
        gate, up = y.chunk(2, dim=1)
        return functional.silu(gate) * up
    return y if hidden is None else y + hidden.float()
