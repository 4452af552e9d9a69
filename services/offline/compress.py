"""`headrace compress`: factorize a checkpoint and report its perplexity before and after."""

from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from runtime import compress as factorization
from runtime.checkpoint import load_checkpoint
from runtime.compress import Allocation, Method
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.common.tokenizer import load_tokenizer
from services.offline.output import refuse_existing, write_model

Choice = TypeVar("Choice", bound=StrEnum)

ROW_TOKENS, ROWS = 512, 32


def compress(
    model: str,
    keep: float,
    out: Path,
    method: str = "fisher",
    ranks: str | None = None,
    rows: int = ROWS,
) -> None:
    """Factorize a model and write the factorized checkpoint to ``out``.

    Calibration uses one part of Python's documentation, and perplexity is measured on another.

    Args:
        model: name or path of a checkpoint.
        keep: fraction of the parameters of the linear layers to keep.
        out: folder to write; it must not exist.
        method: value of `runtime.compress.Method`.
        ranks: value of `runtime.compress.Allocation`; None selects the method's default.
        rows: number of calibration rows of `ROW_TOKENS` tokens; perplexity is measured on half as
            many rows.

    Raises:
        SettingsError: if the method or the allocation is unknown, or if ``out`` exists.
        CompressionError, CheckpointError: if the model cannot be read, factorized or written.
    """
    chosen_method = parse_choice(Method, method)
    allocation = parse_choice(Allocation, ranks) if ranks else None
    refuse_existing(out)
    source = resolve_model(model)
    tokenizer = load_tokenizer(source)
    calibration, held_out = (
        factorization.cut_rows(tokenizer.encode(text), ROW_TOKENS, count)
        for text, count in zip(factorization.documentation(), (rows, rows // 2), strict=True)
    )
    with Progress(console=Console(stderr=True)) as progress:
        dense = load_checkpoint(source)
        factorized, report = factorization.compress(
            dense,
            calibration,
            keep,
            _progress_callback(progress, f"factorizing at keep {keep:g}"),
            method=chosen_method,
            allocation=allocation,
        )
        before, after = (
            factorization.perplexity(
                checkpoint, held_out, _progress_callback(progress, f"perplexity, {name}")
            )
            for name, checkpoint in (("dense", dense), ("factorized", factorized))
        )
    write_model(factorized, tokenizer, out)
    _print_report(report, held_out, before, after)


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
