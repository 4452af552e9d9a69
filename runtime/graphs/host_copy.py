"""Numbers on their way between host and device; nobody waits but who asks for what has arrived.

On a device they go through pinned memory, in the order of its stream; on the CPU they are copied.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy there. torch keeps the pinned memory until it was read."""
    staged = torch.from_numpy(values)
    if device.type == "cuda":
        return staged.pin_memory().to(device, non_blocking=True)
    return staged.clone()


class Landing:
    """Room on the host for the first rows of some tensors, as they are at one point of the stream.

    Args:
        like: tensors `[rows, …]` of the shapes and dtypes that will be sent.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        on_device = like[0].device.type == "cuda"
        self._rooms = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device) for tensor in like
        ]
        self._arrived = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]

    def send(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Copy the first ``rows`` of each once what was launched so far has computed them."""
        for room, tensor in zip(self._rooms, tensors, strict=False):
            room[:rows].copy_(tensor[:rows], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, those that were sent last; of the others, what they were."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._rooms
