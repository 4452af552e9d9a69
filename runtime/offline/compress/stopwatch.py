"""Elapsed time by part of a computation, on the CPU or on a GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums the elapsed time of named parts.

    Attributes:
        seconds: elapsed seconds by part. A part ends when the device has finished its work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to ``part``."""
        started = time.monotonic()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started
