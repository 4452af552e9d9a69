"""Objectives as users write them: what a request must meet, and what a run must."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from loadgen.errors import UsageError
from loadgen.figures import OF_RUN, STATISTICS, Figure
from loadgen.measures import BY_NAME, Objective
from loadgen.summary import Summary

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}
_REQUIREMENT = re.compile(r"\s*([a-z0-9_]+)(?:[:\s]+([a-z0-9.]+))?\s*(<=|>=)\s*(\S+)\s*")


def parse_objective(text: str) -> Objective:
    """Of each request, for goodput: ``ttft=0.5``, in seconds.

    Raises:
        UsageError: no such measure, or no number.
    """
    name, _, seconds = text.partition("=")
    if name not in BY_NAME:
        raise UsageError(f"{text}: measures are {', '.join(BY_NAME)}, as in ttft=0.5")
    return Objective(BY_NAME[name], _number(seconds, text))


@dataclass(frozen=True)
class Requirement:
    """Of a run, as in ``ttft:p99<=0.5`` or ``attainment>=0.95``."""

    figure: Figure
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Requirement":
        """Raises UsageError for what is no requirement."""
        found = _REQUIREMENT.fullmatch(text)
        if found is None:
            raise UsageError(f"{text}: a requirement is like ttft:p99<=0.5 or attainment>=0.95")
        name, statistic, comparison, bound = found.groups()
        if name in BY_NAME and statistic not in STATISTICS:
            raise UsageError(f"{text}: {name} has {', '.join(STATISTICS)}, as in {name}:p99<=0.5")
        if name not in BY_NAME and (name not in OF_RUN or statistic is not None):
            raise UsageError(f"{text}: a measure ({', '.join(BY_NAME)}) or {', '.join(OF_RUN)}")
        return cls(Figure(name, statistic), comparison, _number(bound, text))

    def found_in(self, summary: Summary) -> float | None:
        """The figure; None: the run has none."""
        return self.figure.found_in(summary.as_json())

    def met_by(self, summary: Summary) -> bool:
        """A figure that a run does not have meets nothing."""
        found = self.found_in(summary)
        return found is not None and _COMPARISONS[self.comparison](found, self.bound)

    def __str__(self) -> str:
        return f"{self.figure}{self.comparison}{self.bound:g}"


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{whole}: {text!r} is no number") from None
