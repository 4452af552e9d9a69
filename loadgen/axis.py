"""The load that a sweep varies: the offered rate, or the concurrency of closed loops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.number import counted


@dataclass(frozen=True)
class Axis:
    """Quantity on the x axis of a sweep.

    Attributes:
        name: key of the value in JSON, in tables and in folder names.
        plural: name for several values of the quantity.
        title: short title in reports.
        noun, per: unit of the value, such as "request" and "per second".
    """

    name: str
    plural: str
    title: str
    noun: str
    per: str

    @property
    def unit(self) -> str:
        """Unit of the axis, such as "requests per second"."""
        return f"{self.noun}s {self.per}"

    @property
    def label(self) -> str:
        """Label of a plot's axis."""
        return f"{self.title}, {self.unit}"

    def of(self, load: float) -> str:
        """Return a value with its unit, such as "1 request per second"."""
        return f"{counted(load, self.noun)} {self.per}"


RATE = Axis("rate", "rates", "offered", "request", "per second")
CONCURRENCY = Axis("concurrency", "concurrencies", "closed loop", "request", "in flight")


def axis_of(points: Sequence[Mapping[str, Any]]) -> Axis:
    """Return the axis of the points of a sweep document or the rows of a comparison."""
    return CONCURRENCY if any(CONCURRENCY.name in point for point in points) else RATE
