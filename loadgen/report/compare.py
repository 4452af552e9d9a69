"""Report of a comparison of two runs or two sweeps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from loadgen.axis import Axis, axis_of
from loadgen.compare import verdict_of
from loadgen.figures import FigureFormat, figure_format
from loadgen.number import exact, plain
from loadgen.report.environment import lines, subtitle
from loadgen.report.page import render
from loadgen.report.plot import Plot
from loadgen.report.rates import Line, Point, rate_plot
from loadgen.report.tile import Tile

_MAX_LOG_RATIO = math.log(8)
"""Limit of the drawing: ratios above 8 or below 1/8 are drawn at its edge."""


@dataclass(frozen=True)
class Ratio:
    """Ratio b / a with its confidence interval, formatted.

    Attributes:
        text: the ratio.
        interval: confidence interval; "" without one.
        marks: horizontal positions of the interval's low end, mean and high end in the drawing, in
            %; a ratio of 1 is at 50.
        verdict: result of `verdict_of`.
    """

    text: str
    interval: str
    marks: tuple[float, float, float]
    verdict: str


@dataclass(frozen=True)
class Row:
    """Values of one metric for both sides at one rate or concurrency."""

    load: str
    a: str
    b: str
    ratio: Ratio | None


@dataclass(frozen=True)
class Group:
    """Rows of one metric."""

    figure: FigureFormat
    rows: Sequence[Row]


def compare_page(comparison: dict[str, Any]) -> str:
    """Return the HTML report of a comparison document.

    Args:
        comparison: {"a": {"name", "manifest"}, "b": {"name", "manifest"}, "rows": [{"rate" or
            "concurrency", "figure", "title", "unit", "better", "a", "b", "ratio"}]}. "a", "b" and
            "ratio" are confidence intervals in the format of `sweep_page`. "invalid" lists
            statements on invalid runs.
    """
    axis = axis_of(comparison["rows"])
    by_figure = {
        name: list(rows)
        for name, rows in groupby(
            sorted(comparison["rows"], key=_first_seen(comparison["rows"], axis)),
            key=lambda row: str(row["figure"]),
        )
    }
    ratios = [row["ratio"] for row in comparison["rows"] if row["ratio"] is not None]
    span = _span(ratios)
    groups = [
        Group(_format(rows[0]), [_row(row, axis, span) for row in rows])
        for rows in by_figure.values()
    ]
    a, b = comparison["a"], comparison["b"]
    names = (str(a["name"]), str(b["name"]))
    return render(
        "compare.html.j2",
        a=a,
        b=b,
        subtitles=[subtitle(one["manifest"]) for one in (a, b)],
        manifests=[lines(one["manifest"]) for one in (a, b)],
        invalid=comparison.get("invalid") or (),
        tiles=_tiles(groups),
        plots=[
            plot for rows in by_figure.values() if (plot := _plot(rows, axis, names)) is not None
        ],
        groups=groups,
        axis=axis,
        has_loads=any(row[axis.name] is not None for row in comparison["rows"]),
        edge=plain(math.exp(span)),
        level=next((float(one["level"]) for one in ratios if one["low"] is not None), None),
    )


def _first_seen(rows: Sequence[dict[str, Any]], axis: Axis) -> Any:
    order: dict[str, int] = {}
    for row in rows:
        order.setdefault(row["figure"], len(order))
    return lambda row: (order[row["figure"]], row[axis.name] or 0.0)


def _format(row: dict[str, Any]) -> FigureFormat:
    return figure_format(row["figure"], row["title"], row["unit"])


def _span(ratios: Sequence[dict[str, Any]]) -> float:
    """Return the largest distance of a ratio from 1, as the absolute value of its logarithm.

    The result is between log 1.25 and `_MAX_LOG_RATIO`.
    """
    ends = [one[end] for one in ratios for end in ("low", "mean", "high")]
    distances = [abs(math.log(one)) for one in ends if one is not None and one > 0]
    return min(max([math.log(1.25), *distances]), _MAX_LOG_RATIO)


def _row(row: dict[str, Any], axis: Axis, span: float) -> Row:
    figure = _format(row)
    ratio = row["ratio"]
    return Row(
        load="" if row[axis.name] is None else exact(float(row[axis.name])),
        a=" ".join(figure.interval(row["a"])).rstrip(),
        b=" ".join(figure.interval(row["b"])).rstrip(),
        ratio=None if ratio is None else _ratio(ratio, row["better"], span),
    )


def _ratio(ratio: dict[str, Any], better: str, span: float) -> Ratio:
    mean, low, high = (ratio[name] for name in ("mean", "low", "high"))
    verdict = verdict_of(ratio, better)
    if low is None or high is None:
        return Ratio(f"{mean:#.3g}", "", (_mark(mean, span),) * 3, verdict)
    marks = (_mark(low, span), _mark(mean, span), _mark(high, span))
    return Ratio(f"{mean:#.3g}", f"{low:#.3g} to {high:#.3g}", marks, verdict)


def _mark(ratio: float, span: float) -> float:
    at = math.log(ratio) if ratio > 0 else -span
    return round(50 + 46 * max(-1.0, min(1.0, at / span)), 2)


def _tiles(groups: Sequence[Group]) -> list[Tile]:
    verdicts = [row.ratio.verdict for group in groups for row in group.rows if row.ratio]
    labels = (("better", "Better"), ("worse", "Worse"), ("not significant", "Not significant"))
    tiles = [Tile(label, f"{verdicts.count(verdict):,}") for verdict, label in labels]
    if one_run := verdicts.count("one run"):
        tiles.append(Tile("Single runs", f"{one_run:,}"))
    return tiles


def _plot(rows: Sequence[dict[str, Any]], axis: Axis, names: tuple[str, str]) -> Plot | None:
    """Return a plot of one metric, or None for fewer than two rates or concurrencies."""
    if len({row[axis.name] for row in rows if row[axis.name] is not None}) < 2:
        return None
    figure = _format(rows[0])
    lines = [
        Line(name, colour, _points(rows, axis, side, figure), dashed)
        for side, name, colour, dashed in (
            ("a", names[0], "blue", False),
            ("b", names[1], "orange", True),
        )
    ]
    name = "".join(letter if letter.isalnum() else "-" for letter in rows[0]["figure"])
    label = {"%": "share of requests, %", "": "requests"}.get(figure.unit, figure.unit)
    whole, log = rows[0]["figure"] == "attainment", figure.unit in ("ms", "")
    return rate_plot(name, figure.title, label, lines, percent=whole, log=log, axis=axis)


def _points(
    rows: Sequence[dict[str, Any]], axis: Axis, side: str, figure: FigureFormat
) -> list[Point]:
    return [
        Point.of(float(row[axis.name]), row[side], figure)
        for row in rows
        if row[axis.name] is not None and row[side] is not None
    ]
