"""Report of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.axis import RATE, Axis, axis_of
from loadgen.figures import figure_format
from loadgen.knee import knee_statement
from loadgen.measures import failures_in_words
from loadgen.number import exact, plain
from loadgen.report.environment import lines, subtitle
from loadgen.report.page import render
from loadgen.report.palette import OF_MEASURE
from loadgen.report.plot import Plot
from loadgen.report.rates import Line, Point, rate_plot
from loadgen.report.tile import Tile
from loadgen.validity import invalid_points

_COLUMNS = (
    "ttft:p50", "ttft:p99", "itl:p50", "itl:p99", "tpot:p50", "e2e:p50", "e2e:p99",
    "e2e:mean", "normalized_latency:mean", "throughput", "goodput", "output_tokens", "attainment",
    "failures", "in_flight",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Metrics and remarks of one rate or concurrency.

    Attributes:
        cells: mean and margin of error of each metric; the margin is "" for a single run.
        saturation: why the point is saturated; "" if unknown.
        failed: failed requests in words; "" if none failed.
    """

    load: str
    runs: int
    cells: Sequence[tuple[str, str]]
    is_knee: bool
    saturated: bool
    saturation: str
    invalid: bool
    failed: str


def sweep_page(sweep: dict[str, Any]) -> str:
    """Return the HTML report of a sweep document.

    Args:
        sweep: {"manifest", "points": [{"rate" or "concurrency", "seeds", "folders", "figures":
            {name: interval or None}, "saturated", "invalid"}], "knee": {"rate" or "concurrency",
            "why"} or None}, as `loadgen.sweep` writes it. An interval is {"mean", "low", "high",
            "runs", "level"}, with times in seconds.
    """
    axis = axis_of(sweep["points"])
    points = sorted(sweep["points"], key=lambda point: float(point[axis.name]))
    names = [name for name in _COLUMNS if any(point["figures"].get(name) for point in points)]
    valid = [point for point in points if not point["invalid"]]
    at = sweep["knee"] and float(sweep["knee"][axis.name])
    return render(
        "sweep.html.j2",
        subtitle=subtitle(sweep["manifest"]),
        manifest=lines(sweep["manifest"]),
        axis=axis,
        stopped=sweep.get("stopped", False),
        has_knee=at is not None,
        knee=knee_statement(sweep, axis),
        invalid=invalid_points(points, axis),
        level=_level(points),
        tiles=_tiles(valid, axis, sweep["knee"]),
        plots=_plots(points, axis, at),
        columns=[figure_format(name) for name in names],
        rows=[_row(point, axis, names, at) for point in points],
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
    form = figure_format(name)
    found = [
        Point.of(
            float(point[axis.name]),
            interval,
            form,
            saturated=bool(point["saturated"]),
            valid=not point["invalid"],
        )
        for point in points
        if (interval := point["figures"].get(name)) is not None
    ]
    return Line(label, colour, found, dashed)


def _tiles(points: Sequence[dict[str, Any]], axis: Axis, knee: dict[str, Any] | None) -> list[Tile]:
    tiles = []
    if knee is not None:
        at, unit = axis.of(float(knee[axis.name])).split(" ", 1)
        tiles.append(Tile("Knee", at, unit, "or more" if knee.get("lower_bound") else ""))
    best = (
        ("throughput", "Most requests answered"),
        ("goodput", "Highest goodput"),
        ("output_tokens", "Most output tokens"),
    )
    for name, label in best:
        found = [
            (float(interval["mean"]), float(point[axis.name]))
            for point in points
            if (interval := point["figures"].get(name)) is not None
        ]
        if found:
            highest, load = max(found)
            tiles.append(Tile(label, plain(highest), "per second", f"at {axis.of(load)}"))
    return tiles


def _row(point: dict[str, Any], axis: Axis, names: Sequence[str], knee: float | None) -> Row:
    return Row(
        load=exact(float(point[axis.name])),
        runs=len(point["seeds"]),
        cells=[figure_format(name).interval(point["figures"].get(name)) for name in names],
        is_knee=knee is not None and float(point[axis.name]) == knee,
        saturated=bool(point["saturated"]),
        saturation=point.get("saturation") or "",
        invalid=bool(point["invalid"]),
        failed=failures_in_words(point.get("failed") or {}),
    )


def _level(points: Sequence[dict[str, Any]]) -> float | None:
    """Return the confidence level of the intervals, or None if each rate has only one run."""
    for point in points:
        for interval in point["figures"].values():
            if interval is not None and interval["low"] is not None:
                return float(interval["level"])
    return None
