"""Terminal tables of summaries, sweeps and comparisons."""

from typing import Any

from rich.console import Group
from rich.table import Table

from loadgen.axis import axis_of
from loadgen.figures import REPORTED
from loadgen.measures import MEASURES
from loadgen.statistics import PERCENTILES
from loadgen.summary import Summary


def summary_table(summary: Summary) -> Group:
    """Return a table of measures in ms, then rates and outcomes."""
    measures = Table("ms", "mean", *(f"p{which:g}" for which in PERCENTILES), "max", box=None)
    for column in measures.columns[1:]:
        column.justify = "right"
    for measure in MEASURES:
        found = summary.measures[measure.name]
        if found is not None:
            values = (found.mean, *found.percentiles, found.maximum)
            measures.add_row(measure.title, *(f"{1e3 * value:,.1f}" for value in values))
    rates, outcomes, throughput = Table.grid(padding=(0, 2)), summary.outcomes, summary.throughput
    window = summary.window
    rates.add_row("measured", f"{window.begin:g} s to {window.end:.1f} s")
    if summary.concurrency is not None:
        rates.add_row("load", f"closed loop of {summary.concurrency:,}")
    sent = "offered" if summary.concurrency is None else "sent"
    offered, answered = throughput.offered, throughput.requests
    rates.add_row("requests", f"{offered:.2f} per second {sent}, {answered:.2f} answered")
    output, prompt = throughput.output_tokens, throughput.input_tokens
    rates.add_row("tokens", f"{output:,.1f} per second of output, {prompt:,.1f} of prompts")
    if summary.goodput is not None:
        good = summary.goodput
        rates.add_row(
            "goodput", f"{good.requests:.2f} per second, attainment {good.attainment:.1%}"
        )
    in_flight = summary.in_flight
    rates.add_row("in flight", f"mean {in_flight.mean:.1f}, maximum {in_flight.most}")
    others = [(outcomes.succeeded, "answered"), (outcomes.cancelled, "cancelled")]
    others += [(outcomes.unfinished, "unfinished")]
    others += [(count, str(failure)) for failure, count in outcomes.failed.items()]
    counts = ", ".join(f"{count:,} {what}" for count, what in others if count)
    rates.add_row("outcomes", counts or "no request was due")
    return Group(measures, "", rates)


def sweep_table(sweep: dict[str, Any]) -> Group:
    """Return a table with one row per rate or concurrency: means over runs, with intervals."""
    axis = axis_of(sweep["points"])
    shown = ("throughput", "ttft:p50", "ttft:p99", "itl:p50", "e2e:p50", "attainment")
    table = Table(axis.name, *(_title(name) for name in shown), "", box=None)
    for column in table.columns[:-1]:
        column.justify = "right"
    knee = sweep["knee"]
    for point in sweep["points"]:
        remark = "saturated" if point["saturated"] else ""
        if knee is not None and point[axis.name] == knee[axis.name]:
            remark = "knee"
        figures = (point["figures"][name] for name in shown)
        table.add_row(f"{point[axis.name]:g}", *map(_interval, shown, figures), remark)
    why = "no knee found" if knee is None else f"knee at {knee[axis.name]:g}: {knee['why']}"
    return Group(table, why)


def comparison_table(comparison: dict[str, Any]) -> Table:
    """Return a table with one row per rate or concurrency, and metric.

    Significant ratios are marked.
    """
    axis = axis_of(comparison["rows"])
    a, b = comparison["a"]["name"], comparison["b"]["name"]
    table = Table(axis.name, "", a, b, f"{b} / {a}", "", box=None)
    for row in comparison["rows"]:
        ratio, name = row["ratio"], row["figure"]
        load = "" if row[axis.name] is None else f"{row[axis.name]:g}"
        table.add_row(
            load, _title(name), _interval(name, row["a"]), _interval(name, row["b"]),
            "" if ratio is None else _bounds(ratio, 1, "x"), _better(row),
        )  # fmt: skip
    return table


def _better(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    if ratio is None or ratio["low"] is None or ratio["low"] <= 1 <= ratio["high"]:
        return ""
    return "better" if (ratio["mean"] < 1) == (row["better"] == "less") else "worse"


def _title(name: str) -> str:
    figure = _FIGURES[name]
    unit = "ms" if figure.unit == "s" else figure.unit
    return f"{name}, {unit}" if unit else name


def _interval(name: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return _bounds(found, 1e3 if _FIGURES[name].unit == "s" else 1, "")


def _bounds(found: dict[str, Any], scale: float, unit: str) -> str:
    mean = f"{scale * found['mean']:,.4g}{unit}"
    if found["low"] is None:
        return mean
    return f"{mean} ({scale * found['low']:,.4g} to {scale * found['high']:,.4g})"


_FIGURES = {str(figure): figure for figure in REPORTED}
