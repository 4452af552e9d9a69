"""Plots of metrics against the offered rate or the concurrency, with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from loadgen.axis import RATE, Axis
from loadgen.figures import FigureFormat
from loadgen.report.palette import placeholder_colour
from loadgen.report.plot import Drawing, Key, Plot
from loadgen.report.scale import Scale


@dataclass(frozen=True)
class Point:
    """A measured value at one offered rate or concurrency.

    Attributes:
        rate: position on the x axis.
        low, high: ends of the confidence interval; None for a single run.
        saturated: whether the rate is above saturation.
        valid: whether the measurement is valid. An invalid point is a cross beside the line.
    """

    rate: float
    mean: float
    low: float | None = None
    high: float | None = None
    saturated: bool = False
    valid: bool = True

    @classmethod
    def of(
        cls,
        rate: float,
        interval: dict[str, Any],
        form: FigureFormat,
        *,
        saturated: bool = False,
        valid: bool = True,
    ) -> "Point":
        """Convert a confidence interval, read from JSON, to the display unit."""
        ends = (interval["mean"], interval["low"], interval["high"])
        mean, low, high = (None if one is None else form.scaled(float(one)) for one in ends)
        return cls(rate, mean or 0.0, low, high, saturated, valid)


@dataclass(frozen=True)
class Line:
    """Line through points, ordered by rate."""

    label: str
    colour: str
    points: Sequence[Point]
    dashed: bool = False


def rate_plot(
    name: str,
    title: str,
    label: str,
    lines: Sequence[Line],
    *,
    knee: float | None = None,
    ideal: bool = False,
    percent: bool = False,
    log: bool = False,
    axis: Axis = RATE,
) -> Plot | None:
    """Plot lines against the rate or the concurrency, or return None if there are no points.

    Args:
        name: unique name in the page.
        label: label of the y axis, with its unit.
        knee: rate to mark as the knee.
        ideal: whether to draw the line where the measured rate equals the offered rate.
        percent: whether the y axis shows percentages.
        log: whether the y axis may be logarithmic, for a large range of values.
        axis: quantity on the x axis.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    rates = [point.rate for line in lines for point in line.points]
    along = Scale.linear(max(rates))
    upward = Scale.percentages() if percent else _upward(lines, max(rates) if ideal else 0.0, log)
    drawing = Drawing()
    axes = drawing.panels[0]
    along.along_x(axes)
    upward.along_y(axes)
    keys = [Key(line.label, line.colour, "dashed" if line.dashed else "line") for line in lines]
    keys += _guides(axes, along if ideal else None, knee)
    for line in lines:
        _draw(axes, line, upward)
    points = [point for line in lines for point in line.points]
    if any(point.saturated and point.valid for point in points):
        keys.append(Key("saturated", "muted", "hollow"))
    if not all(point.valid for point in points):
        keys.append(Key("invalid", "muted", "cross"))
    drawing.label_y(0, f"{label}{upward.label_suffix}")
    drawing.label_x(axis.label)
    return Plot(title, (drawing.svg(name, f"{title} against the {axis.name}"),), tuple(keys))


def _guides(axes: Axes, ideal: Scale | None, knee: float | None) -> list[Key]:
    """Draw the lines of ``ideal`` and ``knee``, and return their legend entries."""
    keys = []
    if ideal is not None:
        ends = [ideal.low, ideal.high]
        axes.plot(ends, ends, color=placeholder_colour("muted"), linewidth=1)
        keys.append(Key("equal to offered", "muted"))
    if knee is not None:
        axes.axvline(knee, color=placeholder_colour("ink"), linewidth=1.2, linestyle=(0, (1, 2)))
        keys.append(Key("knee", "ink", "dotted"))
    return keys


def _upward(lines: Sequence[Line], minimum_high: float, log: bool) -> Scale:
    """Return a y axis that includes all means and, if possible, all confidence intervals.

    It ends at three times the largest mean at most; intervals that exceed it are cut off.
    """
    points = [point for line in lines for point in line.points]
    low, high = min(p.mean for p in points), max(minimum_high, *(p.mean for p in points), 0.0)
    reach = max((p.high for p in points if p.high is not None), default=high)
    high = max(high, min(reach, 3 * high))
    return Scale.fitting(low, high) if log else Scale.linear(high)


def _draw(axes: Axes, line: Line, upward: Scale) -> None:
    colour = placeholder_colour(line.colour)
    style = (0, (5, 3)) if line.dashed else "solid"
    valid = [p for p in line.points if p.valid]
    bounded = [p for p in valid if p.low is not None and p.high is not None]
    rates, means = [p.rate for p in valid], [p.mean for p in valid]
    if len(bounded) > 1:
        lows = [max(p.low or 0.0, upward.low) for p in bounded]
        highs = [min(p.high or 0.0, upward.high) for p in bounded]
        axes.fill_between([p.rate for p in bounded], lows, highs, color=colour, alpha=0.16, lw=0)
    elif bounded:
        axes.vlines(
            bounded[0].rate, bounded[0].low or 0.0, bounded[0].high or 0.0, color=colour, lw=1.6
        )
    axes.plot(rates, means, color=colour, linewidth=1.8, linestyle=style)
    for point in line.points:
        marker = ("s" if line.dashed else "o") if point.valid else "x"
        fill = "none" if point.saturated else colour
        axes.plot(
            [point.rate], [point.mean], marker, color=colour, mfc=fill, ms=5.5, mew=1.4,
            clip_on=False,
        )  # fmt: skip
