"""The load that a sweep varies: the offered rate, or the concurrency of closed loops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Axis:
    """Quantity on the x axis of a sweep.

    Attributes:
        name: key of the value in JSON, in tables and in folder names.
        title: short title in reports.
        unit: unit in reports.
    """

    name: str
    title: str
    unit: str

    @property
    def label(self) -> str:
        """Label of a plot's axis, or of a point after its value."""
        return f"{self.title}, {self.unit}"


RATE = Axis("rate", "offered", "requests per second")
CONCURRENCY = Axis("concurrency", "closed loop", "requests in flight")


def axis_of(points: Sequence[Mapping[str, Any]]) -> Axis:
    """Return the axis of the points of a sweep document or the rows of a comparison."""
    return CONCURRENCY if any(CONCURRENCY.name in point for point in points) else RATE
