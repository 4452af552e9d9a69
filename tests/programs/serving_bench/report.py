"""The comparing report, as one HTML page and as tables in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from loadgen.figures import Figure, figure_format
from loadgen.report import Section, Table, document_page
from loadgen.report.plot import Plot
from loadgen.report.rates import Line, Point, rate_plot
from tests.programs.serving_bench.tables import errors, tables

_COLOURS = ("blue", "orange", "green", "purple", "ochre", "slate", "red")
_MAX_ERROR = 300
_PLOTTED = ("ttft:p50", "ttft:p99", "itl:p99", "tpot:p50", "tpot:p99", "throughput", "attainment")


def page(document: Mapping[str, Any]) -> str:
    """Return the HTML report of a results document."""
    sections = [
        Section(title, plots=plots(document) if title == "Poisson load" else (), table=table)
        for title, table in tables(document).items()
    ]
    sections.append(Section("Systems", table=_systems(document)))
    manifest = document["manifest"]
    environments = {"Environment": manifest}
    for system in document["systems"]:
        if "manifest" in system:
            environments[f"Environment of {system['name']}"] = system["manifest"]
    gpus = manifest["gpus"]
    subtitle = f"{len(gpus)} × {gpus[0]}" if gpus else "on the CPU"
    state = ", interrupted" if document["stopped"] else ""
    subtitle = f"{manifest['started']}, {subtitle}, {manifest['commit'] or 'no commit'}{state}"
    return document_page("Serving benchmark", subtitle, sections, environments)


def print_tables(document: Mapping[str, Any], console: Console) -> None:
    """Print the tables of a results document."""
    for title, table in tables(document).items():
        console.rule(title, align="left")
        for group, rows in table.groups.items():
            shown = RichTable(box=None, title=group, title_justify="left", pad_edge=False)
            for name, unit in table.columns:
                heading = f"{name}\n[dim]{unit}[/]" if unit else name
                left = name in ("system", "remarks")
                shown.add_column(heading, justify="left" if left else "right", no_wrap=not left)
            for row in rows:
                shown.add_row(*map(escape, row))
            console.print(shown)
    for system in document["systems"]:
        for error in errors(system):
            shown_error = escape(f"{system['name']}: {error[-_MAX_ERROR:]}")
            console.print(f"[red]failed[/]: {shown_error}", highlight=False)


def _systems(document: Mapping[str, Any]) -> Table:
    rows = [
        [
            system["name"],
            f"{system['ready_s']:.1f}" if "ready_s" in system else "–",
            " ".join(system.get("flags", ()) or system.get("urls", ())),
            ", ".join(f"{name}={value}" for name, value in system.get("settings", {}).items()),
            "; ".join(error[-_MAX_ERROR:] for error in errors(system)),
        ]
        for system in document["systems"]
    ]
    columns = [("system", ""), ("ready after", "s"), ("flags or URLs", "")]
    return Table([*columns, ("settings", ""), ("error", "")], {"in order of measurement": rows})


def plots(document: Mapping[str, Any]) -> list[Plot]:
    """Return plots against the offered rate, one for each figure and answer length."""
    answers = {
        row["answer"]
        for system in document["systems"]
        for row in system["cases"].get("load", ())
        if "answer" in row
    }
    found = [_plot(document, figure, answer) for answer in sorted(answers) for figure in _PLOTTED]
    return [plot for plot in found if plot is not None]


def _plot(document: Mapping[str, Any], name: str, answer: int) -> Plot | None:
    measure, _, statistic = name.partition(":")
    figure = Figure(measure, statistic or None)
    form = figure_format(name)
    lines = []
    for number, system in enumerate(document["systems"]):
        values: dict[float, list[float]] = {}
        for row in system["cases"].get("load", ()):
            if row.get("answer") == answer:
                value = figure.measured_value(row["summary"])
                if value is not None:
                    values.setdefault(row["rate"], []).append(form.scaled(value))
        points = [Point(rate, sum(some) / len(some)) for rate, some in sorted(values.items())]
        colour = _COLOURS[number % len(_COLOURS)]
        lines.append(Line(system["name"], colour, points, dashed=number >= len(_COLOURS)))
    unique = f"{measure}-{statistic}-{answer}"
    title = f"{form.title}, answers of {answer} tokens"
    label = {"%": "share of requests, %"}.get(form.unit, form.unit)
    return rate_plot(unique, title, label, lines, percent=form.unit == "%", log=form.unit == "ms")
