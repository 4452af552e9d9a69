"""Summaries, sweeps and comparisons in the terminal."""

from typing import Any

from rich.console import Group
from rich.table import Table

from loadgen.figures import SHOWN
from loadgen.measures import MEASURES
from loadgen.statistics import PERCENTILES
from loadgen.summary import Summary


def summary_table(summary: Summary) -> Group:
    """What counts of a run: measures in ms, then rates and outcomes."""
    measures = Table("ms", "mean", *(f"p{which:g}" for which in PERCENTILES), "max", box=None)
    for column in measures.columns[1:]:
        column.justify = "right"
    for measure in MEASURES:
        found = summary.measures[measure.name]
        if found is not None:
            values = (found.mean, *found.percentiles, found.most)
            measures.add_row(measure.title, *(f"{1e3 * value:,.1f}" for value in values))
    rates, outcomes, came = Table.grid(padding=(0, 2)), summary.outcomes, summary.throughput
    window = summary.window
    rates.add_row("counted", f"{window.begin:g} s to {window.end:.1f} s")
    rates.add_row("requests", f"{came.offered:.2f} a second due, {came.requests:.2f} answered")
    rates.add_row("tokens", f"{came.output_tokens:,.1f} a second out, {came.input_tokens:,.1f} in")
    if summary.goodput is not None:
        good = summary.goodput
        rates.add_row("goodput", f"{good.requests:.2f} a second, {good.attainment:.1%} of all")
    in_flight = summary.in_flight
    rates.add_row("under way", f"{in_flight.mean:.1f} on average, {in_flight.most} at most")
    others = [(outcomes.succeeded, "answered"), (outcomes.cancelled, "left by their clients")]
    others += [(outcomes.unfinished, "unfinished")]
    others += [(count, str(failure)) for failure, count in outcomes.failed.items()]
    told = ", ".join(f"{count:,} {what}" for count, what in others if count)
    rates.add_row("outcomes", told or "no request was due")
    return Group(measures, "", rates)


def sweep_table(sweep: dict[str, Any]) -> Group:
    """A line for each rate: means of its runs, and where the true ones are."""
    shown = ("throughput", "ttft:p50", "ttft:p99", "itl:p50", "e2e:p50", "attainment")
    table = Table("rate", *(_title(name) for name in shown), "", box=None)
    for column in table.columns[:-1]:
        column.justify = "right"
    knee = sweep["knee"]
    for point in sweep["points"]:
        told = "saturated" if point["saturated"] else ""
        if knee is not None and point["rate"] == knee["rate"]:
            told = "knee"
        figures = (point["figures"][name] for name in shown)
        table.add_row(f"{point['rate']:g}", *map(_interval, shown, figures), told)
    why = "no rate is the knee" if knee is None else f"knee at {knee['rate']:g}: {knee['why']}"
    return Group(table, why)


def comparison_table(comparison: dict[str, Any]) -> Table:
    """A line for each figure; a ratio whose interval is on one side of 1 is marked."""
    a, b = comparison["a"]["name"], comparison["b"]["name"]
    table = Table("rate", "", a, b, f"{b} / {a}", "", box=None)
    for row in comparison["rows"]:
        ratio, name = row["ratio"], row["figure"]
        rate = "" if row["rate"] is None else f"{row['rate']:g}"
        table.add_row(
            rate, _title(name), _interval(name, row["a"]), _interval(name, row["b"]),
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


_FIGURES = {str(figure): figure for figure in SHOWN}
