"""`headrace compress`: a factorized checkpoint, and what it costs in perplexity."""

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
from services.offline.model_folder import refuse_existing, write_model

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
    """Factorizes ``model`` to ``keep`` of its projections' parameters and writes it to ``out``.

    Calibrates on one part of Python's documentation and reports perplexity on another.

    Args:
        method: one of `runtime.compress.Method`.
        ranks: one of `runtime.compress.Allocation`; None is the method's own.
        rows: of `ROW_TOKENS` tokens, to calibrate on; perplexity is that of half as many.

    Raises:
        SettingsError: there is no such method, no such allocation, or something at ``out``.
        CompressionError, CheckpointError: it cannot be made, read or written.
    """
    way = named(Method, method)
    allocation = named(Allocation, ranks) if ranks else None
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
            _shown_by(progress, f"factorizing at keep {keep:g}"),
            method=way,
            allocation=allocation,
        )
        before, after = (
            factorization.perplexity(
                checkpoint, held_out, _shown_by(progress, f"perplexity, {name}")
            )
            for name, checkpoint in (("dense", dense), ("factorized", factorized))
        )
    write_model(factorized, tokenizer, out)
    _show(report, held_out, before, after)


def named(kind: type[Choice], name: str) -> Choice:
    """The value of this name. Raises SettingsError if there is none."""
    try:
        return kind(name)
    except ValueError:
        raise SettingsError(f"{name!r} is none of {', '.join(kind)}") from None


def _shown_by(progress: Progress, name: str) -> "factorization.Progress":
    task = progress.add_task(name, total=1.0)

    def tell(stage: str, fraction: float) -> None:
        progress.update(task, description=f"{name}: {stage}", completed=fraction)

    return tell


def _show(
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
    console.print(f"on {held_out.numel()} held-out tokens; made in {report.seconds:.0f} s")
