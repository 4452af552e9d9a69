"""Calls that a CUDA graph has recorded."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    with (
        _nothing_collected(),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        call()
    return Captured(graph, call)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without the garbage collector: another graph, when it is let go, invalidates a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
