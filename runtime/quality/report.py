"""Results as tables and as JSON files."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from runtime.errors import QualityError
from runtime.quality.measure import Environment, Inputs, Result
from runtime.quality.metrics import Bootstrap, Summary

SCHEMA = 1
"""Number of the JSON layout."""
_PARTS: dict[str, Callable[..., object]] = {
    "inputs": Inputs,
    "bootstrap": Bootstrap,
    "environment": Environment,
    "quality": Summary,
    "noise": Summary,
}


def save(result: Result, path: Path) -> None:
    """Write a result as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    content = {"schema": SCHEMA, **asdict(result)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Result:
    """Read a result written by `save`.

    Raises:
        QualityError: the file cannot be read, or is not a result of this version.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        for name, kind in _PARTS.items():
            content[name] = kind(**content[name])
        return Result(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise QualityError(f"{path} is not a quality result: {error}") from error


def result_table(result: Result) -> Table:
    """Return the table of one result, the noise floor beside it."""
    inputs = result.inputs
    table = Table(
        title=f"{result.spec} on {inputs.model}: {inputs.texts} x {inputs.tokens} tokens of "
        f"{inputs.text}, {_window(result)}",
        caption=f"{_size(result)}; {result.stored_positions} of {result.quality.positions} "
        f"positions attend stored pages; {result.seconds:.0f} s",
    )
    table.add_column("against exact bf16 KV")
    table.add_column(result.name, justify="right")
    table.add_column("noise floor", justify="right")
    level = f"{result.bootstrap.level:.0%} interval"
    both = result.quality, result.noise
    table.add_row("KL mean, nats", *(f"{one.kl_mean:.2e}" for one in both))
    table.add_row("KL p99, nats", *(f"{one.kl_p99:.2e}" for one in both))
    table.add_row("top-1 agreement", *(f"{one.top1:.2%}" for one in both))
    table.add_row(
        f"perplexity (exact {result.dense_perplexity:.4f})",
        *(f"{one.perplexity:.4f}" for one in both),
    )
    table.add_row("perplexity change", *(f"{one.perplexity_change:+.3%}" for one in both))
    table.add_row(f"  {level}", *(_interval(one) for one in both))
    return table


def comparison_table(results: Sequence[Result]) -> Table:
    """Return a table of several results in order of their size, largest first.

    Raises:
        QualityError: the results are of different models or texts.
    """
    first = results[0]
    for other in results[1:]:
        found, expected = asdict(other.inputs), asdict(first.inputs)
        # The same model may have been given by another name.
        different = [name for name in expected if name != "model" and found[name] != expected[name]]
        if different:
            raise QualityError(
                f"results of {first.spec} and {other.spec} cannot be compared: they differ in "
                f"{', '.join(different)}"
            )
    inputs = first.inputs
    noise = max(one.noise.kl_mean for one in results)
    table = Table(
        title=f"{inputs.model}: {inputs.texts} x {inputs.tokens} tokens of {inputs.text}",
        caption=f"exact KV: {first.dense_bytes_per_token:,.0f} bytes/token, perplexity "
        f"{first.dense_perplexity:.4f}; noise floor: KL {noise:.1e}",
    )
    table.add_column("format")
    table.add_column("exact tokens")
    for name in ("bytes/token", "ratio", "perplexity", "interval", "KL mean", "KL p99", "top-1"):
        table.add_column(name, justify="right")
    for one in sorted(results, key=lambda result: (-result.bytes_per_token, not result.window)):
        quality = one.quality
        table.add_row(
            one.name if one.name == one.spec else f"{one.name} ({one.spec.rpartition(':')[2]})",
            _window(one),
            f"{one.bytes_per_token:,.0f}",
            f"{one.dense_bytes_per_token / one.bytes_per_token:.2f}x",
            f"{quality.perplexity_change:+.3%}",
            _interval(quality),
            f"{quality.kl_mean:.2e}",
            f"{quality.kl_p99:.2e}",
            f"{quality.top1:.2%}",
        )
    return table


def _window(result: Result) -> str:
    return "sinks and window" if result.window else "no window"


def _size(result: Result) -> str:
    ratio = result.dense_bytes_per_token / result.bytes_per_token
    return f"{result.bytes_per_token:,.0f} bytes per stored token ({ratio:.2f}x less than bf16)"


def _interval(summary: Summary) -> str:
    return f"{summary.change_low:+.3%} to {summary.change_high:+.3%}"
