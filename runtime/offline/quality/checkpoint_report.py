"""Tables of `runtime.offline.quality.checkpoints`."""

from collections.abc import Sequence

from rich.table import Table

from runtime.offline.quality.checkpoints import CheckpointResult
from runtime.offline.quality.report import FIDELITY, fidelity_cells


def checkpoint_tables(results: Sequence[CheckpointResult]) -> list[Table]:
    """Return the tables: teacher-forced, outputs against the dense model, and runtimes."""
    shown = [_teacher_forced(results)]
    if any(one.outputs for one in results):
        shown.append(_outputs(results))
    if any(one.runtimes for one in results):
        shown.append(_runtimes(results))
    return shown


def _teacher_forced(results: Sequence[CheckpointResult]) -> Table:
    inputs = results[0].inputs
    table = Table(
        title=f"checkpoints against {inputs.model}: {inputs.texts} x {inputs.tokens} tokens of "
        f"{inputs.text}, exact bf16 KV"
    )
    table.add_column("checkpoint")
    table.add_column("method")
    for name in ("keep", "MB", "perplexity", "change", "interval", "KL mean", "KL p99", "top-1"):
        table.add_column(name, justify="right")
    for one in results:
        quality = one.quality
        cells = [""] * 5
        if quality:
            cells = [
                f"{quality.perplexity_change:+.2%}",
                f"{quality.change_low:+.2%} to {quality.change_high:+.2%}",
                f"{quality.kl_mean:.2e}",
                f"{quality.kl_p99:.2e}",
                f"{quality.top1:.2%}",
            ]
        size = f"{one.nbytes / 1e6:,.0f}"
        table.add_row(
            one.name, one.method, f"{one.keep:.2f}", size, f"{one.perplexity:.4f}", *cells
        )
    return table


def _outputs(results: Sequence[CheckpointResult]) -> Table:
    table = Table(title=f"greedy outputs in fp32 against those of {results[0].name}")
    table.add_column("checkpoint")
    table.add_column("keep", justify="right")
    for name in FIDELITY:
        table.add_column(name, justify="right")
    for one in results:
        if one.outputs:
            table.add_row(one.name, f"{one.keep:.2f}", *fidelity_cells(one.outputs))
    return table


def _runtimes(results: Sequence[CheckpointResult]) -> Table:
    table = Table(title="greedy outputs against the same checkpoint in fp32")
    table.add_column("checkpoint")
    table.add_column("runtime")
    for name in FIDELITY:
        table.add_column(name, justify="right")
    for one in results:
        for runtime, outputs in one.runtimes.items():
            table.add_row(one.name, runtime, *fidelity_cells(outputs))
    return table
