"""Static tensors that CUDA graphs read and the host overwrites."""

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Alignment of each tensor in the buffer, in bytes."""


class StaticTensors:
    """Tensors in one device buffer, whose addresses never change.

    Args:
        fields: shape and dtype of each tensor by name, in the order in which they are stored.

    Attributes:
        tensors: the tensors by name, initialized with 0.
    """

    def __init__(
        self, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        self._ranges: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            end = size + prod(shape) * dtype.itemsize
            self._ranges[name] = size, end
            size = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self.tensors: dict[str, Tensor] = {
            name: self._buffer[slice(*self._ranges[name])].view(dtype).view(shape)
            for name, (shape, dtype) in fields.items()
        }

    def write(self, values: Mapping[str, NDArray[np.generic]]) -> None:
        """Overwrite tensors in stream order, with one asynchronous copy.

        All tensors up to the last one that is written are overwritten, with 0 where ``values`` has
        no value.

        Args:
            values: leading rows of tensors, by name. The other dimensions must be complete.
        """
        ends = [self._ranges[name][0] + value.nbytes for name, value in values.items()]
        on_device = self._buffer.device.type == "cuda"
        staged = torch.zeros(max(ends), dtype=torch.uint8, pin_memory=on_device)
        memory = staged.numpy()
        for (name, value), end in zip(values.items(), ends, strict=True):
            memory[self._ranges[name][0] : end] = value.reshape(-1).view(np.uint8)
        self._buffer[: len(staged)].copy_(staged, non_blocking=True)
