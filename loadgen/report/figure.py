"""Figures of runs by the names that sweeps and requirements use, such as ``ttft:p99``."""

from dataclasses import dataclass

from loadgen.measures import MEASURES
from loadgen.report.number import ms, percent, plain

_MEASURES = {measure.name: measure.title for measure in MEASURES}


@dataclass(frozen=True)
class Shown:
    """How a figure is shown.

    Attributes:
        title: without its unit.
        unit: that it is shown in: "ms", "a second", "%" or "".
    """

    title: str
    unit: str

    def text(self, value: float | None) -> str:
        """Without the unit."""
        return {"ms": ms, "%": percent}.get(self.unit, plain)(value)

    def margin(self, mean: float, margin: float) -> str:
        """What a mean may be off by, with as many digits as the mean has."""
        digits = len(self.text(mean).partition(".")[2])
        return f"± {self.scaled(margin):,.{digits}f}"

    def scaled(self, value: float) -> float:
        """In the unit."""
        return value * {"ms": 1e3, "%": 1e2}.get(self.unit, 1.0)


_OF_RUN = {
    "throughput": Shown("Requests answered", "a second"),
    "output_tokens": Shown("Output tokens", "a second"),
    "attainment": Shown("Attainment", "%"),
    "goodput": Shown("Goodput", "a second"),
    "failures": Shown("Failed requests", "%"),
    "in_flight": Shown("Requests in flight", ""),
}
_UNITS = {"s": "ms", "1/s": "a second"}


def shown(name: str, title: str = "", unit: str = "") -> Shown:
    """A figure by its name; one that is not known, as it says of itself."""
    if name in _OF_RUN:
        return _OF_RUN[name]
    measure, _, statistic = name.partition(":")
    if measure in _MEASURES:
        return Shown(
            f"{_MEASURES[measure]}, {statistic}" if statistic else _MEASURES[measure], "ms"
        )
    return Shown(title or name, _UNITS.get(unit, unit))
