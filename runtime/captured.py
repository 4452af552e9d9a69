"""Calls that a CUDA graph has recorded."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Captured:
    """A recorded call. A graph knows addresses only: ``held`` keeps what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    held: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()
