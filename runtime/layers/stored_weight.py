"""fp32 weights on the CPU, stored once in the smallest form that has the same values."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.cpu.jit import Bytes, Floats, Halves
from runtime.cpu.tiles import GROUP, LANES
from runtime.layers import loops

_MAX_ROWS = 16
"""Maximum number of input rows for which reading codes or bf16 is faster than expanding the weight.
The loops compute 8 rows at a time.
"""


class StoredWeight:
    """An fp32 weight `[out, in]` as 8-bit codes, bf16 patterns or fp32, in blocks of LANES rows.

    Args:
        source: the weight; see `loops.Source`.
        shape: (out, in), without padding.

    Attributes:
        shape: (out, in).
        dtype: dtype of the codes, the patterns or the values.
        max_rows: number of rows of ``x`` up to which `multiply` is faster than oneDNN.
    """

    def __init__(self, source: loops.Source, shape: torch.Size) -> None:
        self._source = source
        self.shape = shape
        self.dtype = (source[0] if isinstance(source, tuple) else source).dtype
        self.max_rows = 1 if self.dtype == np.float32 else _MAX_ROWS

    @classmethod
    def of(cls, weight: Tensor) -> "StoredWeight":
        """Store a weight as fp32."""
        return cls(blocked(weight).numpy(), weight.shape)

    @classmethod
    def compact(cls, weight: Tensor) -> "StoredWeight | None":
        """Store an fp32 weight as codes or bf16, or return None if neither has the same values.

        A weight that was quantized in its file is stored as 8-bit codes with scales and offsets
        (1.25 bytes per element), any other whose values are all representable in bf16 as bf16 (2
        bytes).
        """
        if codes := _find_codes(weight):
            return cls(codes, weight.shape)
        if not torch.equal(weight.bfloat16().float(), weight):
            return None
        patterns: Halves = blocked(weight.bfloat16()).view(torch.uint16).numpy()
        return cls(patterns, weight.shape)

    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x W^T``, in the order of `loops.linear`."""
        y = x.new_empty(len(x), self.shape[0])
        is_expanded = self.dtype != np.float32 and len(x) > self.max_rows
        multiply = loops.linear_expanded if is_expanded else loops.linear
        multiply(self._source, -(-self.shape[0] // LANES), x.numpy(), y.numpy())
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows of the weight, fp32 `[n, in]`.

        Args:
            indices: int64 `[n]`.

        Raises:
            IndexError: an index is out of range.
        """
        numbers = indices.numpy()
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.shape[0]:
            raise IndexError(f"indices of rows are not below {self.shape[0]}")
        block, lane = np.divmod(numbers, LANES)
        if isinstance(self._source, tuple):
            codes, scales, offsets = (part[block, :, lane, None] for part in self._source)
            groups = codes.reshape(*scales.shape[:2], GROUP).astype(np.float32)
            values = scales * groups + offsets  # the product is exact: 11 times 8 bits
        elif self.dtype == np.uint16:
            values = (self._source[block, :, lane].astype(np.uint32) << 16).view(np.float32)
        else:
            values = self._source[block, : self.shape[1], lane]
        return torch.from_numpy(values.reshape(len(numbers), self.shape[1]))

    def expand(self, first_block: int, out: Floats) -> None:
        """Write blocks as fp32 to ``out``, `[blocks, in, LANES]` or with more columns."""
        loops.expand(self._source, first_block, self.shape[1], out)


def blocked(weight: Tensor) -> Tensor:
    """Rearrange `[out, in]` into `[blocks, in, LANES]`, padding the rows with zeros."""
    padded = functional.pad(weight, (0, 0, 0, -len(weight) % LANES))
    return padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).contiguous()


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
