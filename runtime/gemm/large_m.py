"""Products with many tokens at a time, by `kernels.large_linear`."""

from collections.abc import Sequence
from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from runtime.gemm.epilogues import Kind
from runtime.gemm.kernels.large_m import COLUMNS, TOKENS, large_linear_kernel
from runtime.gemm.plan import LargeTile
from runtime.gemm.weights import EIGHT, Matrix

_RING = 200 << 10
"""Bytes of shared memory for what is on its way."""
_MOST_STAGES = 8
_LINE = 16
"""Bytes, of which addresses that are copied from are multiples."""


class LargeLinear:
    """One to three matrices, whose descriptors stay. ``biases`` fp32 `[sum(out)]`; ``arrived``
    int32, zeros."""

    def __init__(self, matrices: Sequence[Matrix], biases: Tensor | None, arrived: Tensor) -> None:
        self._weights = [matrix.weight for matrix in matrices]
        self._biases, self._arrived = biases, arrived
        inputs = {(max(matrix.first, 0), matrix.weight.shape[1]) for matrix in matrices}
        self.apart = len(inputs) > 1
        """Whether inputs differ, and SiLU is a launch of its own: the kernel has one for both."""
        self._rows = [len(weight) for weight in self._weights]
        self._counts = [
            *_three(self._rows),
            *_three([weight.shape[1] for weight in self._weights]),
            *_three([max(matrix.first, 0) for matrix in matrices]),
        ]
        self._descriptors: dict[int, list[TensorDescriptor]] = {}

    def __call__(self, x: Tensor, y: Tensor, kind: Kind, tile: LargeTile) -> None:
        """From bf16 `[n, in]` to ``y``, bf16 `[n, sum(out)]` or what ``kind`` makes of it.

        Raises:
            ValueError: for what the kernel does not have.
        """
        half = kind is Kind.GATED
        each = tile.rows // 2 if half else tile.rows
        rows = self._rows[:1] if half else self._rows
        tokens = tile.groups * TOKENS.value
        blocks = triton.cdiv(len(x), tokens) * sum(triton.cdiv(n, each) for n in rows)
        items = blocks * tile.splits
        split = tile.splits > 1
        if any(n % EIGHT for n in rows) or x.stride(0) % EIGHT or x.data_ptr() % _LINE:
            raise ValueError(f"{rows} rows, or an input that is not aligned")
        if split and (kind is not Kind.PLAIN or tile.groups * items > len(self._arrived)):
            raise ValueError(f"columns of {kind.name} in {blocks} blocks cannot be split")
        sums = x.new_empty(items * tokens * tile.rows if split else 0, dtype=torch.float32)
        own = _descriptor(x, tokens)
        residual = _descriptor(y, tokens) if kind is Kind.RESIDUAL else own
        large_linear_kernel[(min(items, _programs(x.device)),)](
            own, *self._described(each), residual, y, y.stride(0) // EIGHT, self._biases, sums,
            self._arrived, items, len(x), *self._counts,
            GROUPS=tile.groups, BN=tile.rows, KIND=int(kind), BIAS=self._biases is not None,
            SPLITS=tile.splits, STAGES=stages(tokens + tile.rows), num_warps=4,
        )  # fmt: skip

    def _described(self, rows: int) -> list[TensorDescriptor]:
        if rows not in self._descriptors:
            made = [_descriptor(weight, rows) for weight in self._weights]
            self._descriptors[rows] = made + [made[0]] * (3 - len(made))
        return self._descriptors[rows]


def _three(counts: list[int]) -> list[int]:
    """In eights; 0 for matrices that are not there."""
    return [count // EIGHT for count in counts] + [0] * (3 - len(counts))


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    block = [rows, COLUMNS.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(x, block, layout)


def stages(rows: int) -> int:
    """Of the ring, for so many tokens and rows in each."""
    return min(_MOST_STAGES, _RING // int(rows * COLUMNS.value * 2))


@cache
def _programs(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
