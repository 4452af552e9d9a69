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
