"""`headrace compress`: factorize a checkpoint and report its perplexity before and after."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from runtime import compress as factorization
from runtime.checkpoint import Checkpoint, load_checkpoint
from runtime.compress import Allocation, Method, WorkFolder, artifact_key
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.common.tokenizer import Tokenizer, load_tokenizer
from services.offline.output import refuse_existing, write_model
from services.worker.device import torch_device

Choice = TypeVar("Choice", bound=StrEnum)

ROW_TOKENS, ROWS = 512, 32


def compress(
    model: str,
    keep: float,
    out: Path,
    method: str = "fisher",
    ranks: str | None = None,
    rows: int = ROWS,
    device: str = "auto",
) -> None:
    """Factorize a model and write the factorized checkpoint to ``out``.

    Calibration uses one part of Python's documentation, and perplexity is measured on another.
    Finished layers are kept in a folder beside ``out``. After an interruption, a call with the same
    arguments continues from them.

    Args:
        model: name or path of a checkpoint.
        keep: fraction of the parameters of the linear layers to keep.
        out: folder to write; it must not exist.
        method: value of `runtime.compress.Method`.
        ranks: value of `runtime.compress.Allocation`; None selects the method's default.
        rows: number of calibration rows of `ROW_TOKENS` tokens; perplexity is measured on half as
            many rows.
        device: auto, cpu or cuda.

    Raises:
        SettingsError: if the method, the allocation or the device is unknown, if ``out`` exists, or
            if the GPU has too little free memory.
        CompressionError, CheckpointError: if the model cannot be read, factorized or written.
    """
    chosen_method = parse_choice(Method, method)
    allocation = parse_choice(Allocation, ranks) if ranks else None
    on = torch_device(device)
    refuse_existing(out)
    console = Console(stderr=True)
    source = resolve_model(model)
    with console.status(f"reading {source.name}"):
        tokenizer = load_tokenizer(source)
        dense = load_checkpoint(source, dtype=None)
    calibration, held_out = _texts(tokenizer, rows)
    key = artifact_key(dense.model_hash, keep, calibration, chosen_method, allocation)
    with _reported_shortage():
        with WorkFolder(work_folder(out), key) as work:
            if work.finished():
                console.print(f"continuing from the finished layers in {work_folder(out)}")
            with Progress(console=console) as progress:
                factorized, report = factorization.compress(
                    dense,
                    calibration,
                    keep,
                    _progress_callback(progress, f"factorizing at keep {keep:g}"),
                    method=chosen_method,
                    allocation=allocation,
                    device=on,
                    work=work,
                )
            write_model(factorized, tokenizer, out)
            work.remove()
        before, after = _perplexities(dense, factorized, held_out, on, console)
    _print_report(report, held_out, before, after)


def _texts(tokenizer: Tokenizer, rows: int) -> tuple[Tensor, Tensor]:
    """Return ``rows`` rows of calibration text, and half as many of held-out text."""
    calibration, held_out = (
        factorization.cut_rows(tokenizer.encode(text), ROW_TOKENS, count)
        for text, count in zip(factorization.documentation(), (rows, rows // 2), strict=True)
    )
    return calibration, held_out


def _perplexities(
    dense: Checkpoint, factorized: Checkpoint, tokens: Tensor, on: torch.device, console: Console
) -> tuple[float, float]:
    with Progress(console=console) as progress:
        before, after = (
            factorization.perplexity(
                checkpoint, tokens, _progress_callback(progress, f"perplexity, {name}"), on
            )
            for name, checkpoint in (("dense", dense), ("factorized", factorized))
        )
    return before, after


def work_folder(out: Path) -> Path:
    """Return the folder that keeps the finished layers of an unfinished checkpoint ``out``."""
    return out.with_name(f"{out.name}.work")


@contextmanager
def _reported_shortage() -> Iterator[None]:
    """Translate an error of torch: the GPU has too little free memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SettingsError(f"too little free GPU memory, use --device cpu: {error}") from error


def parse_choice(choices: type[Choice], name: str) -> Choice:
    """Return the member of an enumeration with the value ``name``.

    Raises:
        SettingsError: if no member has this value.
    """
    try:
        return choices(name)
    except ValueError:
        raise SettingsError(f"{name!r} is unknown: choose one of {', '.join(choices)}") from None


def _progress_callback(progress: Progress, name: str) -> "factorization.Progress":
    task = progress.add_task(name, total=1.0)

    def update(stage: str, fraction: float) -> None:
        progress.update(task, description=f"{name}: {stage}", completed=fraction)

    return update


def _print_report(
    report: "factorization.CompressionReport", held_out: Tensor, before: float, after: float
) -> None:
    table = Table("keep", "parameters kept", "factor pairs", "perplexity", "dense", "change")
    table.add_row(
        f"{report.keep:g}",
        f"{report.parameters_kept:.3f}",
        str(report.factorized),
        f"{after:.2f}",
        f"{before:.2f}",
        f"{after / before - 1:+.1%}",
    )
    console = Console(stderr=True)
    console.print(table)
    console.print(f"on {held_out.numel()} held-out tokens; factorized in {report.seconds:.0f} s")
    parts = (f"{name} {seconds:.0f} s" for name, seconds in report.seconds_by_part.items())
    console.print(", ".join(parts))
    if report.peak_device_bytes:
        console.print(f"peak GPU memory of tensors: {report.peak_device_bytes / 1e9:.1f} GB")
