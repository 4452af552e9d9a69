"""Grouped GEMMs over packed weights, computed by torch or by our kernels."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from runtime.gemm.epilogues import Epilogue
from runtime.gemm.kernels.small_m import small_gemm_kernel
from runtime.gemm.large_m import LargeGemm
from runtime.gemm.plan import KernelPlan, LargeTile, Tile
from runtime.gemm.weights import PackedMatrix
from runtime.kernels.alignment import LINE_BYTES, LINE_ELEMENTS, VECTOR_ELEMENTS, round_up
from runtime.kernels.overlap import overlapped
from runtime.layers.gpu import triton_silu_mul

_MAX_SPLIT_BLOCKS = 4096
"""Maximum number of output blocks of a split-K launch; the counter buffer has this many
elements."""
_MAX_GATED_TILE = 1 << 14
"""Maximum number of elements per accumulator with GATED; a program then holds two accumulators."""
_BAND = 8
"""Number of token blocks that share weight rows in the L2 cache, because they run concurrently."""


class GroupedGemm:
    """A GEMM over one to three weight matrices: bf16 `[n, in]` to `[n, sum of rows]`.

    RESIDUAL adds the output to the residual stream, in place. GATED returns SiLU(a) * b, with the
    outputs a and b of the first and the second matrix. Each matrix reads either the group's input
    ``x``, or columns of ``inner``, the output of the group's stacked V
    (`PackedMatrix.inner_column`).

    Args:
        base: tensor whose address is the base of all offsets in the kernels.
        biases: fp32 `[sum of rows]`.
        whole: one matrix that stacks all of them, if they are adjacent in memory and read the same
            input; otherwise None.
        pad_output: whether to pad the row stride of the output to whole lines, because another GEMM
            reads it.

    Attributes:
        epilogue: operation fused with the store of the output.
        name: name in kernel plans: the name of the epilogue, or "APART" for GATED over two inputs.
        shapes: (rows, columns) of each matrix.
        columns: number of input columns that the matrices read.
        same_input: whether all matrices read ``x`` or all read ``inner``, so that one launch can
            compute them.
    """

    def __init__(
        self,
        base: Tensor,
        matrices: Sequence[PackedMatrix],
        plan: KernelPlan,
        epilogue: Epilogue = Epilogue.PLAIN,
        biases: Tensor | None = None,
        whole: Tensor | None = None,
        pad_output: bool = False,
    ) -> None:
        self._base = base
        self._matrices = tuple(matrices)
        self._plan = plan
        self.epilogue = epilogue
        self._biases = biases
        self._whole = whole
        self.columns = max(max(m.inner_column, 0) + m.weight.shape[1] for m in matrices)
        self._rows = [len(matrix.weight) for matrix in matrices]
        self._output_multiple = LINE_ELEMENTS if pad_output else 1
        self.shapes = tuple((len(m.weight), m.weight.shape[1]) for m in matrices)
        self.same_input = len({matrix.inner_column < 0 for matrix in matrices}) == 1
        self._matrix_arguments = _matrix_arguments(base, matrices)
        self._counters = torch.zeros(_MAX_SPLIT_BLOCKS, dtype=torch.int32, device=base.device)
        self._large = LargeGemm(self._matrices, biases, self._counters)
        two_inputs = epilogue is Epilogue.GATED and self._large.two_inputs
        self.name = "APART" if two_inputs else epilogue.name

    def __call__(self, x: Tensor, inner: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Compute the GEMM with the kernel that the plan selects.

        Args:
            x: bf16 `[n, in]`, the group's input.
            inner: bf16 `[n, …]`, the output of the group's stacked V; unused without factor pairs.
            hidden: bf16 `[n, rows]`, the residual stream for RESIDUAL; overwritten and returned.

        Returns:
            bf16 `[n, sum of rows]`, for GATED `[n, rows of the first matrix]`.
        """
        tile = self._plan.tile(self.name, len(x), self.shapes) if self.same_input else None
        if isinstance(tile, LargeTile) and not x.is_cuda:
            tile = None
        if tile is None or not len(x):
            return self.run_torch(x, inner, hidden)
        return self.run_kernel(x if self._matrices[0].inner_column < 0 else inner, hidden, tile)

    def run_torch(self, x: Tensor, inner: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Compute the GEMM with torch, one matmul per matrix."""
        inputs = [
            x if m.inner_column < 0 else inner[:, m.inner_column :][:, : m.weight.shape[1]]
            for m in self._matrices
        ]
        if hidden is not None:
            y = hidden.addmm_(inputs[0], self._matrices[0].weight.t())
        elif self._whole is not None:
            y = torch.mm(x, self._whole.t())
        else:
            y = self._empty(x, self._rows)
            outputs = torch.split(y, self._rows, dim=1)
            for own, matrix, out in zip(inputs, self._matrices, outputs, strict=True):
                torch.mm(own, matrix.weight.t(), out=out)
        if self._biases is not None:
            y.add_(self._biases)
        return triton_silu_mul(y) if self.epilogue is Epilogue.GATED else y

    def run_kernel(self, x: Tensor, hidden: Tensor | None, tile: Tile | LargeTile) -> Tensor:
        """Compute the GEMM with one launch of our kernels.

        SiLU is a second launch where the kernel does not support it: for a `LargeTile` of two
        groups over two inputs, or a `Tile` with too many elements.

        Args:
            x: bf16 `[n, …]`, the input that all matrices read.
            hidden: bf16 `[n, rows]`, the residual stream for RESIDUAL; overwritten and returned.
        """
        if isinstance(tile, LargeTile):
            separate_silu = self._large.two_inputs and tile.groups > 1
        else:
            separate_silu = tile.tokens * tile.rows > _MAX_GATED_TILE
        epilogue = self.epilogue
        if epilogue is Epilogue.GATED and separate_silu:
            epilogue = Epilogue.PLAIN
        rows = self._rows[:1] if epilogue is Epilogue.GATED else self._rows
        y = self._empty(x, rows) if hidden is None else hidden
        if isinstance(tile, LargeTile):
            self._large(x, y, epilogue, tile)
        else:
            self._run_small(x, y, epilogue, rows, tile)
        return y if epilogue is self.epilogue else triton_silu_mul(y)

    def _run_small(
        self, x: Tensor, y: Tensor, epilogue: Epilogue, rows: list[int], tile: Tile
    ) -> None:
        blocks = triton.cdiv(len(x), tile.tokens) * sum(triton.cdiv(n, tile.rows) for n in rows)
        if tile.splits > 1 and (epilogue is Epilogue.GATED or blocks > _MAX_SPLIT_BLOCKS):
            raise ValueError(f"{epilogue.name} with {blocks} blocks does not support splits")
        if x.stride(0) % VECTOR_ELEMENTS:
            raise ValueError(f"row stride {x.stride(0)} is not a multiple of {VECTOR_ELEMENTS}")
        parts = blocks * tile.splits * tile.tokens * tile.rows if tile.splits > 1 else 0
        small_gemm_kernel[(blocks, tile.splits)](
            x, x.stride(0) // VECTOR_ELEMENTS, len(x), self._base, *self._matrix_arguments,
            self._biases, y, y, y.stride(0),
            torch.empty(parts, dtype=torch.float32, device=x.device), self._counters,
            EPILOGUE=int(epilogue), BIAS=self._biases is not None, BM=tile.tokens, BN=tile.rows,
            BK=tile.columns, SPLITS=tile.splits, BAND=_BAND, num_warps=tile.warps,
            num_stages=tile.stages, **overlapped(x.device),
        )  # fmt: skip

    def _empty(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return an uninitialized output `[n, sum of rows]`."""
        width = sum(rows)
        return x.new_empty(len(x), round_up(width, self._output_multiple))[:, :width]


def _matrix_arguments(base: Tensor, matrices: Sequence[PackedMatrix]) -> list[int]:
    """Return the arguments ``offset0`` to ``rows2`` of `small_gemm_kernel`, in its units."""
    arguments: list[int] = []
    for matrix in matrices:
        distance = matrix.weight.data_ptr() - base.data_ptr()
        if distance % LINE_BYTES:
            raise ValueError(f"the offset of a matrix is not a multiple of {LINE_BYTES} bytes")
        arguments += [
            distance // LINE_BYTES,
            matrix.weight.shape[1] // VECTOR_ELEMENTS,
            matrix.weight.stride(0) // VECTOR_ELEMENTS,
            max(matrix.inner_column, 0) // VECTOR_ELEMENTS,
            len(matrix.weight),
        ]
    return arguments + [0, 1, 1, 0, 0] * (3 - len(matrices))
