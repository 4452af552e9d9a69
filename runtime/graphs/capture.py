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
        held: captured callable. The graph stores only the addresses of tensors; this reference
            keeps the tensors alive.
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
        pool: memory pool of the graph, from `torch.cuda.graph_pool_handle`. Graphs with the same
            pool share memory and must not run concurrently. The memory of a tensor that ``call``
            returns is not reused while the tensor is referenced.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        _garbage_collection_disabled(),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        call()
    return Captured(graph, call)


def captured(run: Callable[[], object], pool: Any) -> Callable[[], object]:
    """Run a call once, then capture it as a CUDA graph; on the CPU, return it as it is.

    Args:
        pool: see `capture`; None on the CPU.
    """
    if pool is None:
        return run
    run()
    return capture(run, pool)


@contextmanager
def _garbage_collection_disabled() -> Iterator[None]:
    """Disable the garbage collector, because destroying another graph invalidates the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
