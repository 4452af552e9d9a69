"""Results as tables and as JSON files."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from runtime.errors import QualityError
from runtime.offline.quality.fidelity import Fidelity
from runtime.offline.quality.measure import Environment, Inputs, Result
from runtime.offline.quality.metrics import Bootstrap, Summary
from runtime.offline.quality.needles import DEPTHS, REQUIRED, NeedleScore

SCHEMA = 2
"""Number of the JSON layout."""
_PARTS: dict[str, Callable[..., object]] = {
    "inputs": Inputs,
    "bootstrap": Bootstrap,
    "environment": Environment,
    "quality": Summary,
    "noise": Summary,
    "outputs": Fidelity,
    "outputs_noise": Fidelity,
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
            content[name] = None if content[name] is None else kind(**content[name])
        content["needles"] = tuple(_needle(**one) for one in content["needles"])
        return Result(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise QualityError(f"{path} is not a quality result: {error}") from error


def _needle(*, exact: list[int], found: list[int] | None, **others: Any) -> NeedleScore:
    return NeedleScore(exact=tuple(exact), found=None if found is None else tuple(found), **others)


def markdown(table: Table) -> str:
    """Return a table in Markdown: its title, its rows and its caption."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    lines = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
    lines.insert(1, "|" + "---|" * len(columns))
    caption = [f"{table.caption}"] if table.caption else []
    return "\n".join([f"{table.title}", "", *lines, "", *caption])


def tables(results: Sequence[Result]) -> list[Table]:
    """Return all tables of one result, or of several results beside one another.

    Raises:
        QualityError: the results are of different models, texts, prompts or contexts.
    """
    shown = [result_table(results[0]) if len(results) == 1 else comparison_table(results)]
    if any(one.outputs for one in results):
        shown.append(outputs_table(results))
    if any(one.needles for one in results):
        shown.append(needle_table(results))
    return shown


def result_table(result: Result) -> Table:
    """Return the table of one result, with the noise floor in the next column."""
    inputs = result.inputs
    table = Table(
        title=f"{result.spec} on {inputs.model}: {inputs.texts} x {inputs.tokens} tokens of "
        f"{inputs.text}, {_window(result)}",
        caption=f"{_size(result)}; {result.stored_positions} of {result.quality.positions} "
        f"positions attend to stored pages; {result.seconds:.0f} s",
    )
    table.add_column("against exact bf16 KV")
    table.add_column(_name(result) if result.eviction else result.name, justify="right")
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
            _name(one),
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


def outputs_table(results: Sequence[Result]) -> Table:
    """Return a table of the greedy outputs of all results that have some.

    Raises:
        QualityError: the outputs are of different prompts.
    """
    pairs = [(one, one.outputs) for one in results if one.outputs]
    first = pairs[0][1]
    if len({(one.prompts_hash, one.max_tokens) for _, one in pairs}) > 1:
        raise QualityError("greedy outputs of different prompts or lengths cannot be compared")
    table = Table(
        title=f"{results[0].inputs.model}: fidelity of greedy outputs to those with exact bf16 KV, "
        f"{first.prompts} prompts, at most {first.max_tokens} tokens",
    )
    table.add_column("format")
    table.add_column("bytes/token", justify="right")
    for name in FIDELITY:
        table.add_column(name, justify="right")
    for one, outputs in sorted(pairs, key=lambda pair: -pair[0].bytes_per_token):
        table.add_row(_name(one), f"{one.bytes_per_token:,.0f}", *fidelity_cells(outputs))
    noise = next((one.outputs_noise for one, _ in pairs if one.outputs_noise), None)
    if noise:
        table.add_row("noise floor", "", *fidelity_cells(noise))
    return table


FIDELITY = ("equal", "first token", "mean token", "diverges at", "ROUGE-1", "edit similarity")


def fidelity_cells(outputs: Fidelity) -> list[str]:
    """Return the cells for the columns of `outputs_table`."""
    return [
        f"{round(outputs.exact * outputs.prompts)}/{outputs.prompts}",
        f"{outputs.first_token:.0%}",
        f"{outputs.mean_token:.1%}",
        f"{outputs.divergence:.1f}",
        f"{outputs.rouge1:.3f}",
        f"{outputs.edit_similarity:.3f}",
    ]


def needle_table(results: Sequence[Result]) -> Table:
    """Return a table of retrieval: answers found, and in brackets those at each depth.

    Raises:
        QualityError: the results are of different contexts.
    """
    some = [one for one in results if one.needles]
    asked = {(_asked(score), score.exact) for one in some for score in one.needles}
    if any(len(one.needles) != len(asked) for one in some):
        raise QualityError("retrieval from different contexts cannot be compared")
    table = Table(
        title=f"{results[0].inputs.model}: answers found, and those with facts at "
        f"{', '.join(f'{depth:.0%}' for depth in DEPTHS)} of the context",
        caption=_counted(some[0].needles),
    )
    for name in ("task", "tokens", "exact KV", *(_name(one) for one in some)):
        table.add_column(name, justify="left" if name == "task" else "right")
    for scores in zip(*(one.needles for one in some), strict=True):
        first = scores[0]
        exact = _found(first.exact, first.asked)
        if first.found is None:
            exact = f"{sum(first.exact)} found, too few"
            cells = ["not counted"] * len(some)
        else:
            cells = [_found(score.found or (), score.asked) for score in scores]
        table.add_row(first.task, f"{first.length:,}", exact, *cells)
    return table


def _counted(scores: Sequence[NeedleScore]) -> str:
    """Return a sentence about which tasks and lengths count, see `needles.REQUIRED`."""
    text = f"Tasks and lengths count if exact KV finds {REQUIRED:.0%} of the answers"
    counted = {score.task for score in scores if score.found is not None}
    never = {score.task: None for score in scores if score.task not in counted}
    return f"{text}; {', '.join(never)} counted at no length" if never else text


def _asked(score: NeedleScore) -> tuple[str, int, int, int]:
    return score.task, score.length, score.seed, score.asked


def _found(found: Sequence[int], asked: int) -> str:
    depths = " ".join(map(str, found))
    return f"{sum(found)}/{asked * len(found)} ({depths})"


def _name(result: Result) -> str:
    evicted = f", {result.eviction:.0%} evicted" if result.eviction else ""
    if result.name == result.spec:
        return f"{result.name}{evicted}"
    return f"{result.name} ({result.spec.rpartition(':')[2]}){evicted}"


def _window(result: Result) -> str:
    return "sinks and window" if result.window else "no window"


def _size(result: Result) -> str:
    ratio = result.dense_bytes_per_token / result.bytes_per_token
    return f"{result.bytes_per_token:,.0f} bytes per stored token ({ratio:.2f}x less than bf16)"


def _interval(summary: Summary) -> str:
    return f"{summary.change_low:+.3%} to {summary.change_high:+.3%}"
