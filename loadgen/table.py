"""Terminal tables of summaries, sweeps and comparisons.

They fit 80 columns. Margins of error are shown if the terminal is wide enough for them.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.axis import Axis, axis_of
from loadgen.compare import verdict_of
from loadgen.figures import figure_format
from loadgen.knee import knee_statement, saturation
from loadgen.measures import E2E_SENT, MEASURES, TTFT_SENT, Cached, Turn, failures_in_words
from loadgen.number import exact, ms, percent, plain
from loadgen.statistics import PERCENTILES
from loadgen.summary import Summary
from loadgen.validity import invalid_points

_LISTED = [measure for measure in MEASURES if measure not in (TTFT_SENT, E2E_SENT)]
"""Measures of the summary. Those left out differ from these only by the dispatch lag."""
_SWEPT = ("throughput", "ttft:p50", "ttft:p99", "itl:p50", "e2e:p50", "attainment")
_MAX_NAME = 9
_ANY_WIDTH = 1000
_GOOD, _BAD, _CAUTION = "green", "red", "yellow"
_COLOURS = {"better": _GOOD, "worse": _BAD}


def summary_table(summary: Summary) -> Group:
    """Return a table of measures in ms, then rates and outcomes."""
    measures = _table("ms", "mean", *(f"p{which:g}" for which in PERCENTILES), "max", narrow=True)
    for measure in _LISTED:
        found = summary.measures[measure.name]
        if found is not None:
            values = (found.mean, *found.percentiles, found.maximum)
            measures.add_row(measure.title, *map(ms, values))
    rates = Table.grid(padding=(0, 2))
    throughput = summary.throughput
    window = summary.window
    rates.add_row("measured", f"{plain(window.begin)} s to {plain(window.end)} s")
    if summary.concurrency is not None:
        chats = " chats" if summary.turns else ""
        rates.add_row("load", f"closed loop of {summary.concurrency:,}{chats}")
    sent = "offered" if summary.concurrency is None else "sent"
    offered, answered = plain(throughput.offered), plain(throughput.requests)
    rates.add_row("requests", f"{offered} per second {sent}, {answered} per second answered")
    output, prompt = plain(throughput.output_tokens), plain(throughput.input_tokens)
    rates.add_row("tokens", f"{output} per second of output, {prompt} per second of prompts")
    if summary.goodput is not None:
        good = summary.goodput
        attainment = f"attainment {percent(good.attainment)} %"
        rates.add_row("goodput", f"{plain(good.requests)} per second, {attainment}")
    in_flight = summary.in_flight
    rates.add_row("in flight", f"mean {plain(in_flight.mean)}, maximum {in_flight.most:,}")
    growth = in_flight.growth if summary.concurrency is None else 0.0
    if saturated := saturation(summary.arrivals, growth):
        rates.add_row("saturated", Text(saturated, _CAUTION))
    rates.add_row("prefix cache", cached_words(summary.cached))
    rates.add_row("outcomes", _outcomes(summary))
    if not summary.turns:
        return Group(measures, "", rates)
    return Group(measures, "", rates, "", _turns(summary.turns))


def sweep_table(sweep: Mapping[str, Any], width: int) -> Group:
    """Return a table with one row per rate or concurrency: means over runs, and margins of error.

    Args:
        width: columns of the terminal.
    """
    axis = axis_of(sweep["points"])
    table, margins = _fitting(lambda margins: _sweep_rows(sweep, axis, margins), width)
    lines: list[RenderableType] = [table, "", Text(": ".join(knee_statement(sweep, axis)))]
    if not margins:
        lines.append("Means over runs; their confidence intervals are in the report.")
    lines += [
        Text(f"At {axis.of(point[axis.name])}: {failures_in_words(point['failed'])}.", _BAD)
        for point in sweep["points"]
        if point.get("failed")
    ]
    if invalid := invalid_points(sweep["points"], axis):
        heading = "Invalid, and not considered for the knee:"
        lines += [Text(line, _BAD) for line in (heading, *invalid)]
    return Group(*lines)


def comparison_table(comparison: Mapping[str, Any], width: int) -> Group:
    """Return a table with one row per metric, grouped by rate or concurrency.

    Args:
        width: columns of the terminal.
    """
    a, b = comparison["a"]["name"], comparison["b"]["name"]
    table, _ = _fitting(lambda margins: _comparison_rows(comparison, margins), width)
    invalid = [Text(text, _BAD) for text in comparison.get("invalid") or ()]
    return Group(Text(f"Ratios are {b} / {a}."), "", table, *invalid)


def _table(first: str, *columns: str, narrow: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=narrow)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(Text(column, overflow="ellipsis"), justify="right", no_wrap=True)
    return table


def _fitting(build: Callable[[bool], Table], width: int) -> tuple[Table, bool]:
    """Return the table with margins of error if it fits, else without, and whether it has them."""
    table = build(True)
    if Console(width=_ANY_WIDTH).measure(table).maximum <= width:
        return table, True
    return build(False), False


def cached_words(cached: Cached | None) -> str:
    """Return how many prompt tokens the target found in its prefix cache."""
    if cached is None:
        return "cached prompt tokens are not reported by the target"
    share, mean = percent(cached.fraction), percent(cached.mean_fraction)
    return f"{share} % of prompt tokens cached, mean per request {mean} %"


def _turns(turns: Sequence[Turn]) -> Table:
    """Return a table with the time to first token and the cached tokens of each turn."""
    table = _table(
        "turn", "requests", "first token, p50", "p99, ms", "prompt tokens", "cached, %", narrow=True
    )
    for turn in turns:
        ttft, cached = turn.ttft, turn.cached
        table.add_row(
            exact(turn.turn), exact(turn.sent),
            *(ms(None if ttft is None else ttft.percentile(which)) for which in (50.0, 99.0)),
            plain(turn.input_tokens), percent(None if cached is None else cached.fraction),
        )  # fmt: skip
    return table


def _outcomes(summary: Summary) -> Text:
    outcomes = summary.outcomes
    parts = [
        (outcomes.succeeded, "answered", ""),
        (outcomes.cancelled, "cancelled", ""),
        (outcomes.unfinished, "unfinished", _CAUTION),
        *((count, failure.words, _BAD) for failure, count in outcomes.failed.items()),
    ]
    shown = [Text(f"{count:,} {what}", colour) for count, what, colour in parts if count]
    return Text(", ").join(shown) if shown else Text("no request was due", _CAUTION)


def _sweep_rows(sweep: Mapping[str, Any], axis: Axis, margins: bool) -> Table:
    formats = [figure_format(name) for name in _SWEPT]
    titles = [f"{name}\n{form.unit}" for name, form in zip(_SWEPT, formats, strict=True)]
    table = _table(axis.name, *titles)
    table.add_column("", no_wrap=True)
    at = sweep["knee"] and sweep["knee"][axis.name]
    for point in sweep["points"]:
        cells = [
            " ".join(form.interval(point["figures"].get(name))[: 1 + margins]).rstrip()
            for name, form in zip(_SWEPT, formats, strict=True)
        ]
        load = point[axis.name]
        table.add_row(exact(load), *cells, _remark(point, is_knee=load == at))
    return table


def _remark(point: Mapping[str, Any], *, is_knee: bool) -> Text:
    if point["invalid"]:
        return Text("invalid", _BAD)
    if is_knee:
        return Text("knee", _GOOD)
    return Text("saturated", _CAUTION) if point["saturated"] else Text()


def _comparison_rows(comparison: Mapping[str, Any], margins: bool) -> Table:
    axis = axis_of(comparison["rows"])
    names = [comparison[side]["name"] for side in "ab"]
    table = _table("", *names, "ratio", narrow=True)
    for column in table.columns[1:3]:
        column.max_width = None if margins else _MAX_NAME
    table.add_column("", no_wrap=True)
    for load, rows in groupby(comparison["rows"], key=lambda row: row[axis.name]):
        if load is not None:
            table.add_row(Text(axis.of(load), "bold"))
        for row in rows:
            form = figure_format(row["figure"], row["title"], row["unit"])
            sides = (" ".join(form.interval(row[side])[: 1 + margins]).rstrip() for side in "ab")
            verdict = verdict_of(row["ratio"], row["better"])
            table.add_row(
                Text(f"{row['figure']}, {form.unit}" if form.unit else row["figure"]),
                *sides, _ratio(row["ratio"]),
                Text(verdict, _COLOURS[verdict]) if verdict in _COLOURS else "",
            )  # fmt: skip
    return table


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return ""
    mean = f"{ratio['mean']:#.3g}"
    if ratio["low"] is None:
        return mean
    return f"{mean} ({ratio['low']:#.3g} to {ratio['high']:#.3g})"
