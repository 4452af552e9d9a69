"""fp32 weights in the blocked layout that oneDNN multiplies on the CPU, and their memory.

oneDNN chooses its kernels by processor, shape of the weight and number of rows. A weight is used
only if it has a known layout, and if products of several numbers of rows are bitwise identical to
those of `runtime.layers.loops`.
"""

import ctypes
from functools import cache
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
_MAX_ROWS = 512
"""Maximum rows of a product, which are computed for the check of each shape, too."""
_CHECKED_PRODUCTS = 1 << 30
"""Multiplications of the largest product of the check, which limit the rows of large weights."""
_CHECKED_BLOCKS = 2
"""First and last blocks of LANES outputs that are compared."""


class PackedWeight:
    """A weight `[out, in]` in oneDNN's layout.

    Attributes:
        blocks: view of its memory as `[blocks, columns, LANES]`. The number of columns is ``in``,
            rounded up to a multiple of `_COLUMNS`.
        max_rows: maximum rows of a product.
    """

    def __init__(self, packed: Tensor, blocks: Floats, max_rows: int) -> None:
        self._packed = packed
        self.blocks = blocks
        self.max_rows = max_rows

    @classmethod
    def of(cls, weight: Tensor) -> "PackedWeight | None":
        """Pack a weight, or return None if results could differ from those of the loops."""
        max_rows = _max_rows(weight.shape)
        return cls(*_packed(weight), max_rows) if max_rows else None

    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x W^T`` for 2 to `max_rows` rows."""
        return _multiply(x, self._packed)


def _multiply(x: Tensor, packed: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return y


def _packed(weight: Tensor) -> tuple[Tensor, Floats]:
    """Pack a weight, and return also a view of its memory as blocks.

    Raises:
        ValueError: it has another layout. Without AVX-512, oneDNN 3.12 has blocks for all weights;
            with it, version 3.10 keeps some as they are, and transposes others.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    expected = blocked(functional.pad(weight, (0, -weight.shape[1] % _COLUMNS)))
    if torch.ops.mkldnn._nbytes(packed) != expected.nbytes:
        raise ValueError("the packed weight has another size")
    memory = (ctypes.c_float * expected.numel()).from_address(torch.ops.mkldnn.data_ptr(packed))
    vars(memory)["owner"] = packed  # views keep the memory allocated
    blocks: Floats = np.ctypeslib.as_array(memory).reshape(expected.shape)
    if not np.array_equal(blocks.view(np.uint32), expected.numpy().view(np.uint32)):
        raise ValueError("the packed weight has another layout")
    return packed, blocks


@cache
def _max_rows(shape: torch.Size) -> int:
    """Return the rows up to which oneDNN has the bits of the loops, or 0 if it cannot be used.

    On some processors, the order of its sums depends on the number of rows, so that products of
    few, some and the most rows are compared.
    """
    distinct = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
    try:
        packed, blocks = _packed(distinct)
    except ValueError:
        return 0
    most = min(1 << max((_CHECKED_PRODUCTS // shape.numel()).bit_length() - 1, 1), _MAX_ROWS)
    draw = torch.Generator().manual_seed(0)
    for rows in sorted({2, min(most, 130), most}):
        x = torch.randn(rows, shape[1], generator=draw)
        found = _multiply(x, packed)
        for first in {0, max(len(blocks) - _CHECKED_BLOCKS, 0)}:
            columns = found[:, first * LANES : (first + _CHECKED_BLOCKS) * LANES]
            part = StoredWeight(
                blocks[first : first + _CHECKED_BLOCKS], torch.Size([columns.shape[1], shape[1]])
            )
            if not torch.equal(part.multiply(x), columns):
                return 0
    return most


class _Buffer:
    """Memory for one expanded weight. All weights of a shape share it."""

    def __init__(self, shape: torch.Size, max_rows: int) -> None:
        self._packed, self.blocks = _packed(torch.arange(shape.numel()).float().view(shape))
        self._lock = Lock()
        self.max_rows = max_rows

    def multiply(self, x: Tensor, stored: StoredWeight, first_block: int) -> Tensor:
        """Return the product with consecutive blocks of a weight."""
        with self._lock:
            stored.expand(first_block, self.blocks)
            return _multiply(x, self._packed)


_BUFFERS: WeakValueDictionary[torch.Size, _Buffer] = WeakValueDictionary()


class ExpandedWeight:
    """A stored weight that is expanded to oneDNN's layout for each product.

    Args:
        parts: the first block and the buffer of each part of the weight, in order of rows.

    Attributes:
        max_rows: maximum rows of a product.
    """

    def __init__(self, stored: StoredWeight, parts: list[tuple[int, _Buffer]]) -> None:
        self._stored = stored
        self._parts = parts
        self.max_rows = min(buffer.max_rows for _, buffer in parts)

    @classmethod
    def of(cls, stored: StoredWeight, weight: Tensor) -> "ExpandedWeight | None":
        """Return the weight, or None if results could differ from those of the loops."""
        rows = max(_PART_ELEMENTS // weight.shape[1] // LANES, 1) * LANES
        parts = []
        for number, part in enumerate(torch.split(weight, rows)):
            buffer = _BUFFERS.get(part.shape)
            if buffer is None:
                max_rows = _max_rows(part.shape)
                if not max_rows:
                    return None
                buffer = _BUFFERS[part.shape] = _Buffer(part.shape, max_rows)
            parts.append((number * rows // LANES, buffer))
        return cls(stored, parts)

    def multiply(self, x: Tensor) -> Tensor:
        """See `PackedWeight.multiply`."""
        products = [buffer.multiply(x, self._stored, first) for first, buffer in self._parts]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)
