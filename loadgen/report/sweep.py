"""Report of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.axis import RATE, Axis, axis_of
from loadgen.report.environment import lines, subtitle
from loadgen.report.figure import figure_format
from loadgen.report.number import plain
from loadgen.report.page import render
from loadgen.report.palette import OF_MEASURE
from loadgen.report.plot import Plot
from loadgen.report.rates import Line, Point, rate_plot
from loadgen.report.tile import Tile

_COLUMNS = (
    "ttft:p50", "ttft:p99", "itl:p50", "itl:p99", "tpot:p50", "e2e:p50", "e2e:p99",
    "e2e:mean", "normalized_latency:mean", "throughput", "goodput", "output_tokens", "attainment",
    "failures", "in_flight",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """Mean and margin of error, formatted; the margin is "" for a single run."""

    mean: str
    margin: str


@dataclass(frozen=True)
class Row:
    """Metrics and remarks of one rate or concurrency."""

    load: str
    runs: int
    cells: Sequence[Cell]
    is_knee: bool
    saturated: bool
    invalid: str | None


def sweep_page(sweep: dict[str, Any]) -> str:
    """Return the HTML report of a sweep document.

    Args:
        sweep: {"manifest", "points": [{"rate" or "concurrency", "seeds", "folders", "figures":
            {name: interval or None}, "saturated", "invalid"}], "knee": {"rate" or "concurrency",
            "why"} or None}. An interval is {"mean", "low", "high", "runs", "level"}, with times in
            seconds.
    """
    axis = axis_of(sweep["points"])
    points = sorted(sweep["points"], key=lambda point: float(point[axis.name]))
    names = [name for name in _COLUMNS if any(point["figures"].get(name) for point in points)]
    valid = [point for point in points if not point["invalid"]]
    knee = sweep["knee"]
    at = knee and float(knee[axis.name])
    return render(
        "sweep.html.j2",
        subtitle=subtitle(sweep["manifest"]),
        manifest=lines(sweep["manifest"]),
        axis=axis,
        knee=knee,
        level=_level(points),
        tiles=_tiles(valid, axis, at),
        plots=_plots(valid, axis, at),
        columns=[figure_format(name) for name in names],
        rows=[_row(point, axis, names, at) for point in points],
        left_out=len(points) - len(valid),
    )


def _plots(points: Sequence[dict[str, Any]], axis: Axis, knee: float | None) -> list[Plot]:
    latencies = [
        rate_plot(
            name, title, "ms", _percentiles(points, axis, name), knee=knee, log=True, axis=axis
        )
        for name, title in (
            ("ttft", "Time to first token"),
            ("itl", "Inter-token latency"),
            ("e2e", "End-to-end latency (JCT)"),
        )
    ]
    answered = [
        _line(points, axis, "throughput", "answered", "blue"),
        _line(points, axis, "goodput", "within objectives", "green", dashed=True),
    ]
    output = [_line(points, axis, "output_tokens", "output tokens", "slate")]
    shares = [
        _line(points, axis, "attainment", "within objectives", "green"),
        _line(points, axis, "failures", "failed", "red", dashed=True),
    ]
    rest = [
        rate_plot(
            "throughput", "Throughput", "requests per second", answered, knee=knee,
            ideal=axis is RATE, axis=axis,
        ),
        rate_plot("tokens", "Output", "tokens per second", output, knee=knee, axis=axis),
        rate_plot(
            "shares", "Attainment and failures", "share of requests, %", shares,
            knee=knee, percent=True, axis=axis,
        ),
    ]  # fmt: skip
    return [plot for plot in (*latencies, *rest) if plot is not None]


def _percentiles(points: Sequence[dict[str, Any]], axis: Axis, name: str) -> list[Line]:
    colour = OF_MEASURE[name]
    return [
        _line(points, axis, f"{name}:p50", "p50", colour),
        _line(points, axis, f"{name}:p99", "p99", colour, dashed=True),
    ]


def _line(
    points: Sequence[dict[str, Any]],
    axis: Axis,
    name: str,
    label: str,
    colour: str,
    *,
    dashed: bool = False,
) -> Line:
    found = [
        Point.of(float(point[axis.name]), interval, figure_format(name), bool(point["saturated"]))
        for point in points
        if (interval := point["figures"].get(name)) is not None
    ]
    return Line(label, colour, found, dashed)


def _tiles(points: Sequence[dict[str, Any]], axis: Axis, knee: float | None) -> list[Tile]:
    tiles = [] if knee is None else [Tile("Knee", plain(knee), "", axis.label)]
    best = (
        ("throughput", "Highest throughput"),
        ("goodput", "Highest goodput"),
        ("output_tokens", "Highest output rate"),
    )
    for name, label in best:
        found = [
            (float(interval["mean"]), float(point[axis.name]))
            for point in points
            if (interval := point["figures"].get(name)) is not None
        ]
        if found:
            highest, load = max(found)
            tiles.append(Tile(label, plain(highest), "/ s", f"at {plain(load)} {axis.unit}"))
    return tiles


def _row(point: dict[str, Any], axis: Axis, names: Sequence[str], knee: float | None) -> Row:
    return Row(
        load=plain(float(point[axis.name])),
        runs=len(point["seeds"]),
        cells=[_cell(name, point["figures"].get(name)) for name in names],
        is_knee=knee is not None and float(point[axis.name]) == knee,
        saturated=bool(point["saturated"]),
        invalid=point["invalid"],
    )


def _cell(name: str, interval: dict[str, Any] | None) -> Cell:
    figure = figure_format(name)
    if interval is None:
        return Cell("–", "")
    low, high = interval["low"], interval["high"]
    margin = ""
    if low is not None and high is not None:
        margin = figure.margin(interval["mean"], (high - low) / 2)
    return Cell(figure.text(interval["mean"]), margin)


def _level(points: Sequence[dict[str, Any]]) -> float | None:
    """Return the confidence level of the intervals, or None if each rate has only one run."""
    for point in points:
        for interval in point["figures"].values():
            if interval is not None and interval["low"] is not None:
                return float(interval["level"])
    return None
