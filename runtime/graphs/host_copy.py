"""Asynchronous copies between host and device; `HostCopy.wait` and `DeviceCopy.stage` block.

On a GPU, they use pinned memory and run in CUDA stream order. On the CPU they are plain copies.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to the device without blocking.

    On a GPU the array is copied through pinned memory, which torch frees after the copy.
    """
    staged = torch.from_numpy(values)
    if device.type == "cuda":
        return staged.pin_memory().to(device, non_blocking=True)
    return staged.clone()


class DeviceCopy:
    """Buffers for repeated copies of the first rows of an array to the device.

    Unlike `to_device`, a copy allocates no pinned memory, which may wait for the device, and the
    copied values are always in the same place, so that a graph can read them.

    Args:
        shape: shape of the largest array, int32.

    Attributes:
        copied: int32 tensor of this shape on the device, initially all -1.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        on_device = device.type == "cuda"
        self._staged = torch.empty(shape, dtype=torch.int32, pin_memory=on_device)
        self._array: NDArray[np.int32] = self._staged.numpy()
        self._ended = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]
        self.copied = torch.full(shape, -1, dtype=torch.int32, device=device)

    def stage(self) -> NDArray[np.int32]:
        """Return the int32 array to copy, after the last copy has ended."""
        if self._ended is not None:
            self._ended.synchronize()
        return self._array

    def start(self, rows: int) -> None:
        """Copy the first rows, in stream order."""
        self.copied[:rows].copy_(self._staged[:rows], non_blocking=True)
        if self._ended is not None:
            self._ended.record()


class HostCopy:
    """Host buffers that receive the leading rows of device tensors asynchronously.

    Args:
        like: tensors `[rows, …]` with the shapes and dtypes of the tensors that `start` copies.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        on_device = like[0].device.type == "cuda"
        self._buffers = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device) for tensor in like
        ]
        self._copied = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]

    def start(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Start copying the first ``rows`` rows of each tensor, in stream order.

        With fewer tensors than buffers, the remaining buffers keep their contents.
        """
        for buffer, tensor in zip(self._buffers, tensors, strict=False):
            buffer[:rows].copy_(tensor[:rows], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[Tensor]:
        """Wait for the last `start` and return all buffers."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._buffers
