"""The factorization of `headrace compress`: progress, continuation after an interruption, costs."""

from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.offline import compress as factorization
from runtime.offline.compress import Allocation, Method, WorkFolder, artifact_key
from services.common.terminal import results


def factorize(
    dense: Checkpoint,
    calibration: Tensor,
    keep: float,
    method: Method,
    allocation: Allocation | None,
    on: torch.device,
    out: Path,
    write: Callable[[Checkpoint], None],
) -> tuple[Checkpoint, "factorization.CompressionReport"]:
    """Factorize and write a model, using layers that an interrupted call has finished.

    Args:
        write: writes the factorized checkpoint to ``out``.
    """
    console = Console(stderr=True)
    key = artifact_key(dense.model_hash, keep, calibration, method, allocation)
    with WorkFolder(work_folder(out), key) as work:
        if work.finished():
            console.print(f"continuing from the finished layers in {work_folder(out)}")
        with Progress(console=console) as progress:
            factorized, report = factorization.compress(
                dense,
                calibration,
                keep,
                progress_callback(progress, f"factorizing at keep {keep:g}"),
                method=method,
                allocation=allocation,
                device=on,
                work=work,
            )
        write(factorized)
        work.remove()
    return factorized, report


def work_folder(out: Path) -> Path:
    """Return the folder that keeps the finished layers of an unfinished checkpoint ``out``."""
    return out.with_name(f"{out.name}.work")


def progress_callback(progress: Progress, label: str) -> "factorization.Progress":
    """Return a callback that shows the stages of a computation as one task."""
    task = progress.add_task(label, total=1.0)

    def update(stage: str, fraction: float) -> None:
        progress.update(task, description=f"{label}: {stage}", completed=fraction)

    return update


def print_costs(report: "factorization.CompressionReport", held_out: Tensor) -> None:
    """Print the time and memory of a factorization."""
    console = results()
    console.print(f"on {held_out.numel()} held-out tokens; factorized in {report.seconds:.0f} s")
    parts = (f"{name} {seconds:.0f} s" for name, seconds in report.seconds_by_part.items())
    console.print(", ".join(parts))
    if report.peak_device_bytes:
        console.print(f"peak GPU memory of tensors: {report.peak_device_bytes / 1e9:.1f} GB")
