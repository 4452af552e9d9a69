"""Timing on a device, and its measured copy and matmul rates."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from runtime.graphs.capture import capture


@dataclass(frozen=True)
class Figure:
    """One row of a table: a measured time and its physical floor, in milliseconds."""

    name: str
    ms: float
    floor_ms: float

    def __str__(self) -> str:
        return f"{self.name:72} {self.ms:9.3f} {self.floor_ms:9.3f} {self.floor_ms / self.ms:7.1%}"


def show(title: str, figures: Iterable[Figure], target: Path | None) -> None:
    """Print each row when it is measured. Then write all rows to ``target`` as JSON, if given."""
    print(title)
    print(f"{'':72} {'ms':>9} {'floor':>9}")
    rows = []
    for figure in figures:
        print(figure, flush=True)
        rows.append(asdict(figure))
    if target:
        target.write_text(json.dumps(rows, indent=1))


def describe(device: str) -> str:
    """Return the device name and the torch version."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return f"{name}, torch {torch.__version__}"


def milliseconds(
    call: Callable[[], object],
    before: Callable[[], None] | None = None,
    *,
    device: str = "cuda",
    runs: int = 30,
) -> float:
    """Return the median duration of ``runs`` calls in milliseconds, after five warm-up calls.

    ``before`` is called before each call and is not timed.
    """
    once = _on_gpu if device == "cuda" else _on_cpu
    times = []
    for run in range(runs + 5):
        if before:
            before()
        took = once(call)
        if run >= 5:
            times.append(took)
    return median(times)


def captured(call: Callable[[], object], *, device: str = "cuda") -> Callable[[], object]:
    """Capture a call as a CUDA graph; on the CPU return it unchanged."""
    if device != "cuda":
        return call
    call()
    return capture(call)


def copy_rate(device: str = "cuda") -> float:
    """Return the bandwidth of a large copy in bytes per millisecond, reads plus writes."""
    size = 1 << (30 if device == "cuda" else 24)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), device=device)


def matmul_rate(device: str = "cuda") -> float:
    """Return the speed of a large bf16 matmul in floating-point operations per millisecond."""
    size = 8192 if device == "cuda" else 256
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    return 2 * size**3 / milliseconds(lambda: a @ b, device=device, runs=10)


def _on_gpu(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
