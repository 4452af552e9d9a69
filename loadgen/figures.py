"""Scalar metrics of a run, read from its summary by names such as ``ttft:p99``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.measures import BY_NAME
from loadgen.statistics import PERCENTILES

STATISTICS = ("mean", "min", "max", *(f"p{which:g}" for which in PERCENTILES))
RUN_FIGURES = {
    "throughput": ("Requests answered", "1/s", "more"),
    "output_tokens": ("Output tokens", "1/s", "more"),
    "goodput": ("Goodput", "1/s", "more"),
    "attainment": ("Attainment", "", "more"),
    "failures": ("Failed requests", "", "less"),
    "in_flight": ("Requests in flight", "", "less"),
}
"""Metrics of a whole run: title, unit, and ``less`` if smaller values are better, else ``more``."""


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
        return 1.0 if self.name in ("attainment", "failures") else math.inf

    @property
    def better(self) -> str:
        """``less`` if smaller values are better, else ``more``."""
        return RUN_FIGURES[self.name][2] if self.statistic is None else "less"

    def value_in(self, summary: Mapping[str, Any]) -> float | None:
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
        if self.name == "in_flight":
            return float(summary["in_flight"]["mean"])
        outcomes = summary["outcomes"]
        failed = sum(outcomes["failed"].values())
        return failed / outcomes["total"] if outcomes["total"] else None


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
