"""Syntax of objectives, which apply to each request, and requirements, which apply to the run."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from loadgen.errors import UsageError
from loadgen.figures import RUN_FIGURES, STATISTICS, Figure
from loadgen.measures import BY_NAME, Objective
from loadgen.summary import Summary

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}
_WORDS = {"<=": "at most", ">=": "at least"}
_REQUIREMENT = re.compile(r"\s*([a-z0-9_]+)(?:[:\s]+([a-z0-9.]+))?\s*(<=|>=)\s*(\S+)\s*")


def parse_objective(text: str) -> Objective:
    """Parse a per-request objective in seconds, such as ``ttft=0.5``.

    Raises:
        UsageError: if the measure does not exist or the value is not a number.
    """
    name, _, seconds = text.partition("=")
    if name not in BY_NAME:
        raise UsageError(f"{text}: expected one of {', '.join(BY_NAME)}, as in ttft=0.5")
    return Objective(BY_NAME[name], _number(seconds, text))


@dataclass(frozen=True)
class Requirement:
    """A bound on a metric of the run, such as ``ttft:p99<=0.5`` or ``attainment>=0.95``."""

    figure: Figure
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Requirement":
        """Parse a requirement.

        Raises:
            UsageError: if the syntax or a name is wrong.
        """
        found = _REQUIREMENT.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{text}: expected a requirement such as ttft:p99<=0.5 or attainment>=0.95"
            )
        name, statistic, comparison, bound = found.groups()
        if name in BY_NAME and statistic not in STATISTICS:
            raise UsageError(
                f"{text}: expected {name} with one of {', '.join(STATISTICS)}, "
                f"as in {name}:p99<=0.5"
            )
        if name not in BY_NAME and (name not in RUN_FIGURES or statistic is not None):
            raise UsageError(
                f"{text}: expected a measure ({', '.join(BY_NAME)}) or one of "
                f"{', '.join(RUN_FIGURES)}"
            )
        return cls(Figure(name, statistic), comparison, _number(bound, text))

    @property
    def words(self) -> str:
        """The bound in the unit of reports, such as "at most 500 ms"."""
        return f"{_WORDS[self.comparison]} {self.figure.format.with_unit(self.bound)}"

    def measured_value(self, summary: Summary) -> float | None:
        """Return the metric's value, or None if it was not measured."""
        return self.figure.measured_value(summary.as_json())

    def met_by(self, summary: Summary) -> bool:
        """Return whether the metric was measured and its value satisfies the bound."""
        value = self.measured_value(summary)
        return value is not None and _COMPARISONS[self.comparison](value, self.bound)

    def __str__(self) -> str:
        return f"{self.figure}{self.comparison}{self.bound:g}"


def _number(text: str, context: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{context}: {text!r} is not a number") from None
