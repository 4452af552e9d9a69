"""fp32 weights in the blocked layout that oneDNN multiplies on the CPU, and their memory."""

import ctypes
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.cpu.jit import Floats
from runtime.cpu.tiles import LANES
from runtime.layers.stored_weight import StoredWeight, blocked

_TYPICAL_ROWS = 64
"""Number of input rows that oneDNN packs weights for. Any from 8 to 256 is equally fast."""
_COLUMNS = 16
"""Multiple to which oneDNN pads the columns of a packed weight."""
_PART_ELEMENTS = 1 << 21
"""Maximum elements of a weight that are expanded at once (8 MiB)."""


class PackedWeight:
    """A weight `[out, in]` in oneDNN's layout.

    Attributes:
        blocks: view of its memory as `[blocks, columns, LANES]`, or None if it has another layout.
            The number of columns is ``in``, rounded up to a multiple of `_COLUMNS`. Without
            AVX-512, oneDNN 3.12 uses this layout for all weights; with it, version 3.10 keeps
            some as they are, and transposes others.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self.blocks = _blocks_of(self._packed, weight)

    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x W^T``. A single row is summed in another order than several."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return y


def _blocks_of(packed: Tensor, weight: Tensor) -> Floats | None:
    expected = blocked(functional.pad(weight, (0, -weight.shape[1] % _COLUMNS)))
    if torch.ops.mkldnn._nbytes(packed) != expected.nbytes:
        return None
    memory = (ctypes.c_float * expected.numel()).from_address(torch.ops.mkldnn.data_ptr(packed))
    vars(memory)["owner"] = packed  # views keep the memory allocated
    blocks: Floats = np.ctypeslib.as_array(memory).reshape(expected.shape)
    return blocks if np.array_equal(blocks, expected.numpy()) else None


class _Buffer:
    """Memory for one expanded weight. All weights of a shape share it.

    Whether oneDNN uses a known layout is determined by packing a weight of distinct values.
    """

    def __init__(self, shape: torch.Size) -> None:
        distinct = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
        self._packed = PackedWeight(distinct)
        self._lock = Lock()
        self.blocks = self._packed.blocks

    def multiply(self, x: Tensor, stored: StoredWeight, first_block: int) -> Tensor:
        """Return the product with consecutive blocks of a weight."""
        assert self.blocks is not None
        with self._lock:
            stored.expand(first_block, self.blocks)
            return self._packed.multiply(x)


_BUFFERS: WeakValueDictionary[torch.Size, _Buffer] = WeakValueDictionary()


class ExpandedWeight:
    """A stored weight that is expanded to oneDNN's layout for each product.

    Weights are expanded into blocks only, because other layouts take several times as long.

    Args:
        parts: the first block and the buffer of each part of the weight, in order of rows.
    """

    def __init__(self, stored: StoredWeight, parts: list[tuple[int, _Buffer]]) -> None:
        self._stored = stored
        self._parts = parts

    @classmethod
    def of(cls, stored: StoredWeight, weight: Tensor) -> "ExpandedWeight | None":
        """Return the weight, or None if oneDNN does not use blocks of LANES rows."""
        rows = max(_PART_ELEMENTS // weight.shape[1] // LANES, 1) * LANES
        parts = []
        for number, part in enumerate(torch.split(weight, rows)):
            buffer = _BUFFERS.get(part.shape)
            if buffer is None:
                buffer = _BUFFERS[part.shape] = _Buffer(part.shape)
            if buffer.blocks is None:
                return None
            parts.append((number * rows // LANES, buffer))
        return cls(stored, parts)

    def multiply(self, x: Tensor) -> Tensor:
        """See `PackedWeight.multiply`."""
        products = [buffer.multiply(x, self._stored, first) for first, buffer in self._parts]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)
