"""Calls that a CUDA graph has recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Captured:
    """A recorded call. A graph knows addresses only: ``held`` keeps what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    held: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


def capture(call: Callable[[], object], pool: Any = None) -> Captured:
    """Record a call that has been made before: what it compiles and sets up is there.

    Other threads may go on asking the device. Graphs of one ``pool`` share memory, and must not run
    at the same time; what a call returned stays as long as somebody has it.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        call()
    return Captured(graph, call)
