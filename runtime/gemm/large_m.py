"""Launcher of `kernels.large_m`: grouped GEMMs on a Hopper GPU."""

from collections.abc import Sequence
from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from runtime.gemm.epilogues import Epilogue
from runtime.gemm.kernels.large_m import COLUMNS, STORE_COLUMNS, TOKENS, large_gemm_kernel
from runtime.gemm.plan import LargeTile
from runtime.gemm.weights import PackedMatrix
from runtime.kernels.alignment import VECTOR_ELEMENTS
from runtime.kernels.overlap import overlapped

_RING_BYTES = {1: 108 << 10, 2: 200 << 10}
"""Maximum bytes of shared memory of a program for the ring of tiles, by consumer warp groups. With
one, two programs fit on a multiprocessor, so that the next kernel can start to load weights."""
_REGISTERS = {1: 128, 2: None}
"""Maximum registers of a thread, by consumer warp groups. With one, as for `_RING_BYTES`."""
_MAX_STAGES = 8
_TMA_ALIGNMENT = 16
"""Required alignment of a tensor's address for TMA, in bytes."""


class LargeGemm:
    """A GEMM over one to three weight matrices, with TMA descriptors cached by tile size.

    Args:
        biases: fp32 `[sum of rows]`.
        counters: int32, arrival counters of split-K reductions; zero before and after every launch.

    Attributes:
        two_inputs: whether the matrices read different columns of the input. The kernel then
            supports GATED with one consumer warp group only; with two, SiLU is a separate launch.
    """

    def __init__(
        self, matrices: Sequence[PackedMatrix], biases: Tensor | None, counters: Tensor
    ) -> None:
        self._weights = [matrix.weight for matrix in matrices]
        self._biases = biases
        self._counters = counters
        firsts = [max(matrix.inner_column, 0) for matrix in matrices]
        widths = [weight.shape[1] for weight in self._weights]
        self.two_inputs = len(set(zip(firsts, widths, strict=True))) > 1
        self._rows = [len(weight) for weight in self._weights]
        self._counts = [*_padded(self._rows), *_padded(widths), *_padded(firsts)]
        self._descriptors: dict[int, list[TensorDescriptor]] = {}

    def __call__(self, x: Tensor, y: Tensor, epilogue: Epilogue, tile: LargeTile) -> None:
        """Compute ``y`` from ``x``.

        Args:
            x: bf16 `[n, in]`.
            y: bf16 `[n, sum of rows]`, with GATED `[n, rows of the first matrix]`. It is
                overwritten; with RESIDUAL the output is added to it.

        Raises:
            ValueError: the kernel does not support the shapes.
        """
        gated = epilogue is Epilogue.GATED
        apart = gated and self.two_inputs
        each = tile.rows // 2 if gated else tile.rows
        rows = self._rows[:1] if gated else self._rows
        tokens = tile.groups * TOKENS.value
        blocks = triton.cdiv(len(x), tokens) * sum(triton.cdiv(n, each) for n in rows)
        items = blocks * tile.splits
        split = tile.splits > 1
        misaligned = x.stride(0) % VECTOR_ELEMENTS or x.data_ptr() % _TMA_ALIGNMENT
        if misaligned or any(n % VECTOR_ELEMENTS for n in rows):
            raise ValueError(f"rows {rows} are not multiples of 8, or the input is misaligned")
        if epilogue is Epilogue.RESIDUAL and tile.rows < STORE_COLUMNS.value:
            raise ValueError(f"RESIDUAL does not support tiles of {tile.rows} rows")
        if split and (epilogue is not Epilogue.PLAIN or tile.groups * items > len(self._counters)):
            raise ValueError(f"{epilogue.name} with {blocks} blocks does not support splits")
        partials = x.new_empty(items * tokens * tile.rows if split else 0, dtype=torch.float32)
        source = _descriptor(x, tokens)
        residual = _descriptor(y, tokens) if epilogue is Epilogue.RESIDUAL else source
        # With two warp groups, a program takes a whole multiprocessor. Starting it while the
        # previous kernel runs makes a prompt of 2,048 tokens 2 % slower on an H200.
        overlap = overlapped(x.device) if tile.groups == 1 else {}
        large_gemm_kernel[(min(items, _programs(x.device)),)](
            source, *self._weight_descriptors(each), residual, y, y.stride(0) // VECTOR_ELEMENTS,
            self._biases, partials, self._counters, items, len(x), *self._counts,
            GROUPS=tile.groups, BN=tile.rows, EPILOGUE=int(epilogue), APART=apart,
            BIAS=self._biases is not None, SPLITS=tile.splits,
            STAGES=stages(tile.groups, tile.rows, apart), num_warps=4,
            maxnreg=_REGISTERS[tile.groups], **overlap,
        )  # fmt: skip

    def _weight_descriptors(self, rows: int) -> list[TensorDescriptor]:
        if rows not in self._descriptors:
            made = [_descriptor(weight, rows) for weight in self._weights]
            self._descriptors[rows] = made + [made[0]] * (3 - len(made))
        return self._descriptors[rows]


def _padded(counts: list[int]) -> list[int]:
    """Return ``counts`` in units of 8 elements, padded to three with 0 for absent matrices."""
    return [count // VECTOR_ELEMENTS for count in counts] + [0] * (3 - len(counts))


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    block = [rows, COLUMNS.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(x, block, layout)


def stages(groups: int, rows: int, apart: bool = False) -> int:
    """Return the number of ring slots that fit.

    Args:
        groups, rows: see `LargeTile`.
        apart: whether a slot holds two tiles of inputs.
    """
    inputs = TOKENS.value * groups * (2 if apart else 1)
    return min(_MAX_STAGES, _RING_BYTES[groups] // int((inputs + rows) * COLUMNS.value * 2))


@cache
def _programs(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
