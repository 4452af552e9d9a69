"""Objectives as users write them: what a request must meet, and what a run must."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from loadgen.errors import UsageError
from loadgen.measures import MEASURES, Objective
from loadgen.statistics import PERCENTILES
from loadgen.summary import Summary

_BY_NAME = {measure.name: measure for measure in MEASURES}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}
_REQUIREMENT = re.compile(r"\s*([a-z0-9_]+)(?:[:\s]+([a-z0-9.]+))?\s*(<=|>=)\s*(\S+)\s*")
_OF_RUN = ("attainment", "goodput", "failures", "throughput", "output_tokens")
_STATISTICS = ("mean", "min", "max", *(f"p{which:g}" for which in PERCENTILES))


def parse_objective(text: str) -> Objective:
    """Of each request, for goodput: ``ttft=0.5``, in seconds.

    Raises:
        UsageError: no such measure, or no number.
    """
    name, _, seconds = text.partition("=")
    if name not in _BY_NAME:
        raise UsageError(f"{text}: measures are {', '.join(_BY_NAME)}, as in ttft=0.5")
    return Objective(_BY_NAME[name], _number(seconds, text))


@dataclass(frozen=True)
class Requirement:
    """Of a run, as in ``ttft:p99<=0.5`` or ``attainment>=0.95``.

    Attributes:
        name: a measure, or ``attainment``, ``goodput``, ``failures`` (share of requests),
            ``throughput`` (requests a second), ``output_tokens`` (a second).
        statistic: of a measure.
    """

    name: str
    statistic: str | None
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Requirement":
        """Raises UsageError for what is no requirement."""
        found = _REQUIREMENT.fullmatch(text)
        if found is None:
            raise UsageError(f"{text}: a requirement is like ttft:p99<=0.5 or attainment>=0.95")
        name, statistic, comparison, bound = found.groups()
        if name in _BY_NAME and statistic not in _STATISTICS:
            raise UsageError(f"{text}: {name} has {', '.join(_STATISTICS)}, as in {name}:p99<=0.5")
        if name not in _BY_NAME and (name not in _OF_RUN or statistic is not None):
            raise UsageError(f"{text}: a measure ({', '.join(_BY_NAME)}) or {', '.join(_OF_RUN)}")
        return cls(name, statistic, comparison, _number(bound, text))

    def found_in(self, summary: Summary) -> float | None:
        """The figure; None: the run has none."""
        if self.statistic is not None:
            measured = summary.as_json()["measures"][self.name]
            return None if measured is None else float(measured[self.statistic])
        outcomes, goodput = summary.outcomes, summary.goodput
        if self.name == "failures":
            return sum(outcomes.failed.values()) / outcomes.total if outcomes.total else None
        if self.name == "throughput":
            return summary.throughput.requests
        if self.name == "output_tokens":
            return summary.throughput.output_tokens
        if goodput is None:
            return None
        return goodput.attainment if self.name == "attainment" else goodput.requests

    def met_by(self, summary: Summary) -> bool:
        """A figure that a run does not have meets nothing."""
        found = self.found_in(summary)
        return found is not None and _COMPARISONS[self.comparison](found, self.bound)

    def __str__(self) -> str:
        which = self.name if self.statistic is None else f"{self.name}:{self.statistic}"
        return f"{which}{self.comparison}{self.bound:g}"


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{whole}: {text!r} is no number") from None
