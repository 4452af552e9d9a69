"""CPU linear layers for a few input rows: compiled loops, bitwise identical to oneDNN.

They read less memory than oneDNN, because weights are kept in a smaller lossless form where
possible.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.cpu.jit import Bytes, Floats, Halves
from runtime.cpu.tiles import GROUP, LANES
from runtime.layers import loops

_COLUMNS = 16
"""oneDNN pads the columns of a packed weight to a multiple of this number."""

_MAX_ROWS = 16
"""Maximum number of input rows for which weights stored as codes or bf16 are faster than oneDNN.
Times of 1, 8 and 16 rows with all of SmolLM2's weights on one Zen 5 core: 5.4, 13 and 25 ms from
codes; 9, 17 and 28 ms from bf16; 21, 24 and 32 ms by oneDNN, which computes 1 row as 2.
"""


class FewRowsLinear:
    """``x W^T`` for a few rows.

    Args:
        source: weight in blocks of LANES rows; see `loops.Source`.
        outputs: number of rows of the weight, without padding.
        max_rows: maximum number of rows of ``x``.

    Attributes:
        k_block: number of columns whose products are summed before the sum is added to the output.
            The caller must set it.
    """

    def __init__(self, source: loops.Source, outputs: int, max_rows: int) -> None:
        self.max_rows = max_rows
        self.k_block = 0
        self._source, self._outputs = source, outputs
        self._blocks = -(-outputs // LANES)

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(x), self._outputs)
        loops.linear(self._source, self._blocks, x.numpy(), self.k_block, y.numpy())
        return y


def few_rows_linear(weight: Tensor, packed: Tensor) -> FewRowsLinear | None:
    """Build a linear layer that stores an fp32 weight losslessly in its smallest form.

    A weight that was quantized in its file is stored as 8-bit codes with scales and offsets (1.25
    bytes per element). A weight whose values are all representable in bf16 is stored as bf16 (2
    bytes). Any other weight is read from the memory of ``packed``, and the layer accepts only a
    single input row.

    Args:
        weight: fp32 `[out, in]`.
        packed: the same weight in oneDNN's packed layout.

    Returns:
        The linear layer, or None if ``packed`` does not have the expected layout.
    """
    if codes := _find_codes(weight):
        return FewRowsLinear(codes, len(weight), _MAX_ROWS)
    if torch.equal(weight.bfloat16().float(), weight):
        patterns: Halves = _blocked(weight.bfloat16()).view(torch.uint16).numpy()
        return FewRowsLinear(patterns, len(weight), _MAX_ROWS)
    blocks = _blocks_of(packed, weight)
    return None if blocks is None else FewRowsLinear(blocks, len(weight), 1)


def _blocked(weight: Tensor) -> Tensor:
    """Rearrange `[out, in]` into `[blocks, in, LANES]`, padding the rows with zeros."""
    padded = functional.pad(weight, (0, 0, 0, -len(weight) % LANES))
    return padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).contiguous()


def _blocks_of(packed: Tensor, weight: Tensor) -> Floats | None:
    """View oneDNN's packed memory as ``[blocks, columns, LANES]``.

    The number of columns is ``in``, rounded up to a multiple of `_COLUMNS`. Return None if the
    memory does not hold the weight in that layout.
    """
    expected = _blocked(functional.pad(weight, (0, -weight.shape[1] % _COLUMNS)))
    if torch.ops.mkldnn._nbytes(packed) != expected.nbytes:
        return None
    memory = (ctypes.c_float * expected.numel()).from_address(torch.ops.mkldnn.data_ptr(packed))
    blocks: Floats = np.ctypeslib.as_array(memory).reshape(expected.shape)
    return blocks if np.array_equal(blocks, expected.numpy()) else None


def _find_codes(weight: Tensor) -> tuple[Bytes, Floats, Floats] | None:
    """Return codes, scales and offsets that represent a weight exactly, or None.

    They exist for weights that were stored in GGUF's Q4_1 or Q8_0 format.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        return None
    blocks = -(-rows // LANES)
    codes = np.zeros((blocks, columns, LANES), np.uint8)
    scales = np.zeros((blocks, columns // GROUP, LANES), np.float32)
    offsets = np.zeros_like(scales)
    values = weight.contiguous().numpy()
    for levels, signed in ((15, False), (127, True)):
        if loops.find_codes(values, levels, signed, codes, scales, offsets):
            return codes, scales, offsets
    return None
