"""Figures of a run by name, such as ``ttft:p99`` or ``throughput``, from its summary."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.measures import BY_NAME
from loadgen.statistics import PERCENTILES

STATISTICS = ("mean", "min", "max", *(f"p{which:g}" for which in PERCENTILES))
OF_RUN = {
    "throughput": ("Requests answered", "1/s", "more"),
    "output_tokens": ("Output tokens", "1/s", "more"),
    "goodput": ("Goodput", "1/s", "more"),
    "attainment": ("Attainment", "", "more"),
    "failures": ("Share that failed", "", "less"),
    "in_flight": ("Requests under way", "", "less"),
}
"""Of a whole run: title, unit, and what is better."""


@dataclass(frozen=True)
class Figure:
    """One number of a run.

    Attributes:
        name: a measure, or one of `OF_RUN`.
        statistic: of a measure, one of `STATISTICS`; None: it is of the run.
    """

    name: str
    statistic: str | None = None

    def __str__(self) -> str:
        return self.name if self.statistic is None else f"{self.name}:{self.statistic}"

    @property
    def title(self) -> str:
        if self.statistic is None:
            return OF_RUN[self.name][0]
        return f"{BY_NAME[self.name].title}, {self.statistic}"

    @property
    def unit(self) -> str:
        return OF_RUN[self.name][1] if self.statistic is None else BY_NAME[self.name].unit

    @property
    def most(self) -> float:
        """That it can be; the least is 0."""
        return 1.0 if self.name in ("attainment", "failures") else math.inf

    @property
    def better(self) -> str:
        """``less`` or ``more``."""
        return OF_RUN[self.name][2] if self.statistic is None else "less"

    def found_in(self, summary: Mapping[str, Any]) -> float | None:
        """From `Summary.as_json`, or what was read of it. None: the run has none."""
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


SHOWN = (
    *(
        Figure(name, statistic)
        for name in ("ttft", "itl", "tpot", "e2e")
        for statistic in ("p50", "p99")
    ),
    Figure("normalized_latency", "mean"),
    *map(Figure, OF_RUN),
)
"""What sweeps and comparisons are of."""
