"""CUDA graph capture."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Captured:
    """A captured call. Calling it replays the graph.

    Attributes:
        held: the captured callable. A graph stores only addresses, so this reference keeps the
            tensors alive that the graph reads and writes.
    """

    graph: torch.cuda.CUDAGraph
    held: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


def capture(call: Callable[[], object], pool: Any = None) -> Captured:
    """Capture a call as a CUDA graph.

    The call must have run before, so that its kernels are compiled and its buffers allocated.
    Other threads may use the device during the capture.

    Args:
        call: callable without arguments that only launches work on the current stream.
        pool: memory pool. Graphs of one pool share memory and must not run concurrently. A tensor
            that the call returned keeps its memory while it is referenced.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        _garbage_collection_disabled(),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        call()
    return Captured(graph, call)


@contextmanager
def _garbage_collection_disabled() -> Iterator[None]:
    """Disable the garbage collector: destroying another graph would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
