"""Products of a few rows by our own loops, which give oneDNN's bits and read less memory."""

import ctypes
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.compiled import Floats
from runtime.layers import loops
from runtime.layers.loops import BLOCK, GROUP, K_ALIGNMENT

_CODED_ROWS = 8
"""For all of SmolLM2's weights, on one Sapphire Rapids core, 1, 4 and 8 rows take 17, 26 and 38 ms
from codes, and 45, 43 and 53 ms by oneDNN; from 16 rows on it is as fast."""


class FewRows(Protocol):
    """``x W^T`` for up to ``most`` rows, summed within blocks of ``k_block`` columns."""

    most: int
    k_block: int

    def __call__(self, x: Tensor) -> Tensor: ...


class BlockedRows:
    """A single row over the memory of oneDNN's packed weight, as fast as it can be read."""

    most = 1

    def __init__(self, blocks: Floats, outputs: int) -> None:
        self._blocks, self._outputs = blocks, outputs
        self.k_block = 0

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(1, self._outputs)
        loops.block_gemv(self._blocks, x.numpy()[0], self.k_block, y.numpy()[0])
        return y


class CodedRows:
    """Up to eight rows over 8-bit codes with a scale and an offset for each 32 columns.

    Weights that were quantized in their file are multiples of a scale, and nothing is lost by
    reading them as such: 1.25 bytes a weight, and every decoded weight is the same fp32 bits.
    """

    most = _CODED_ROWS

    def __init__(self, codes: loops.Bytes, scales: Floats, offsets: Floats, outputs: int) -> None:
        self._codes, self._scales, self._offsets = codes, scales, offsets
        self._outputs = outputs
        self.k_block = 0

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(x), self._outputs)
        loops.coded_gemm(
            self._codes, self._scales, self._offsets, x.numpy(), self.k_block, y.numpy()
        )
        return y


def blocked_rows(weight: Tensor, packed: Tensor) -> BlockedRows | None:
    """Over the memory of ``packed``, oneDNN's form of ``weight``; None if its layout is another."""
    rows, columns = weight.shape
    padded = functional.pad(weight, (0, -columns % K_ALIGNMENT, 0, -rows % BLOCK))
    if torch.ops.mkldnn._nbytes(packed) != padded.nbytes:
        return None
    known = padded.view(-1, BLOCK, padded.shape[1]).transpose(1, 2).numpy()
    memory = (ctypes.c_float * padded.numel()).from_address(torch.ops.mkldnn.data_ptr(packed))
    blocks: Floats = np.ctypeslib.as_array(memory).reshape(known.shape)
    return BlockedRows(blocks, rows) if np.array_equal(blocks, known) else None


def coded_rows(weight: Tensor) -> CodedRows | None:
    """Over exact codes as GGUF's Q4_1 and Q8_0 have them; None if the weight has none."""
    rows, columns = weight.shape
    if columns % GROUP:
        return None
    blocks = -(-rows // BLOCK)
    codes = np.zeros((blocks, columns, BLOCK), np.uint8)
    scales = np.zeros((blocks, columns // GROUP, BLOCK), np.float32)
    offsets = np.zeros_like(scales)
    values = weight.contiguous().numpy()
    for levels, signed in ((15, False), (127, True)):
        if loops.find_codes(values, levels, signed, codes, scales, offsets):
            return CodedRows(codes, scales, offsets, rows)
    return None
