"""Encoding of pages in several layers by one launch."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.kv.gpu import CompressedPageKernels

_ALIGNED = 16
"""Distances between the layers of one launch are multiples of this number of elements."""


class LayersEncoder:
    """Encoding of pages in several layers of a cache, in one launch for all layers that are alike.

    Args:
        layers: kernels and planes (K, V and the compressed planes) of each layer.
    """

    def __init__(self, layers: Sequence[tuple[CompressedPageKernels, tuple[Tensor, ...]]]) -> None:
        groups: dict[Hashable, list[tuple[CompressedPageKernels, tuple[Tensor, ...]]]] = {}
        for kernels, planes in layers:
            inputs = (*planes, *kernels.inputs.planes)
            groups.setdefault(tuple(map(_kind, inputs)), []).append((kernels, planes))
        self._launches = [(*group[0], _offsets(group)) for group in groups.values()]
        self._layers = layers  # a reference to the tensors whose addresses are used

    def encode(self, sources: Tensor, targets: Tensor, first_positions: Tensor) -> None:
        """Encode pages; see `runtime.kv.windowed.PageEncoder.encode`."""
        for kernels, planes, offsets in self._launches:
            keys, values, *compressed = planes
            kernels.encode(
                keys, values, tuple(compressed), targets, sources, first_positions, offsets
            )

    def encode_leaving(self, batch: Batch) -> None:
        """Encode pages that leave windows; see `CompressedPageKernels.encode_leaving`."""
        for kernels, planes, offsets in self._launches:
            kernels.encode_leaving(planes, batch, offsets)


def _kind(x: Tensor | int) -> Hashable:
    """Return the properties of an argument that must be equal in all layers of a launch."""
    if isinstance(x, int):
        return x
    return x.dtype, x.shape, x.stride(), x.data_ptr() % (_ALIGNED * x.element_size())


def _offsets(layers: Sequence[tuple[CompressedPageKernels, tuple[Tensor, ...]]]) -> Tensor:
    """Return the distances of all layers from the first, ``offsets`` of `encode_kernel`."""
    inputs = [(*planes, *kernels.inputs.planes) for kernels, planes in layers]
    rows = [
        [
            (x.data_ptr() - base.data_ptr()) // x.element_size()
            if isinstance(x, Tensor) and isinstance(base, Tensor)
            else 0
            for x, base in zip(row, inputs[0], strict=True)
        ]
        for row in inputs
    ]
    return torch.tensor(rows, dtype=torch.int64, device=layers[0][1][0].device)
