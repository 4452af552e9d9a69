"""`headrace compress`: a factorized checkpoint, and what it costs in perplexity."""

import os
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from runtime import compress as factorization
from runtime.checkpoint import load_checkpoint, write_checkpoint
from services.common.model_source import resolve_model
from services.common.tokenizer import load_tokenizer

ROW_TOKENS, CALIBRATION_ROWS, HELD_OUT_ROWS = 512, 32, 16


def compress(model: str, keep: float, out: Path) -> None:
    """Factorizes ``model`` to ``keep`` of its projections' parameters and writes it to ``out``.

    Calibrates on one part of Python's documentation and reports perplexity on another.

    Raises:
        CompressionError, CheckpointError: it cannot be made, read or written.
    """
    source = resolve_model(model)
    tokenizer = load_tokenizer(source)
    calibration, held_out = (
        factorization.cut_rows(tokenizer.encode(text), ROW_TOKENS, rows)
        for text, rows in zip(
            factorization.documentation(), (CALIBRATION_ROWS, HELD_OUT_ROWS), strict=True
        )
    )
    with Progress(console=Console(stderr=True)) as progress:
        dense = load_checkpoint(source)
        factorized, report = factorization.compress(
            dense, calibration, keep, _shown_by(progress, f"factorizing at keep {keep:g}")
        )
        before, after = (
            factorization.perplexity(
                checkpoint, held_out, _shown_by(progress, f"perplexity, {name}")
            )
            for name, checkpoint in (("dense", dense), ("factorized", factorized))
        )
    draft = out.with_name(f"{out.name}.draft-{os.getpid()}")
    write_checkpoint(factorized, draft)
    tokenizer.save(draft)
    draft.rename(out)
    _show(report, held_out, before, after)


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
