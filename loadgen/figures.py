"""Scalar metrics of a run: names such as ``ttft:p99``, values in a summary, and their format."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.measures import BY_NAME
from loadgen.number import NOTHING, ms, percent, plain
from loadgen.statistics import PERCENTILES

STATISTICS = ("mean", "min", "max", *(f"p{which:g}" for which in PERCENTILES))
RUN_FIGURES = {
    "throughput": ("Requests answered", "1/s", "more"),
    "output_tokens": ("Output tokens", "1/s", "more"),
    "goodput": ("Goodput", "1/s", "more"),
    "attainment": ("Attainment", "fraction", "more"),
    "failures": ("Failed requests", "fraction", "less"),
    "in_flight": ("Requests in flight", "", "less"),
    "cached": ("Prompt tokens from the prefix cache", "fraction", "more"),
}
"""Metrics of a whole run: title, unit, and ``less`` if smaller values are better, else ``more``."""
_SHOWN_AS = {"s": "ms", "1/s": "per second", "fraction": "%"}
"""Units in reports and tables, by the unit of the value."""


@dataclass(frozen=True)
class FigureFormat:
    """Title and display unit of a metric.

    Attributes:
        title: title without the unit.
        unit: display unit: "ms", "per second", "%" or "".
    """

    title: str
    unit: str

    def text(self, value: float | None) -> str:
        """Format a value, without the unit."""
        return {"ms": ms, "%": percent}.get(self.unit, plain)(value)

    def with_unit(self, value: float | None) -> str:
        """Format a value with its unit."""
        unit = self.unit if value is not None else ""
        return f"{self.text(value)} {unit}".rstrip()

    def interval(self, found: Mapping[str, Any] | None) -> tuple[str, str]:
        """Format mean and margin of error of an interval; the margin is "" for a single run."""
        if found is None:
            return NOTHING, ""
        mean, low, high = found["mean"], found["low"], found["high"]
        if low is None or high is None:
            return self.text(mean), ""
        digits = len(self.text(mean).partition(".")[2])
        return self.text(mean), f"± {self.scaled((high - low) / 2):,.{digits}f}"

    def scaled(self, value: float) -> float:
        """Convert a value to the display unit."""
        return value * {"ms": 1e3, "%": 1e2}.get(self.unit, 1.0)


@dataclass(frozen=True)
class Figure:
    """A scalar metric: a statistic of a per-request measure, or a metric of the whole run.

    Attributes:
        name: name of a measure, or a key of `RUN_FIGURES`.
        statistic: one of `STATISTICS` for a measure; None for a metric of the whole run.
    """

    name: str
    statistic: str | None = None

    def __str__(self) -> str:
        return self.name if self.statistic is None else f"{self.name}:{self.statistic}"

    @classmethod
    def parse(cls, name: str) -> "Figure | None":
        """Return the metric with this name, or None if there is none."""
        measure, _, statistic = name.partition(":")
        if measure in BY_NAME and statistic in STATISTICS:
            return cls(measure, statistic)
        return cls(measure) if name in RUN_FIGURES else None

    @property
    def format(self) -> FigureFormat:
        return FigureFormat(self.title, _SHOWN_AS.get(self.unit, self.unit))

    @property
    def title(self) -> str:
        if self.statistic is None:
            return RUN_FIGURES[self.name][0]
        return f"{BY_NAME[self.name].title}, {self.statistic}"

    @property
    def unit(self) -> str:
        return RUN_FIGURES[self.name][1] if self.statistic is None else BY_NAME[self.name].unit

    @property
    def upper_bound(self) -> float:
        """Largest possible value. The smallest possible value is always 0."""
        return 1.0 if self.unit == "fraction" else math.inf

    @property
    def better(self) -> str:
        """``less`` if smaller values are better, else ``more``."""
        return RUN_FIGURES[self.name][2] if self.statistic is None else "less"

    def measured_value(self, summary: Mapping[str, Any]) -> float | None:
        """Return the metric's value in a summary document, or None if it was not measured."""
        if self.statistic is not None:
            measured = summary["measures"][self.name]
            return None if measured is None else float(measured[self.statistic])
        if self.name in ("throughput", "output_tokens"):
            which = "requests" if self.name == "throughput" else self.name
            return float(summary["throughput"][which])
        if self.name in ("goodput", "attainment"):
            goodput = summary["goodput"]
            which = "requests" if self.name == "goodput" else self.name
            return None if goodput is None else float(goodput[which])
        if self.name == "cached":
            cached = summary.get("cached")  # files of earlier versions have none
            return None if cached is None else float(cached["fraction"])
        if self.name == "in_flight":
            return float(summary["in_flight"]["mean"])
        outcomes = summary["outcomes"]
        failed = sum(outcomes["failed"].values())
        return failed / outcomes["total"] if outcomes["total"] else None


def figure_format(name: str, title: str = "", unit: str = "") -> FigureFormat:
    """Return the format of a metric; ``title`` and ``unit`` are used if the name is unknown."""
    figure = Figure.parse(name)
    if figure is not None:
        return figure.format
    return FigureFormat(title or name, _SHOWN_AS.get(unit, unit))


REPORTED = (
    *(
        Figure(name, statistic)
        for name in ("ttft", "itl", "tpot", "e2e")
        for statistic in ("p50", "p99")
    ),
    Figure("e2e", "mean"),
    Figure("normalized_latency", "mean"),
    *map(Figure, RUN_FIGURES),
)
"""Metrics reported by sweeps and comparisons."""
