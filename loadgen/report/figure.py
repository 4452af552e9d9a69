"""Titles, units and number formats of metrics, by names such as ``ttft:p99``."""

from dataclasses import dataclass

from loadgen.measures import MEASURES
from loadgen.report.number import ms, percent, plain

_MEASURES = {measure.name: measure.title for measure in MEASURES}


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

    def margin(self, mean: float, margin: float) -> str:
        """Format the margin of error of a mean with as many decimals as the mean."""
        digits = len(self.text(mean).partition(".")[2])
        return f"± {self.scaled(margin):,.{digits}f}"

    def scaled(self, value: float) -> float:
        """Convert a value to the display unit."""
        return value * {"ms": 1e3, "%": 1e2}.get(self.unit, 1.0)


_OF_RUN = {
    "throughput": FigureFormat("Requests answered", "per second"),
    "output_tokens": FigureFormat("Output tokens", "per second"),
    "attainment": FigureFormat("Attainment", "%"),
    "goodput": FigureFormat("Goodput", "per second"),
    "failures": FigureFormat("Failed requests", "%"),
    "in_flight": FigureFormat("Requests in flight", ""),
}
_UNITS = {"s": "ms", "1/s": "per second"}


def figure_format(name: str, title: str = "", unit: str = "") -> FigureFormat:
    """Return the format of a metric; ``title`` and ``unit`` are used if the name is unknown."""
    if name in _OF_RUN:
        return _OF_RUN[name]
    measure, _, statistic = name.partition(":")
    if measure in _MEASURES:
        return FigureFormat(
            f"{_MEASURES[measure]}, {statistic}" if statistic else _MEASURES[measure], "ms"
        )
    return FigureFormat(title or name, _UNITS.get(unit, unit))
