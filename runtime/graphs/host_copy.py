"""Asynchronous copies between host and device; only `HostCopy.wait` blocks.

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

    Unlike `to_device`, a copy allocates no pinned memory, which may wait for the device.

    Args:
        shape: shape of the largest array, int32.

    Attributes:
        staged: int32 array of this shape, to be written before `start`. It must not be written
            again until the last copy has ended.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        staged = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._staged = staged
        self._copied = torch.empty_like(staged, device=device)
        self.staged: NDArray[np.int32] = staged.numpy()

    def start(self, rows: int) -> Tensor:
        """Copy the first rows, in stream order. The next call overwrites the result."""
        return self._copied[:rows].copy_(self._staged[:rows], non_blocking=True)


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
