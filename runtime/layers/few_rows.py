"""Linear layers for a few input rows: compiled loops with oneDNN's bits and less memory traffic."""

import ctypes

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.cpu.jit import Bytes, Floats, Halves
from runtime.cpu.tiles import GROUP, LANES
from runtime.layers import loops

_COLUMNS = 16
"""Multiple to which oneDNN pads the columns of a packed weight."""

_MAX_ROWS = 16
"""Maximum rows for which loops over codes or bf16 are faster than oneDNN. With all weights of
SmolLM2 on one Zen 5 core, 1, 8 and 16 rows take 5.4, 13 and 25 ms from codes; 9, 17 and 28 ms from
bf16; and 21 (computed as two rows), 24 and 32 ms with oneDNN."""


class FewRowsLinear:
    """``x W^T`` for a few rows.

    Args:
        source: the weight in blocks of rows, see `runtime.layers.loops.Source`.
        outputs: rows of the weight, without padding.
        max_rows: maximum rows of ``x``.

    Attributes:
        k_block: number of columns that are summed before they are added to the output; to be set by
            the caller.
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
    """Convert an fp32 weight losslessly to the form with the least memory traffic.

    A weight that was quantized in its file is stored as 8-bit codes with scales and offsets (1.25
    bytes per element), and one with bf16 values as bf16 (2 bytes). Any other weight is read from
    the memory of ``packed``, for one input row only.

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
    """Return a view of oneDNN's packed memory, ``[blocks, in padded to _COLUMNS, LANES]``.

    None if the memory does not hold the weight in this layout.
    """
    expected = _blocked(functional.pad(weight, (0, -weight.shape[1] % _COLUMNS)))
    if torch.ops.mkldnn._nbytes(packed) != expected.nbytes:
        return None
    memory = (ctypes.c_float * expected.numel()).from_address(torch.ops.mkldnn.data_ptr(packed))
    blocks: Floats = np.ctypeslib.as_array(memory).reshape(expected.shape)
    return blocks if np.array_equal(blocks, expected.numpy()) else None


def _find_codes(weight: Tensor) -> tuple[Bytes, Floats, Floats] | None:
    """Return 8-bit codes that represent a weight exactly, as for GGUF's Q4_1 and Q8_0, or None."""
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
