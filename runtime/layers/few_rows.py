"""Products of a few rows by our own loop, which gives oneDNN's bits and reads less memory."""

import ctypes

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.cpu.jit import Bytes, Floats, Halves
from runtime.cpu.tiles import GROUP, LANES
from runtime.layers import loops

_COLUMNS = 16
"""oneDNN pads the columns of a packed weight to a multiple of it."""

_SHORT_ROWS = 16
"""For all of SmolLM2's weights, on one Zen 5 core, 1, 8 and 16 rows take 5.4, 13 and 25 ms from
codes, 9, 17 and 28 ms from bf16, and 21 (as two rows), 24 and 32 ms by oneDNN."""


class FewRows:
    """``x W^T`` for up to ``most`` rows, summed within blocks of ``k_block`` columns."""

    def __init__(self, source: loops.Source, outputs: int, most: int) -> None:
        self.most = most
        self.k_block = 0
        self._source, self._outputs = source, outputs
        self._blocks = -(-outputs // LANES)

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(x), self._outputs)
        loops.product(self._source, self._blocks, x.numpy(), self.k_block, y.numpy())
        return y


def few_rows(weight: Tensor, packed: Tensor) -> FewRows | None:
    """The form of an fp32 weight that takes the least memory to read and loses nothing.

    Weights that were quantized in their file are multiples of a scale: 1.25 bytes each. Those that
    were trained, or rounded, in bf16 take two. Any other are read from the memory of ``packed``,
    which is oneDNN's, a row at a time; None if its layout is not the one that we know.
    """
    if codes := _find_codes(weight):
        return FewRows(codes, len(weight), _SHORT_ROWS)
    if torch.equal(weight.bfloat16().float(), weight):
        patterns: Halves = _blocked(weight.bfloat16()).view(torch.uint16).numpy()
        return FewRows(patterns, len(weight), _SHORT_ROWS)
    blocks = _blocks_of(packed, weight)
    return None if blocks is None else FewRows(blocks, len(weight), 1)


def _blocked(weight: Tensor) -> Tensor:
    """`[out, in]` as `[blocks, in, LANES]`, rows padded with zeros."""
    padded = functional.pad(weight, (0, 0, 0, -len(weight) % LANES))
    return padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).contiguous()


def _blocks_of(packed: Tensor, weight: Tensor) -> Floats | None:
    """oneDNN's own memory as blocks, ``[blocks, in padded to _COLUMNS, LANES]``."""
    known = _blocked(functional.pad(weight, (0, -weight.shape[1] % _COLUMNS)))
    if torch.ops.mkldnn._nbytes(packed) != known.nbytes:
        return None
    memory = (ctypes.c_float * known.numel()).from_address(torch.ops.mkldnn.data_ptr(packed))
    blocks: Floats = np.ctypeslib.as_array(memory).reshape(known.shape)
    return blocks if np.array_equal(blocks, known.numpy()) else None


def _find_codes(weight: Tensor) -> tuple[Bytes, Floats, Floats] | None:
    """Exact codes as GGUF's Q4_1 and Q8_0 have them; None if the weight has none."""
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
